"""The programs in examples/ run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from sklearn.datasets import load_digits

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


def test_wrong_labels_have_a_row_for_each_noise_method_and_radius(tmp_path: Path) -> None:
    found = load_digits()
    x, y = (16 * found.images).clip(0, 255).astype(np.uint8), found.target
    np.savez(tmp_path / "digits.npz", x_train=x[:400], y_train=y[:400], x_test=x[400:600], y_test=y[400:600])
    flags = [
        "--noise",
        "0",
        "0.4",
        "--methods",
        "erm",
        "amp",
        "--epsilon",
        "0.1",
        "0.3",
        "--epochs",
        "1",
        "--seeds",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "noisy_labels.py"), "--data", "digits.npz", "--device", "cpu", *flags],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [noise, method] for noise in ("0%", "40%") for method in ("erm", "amp, ε = 0.1", "amp, ε = 0.3")
    ]
    assert all(0 < float(row[2].partition(" ± ")[0]) <= 100 for row in rows)
    assert [row[4] == "–" for row in rows] == [True] * 3 + [False] * 3  # without wrong labels there are none to learn


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
