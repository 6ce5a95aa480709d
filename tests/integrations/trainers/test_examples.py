"""The programs in examples/ run as they stand."""

import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests import HANG_SECONDS, ROOT

# gloo, now and then, in a process that is done and leaves: with plain SGD in place of AMP too (1 of 19, torch 2.13)
ABORTED = "terminate called without an active exception"
EXAMPLES = ROOT / "examples"


def test_a_transformer_has_a_matched_radius() -> None:
    flags = ["--epsilon", "0", "auto", "--epochs", "2", "--seeds", "1"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "transformer.py"), *flags],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "auto"]
    assert lines[2].endswith("0.000 to 0.000")
    assert not lines[3].endswith(" 0.100")  # it has moved


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.parametrize("flags", [[], ["--apart"]])
def test_torchrun_trains_equal_replicas(flags: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for _ in range(3):
        done = subprocess.run(
            [*command, str(EXAMPLES / "several_gpus.py"), *flags],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank (\d) of 2: error ([\d.]+)%, weights add up to (-?[\d.]+)", done.stdout)
    assert {rank for rank, _, _ in found} == {"0", "1"}
    assert len({weights for _, _, weights in found}) == 1
    assert all(float(error) < 20 for _, error, _ in found)
