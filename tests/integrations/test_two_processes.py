"""Two gloo processes under Trainer and Accelerate: replicas stay equal to the last bit, and are one process's training."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import flatmin  # noqa: E402
from cases import same  # noqa: E402
from flatmin.integrations.transformers import AMPTrainer  # noqa: E402
from small_transformer import arguments, sentences, small_gpt, weights  # noqa: E402

HERE = Path(__file__).parent
SECONDS = 120  # for processes that wait for one another for ever
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def trainings(folder: Path, processes: int) -> list[dict[str, Any]]:
    """What hugging_ranks.py saw in each process."""
    paths = [str(Path(flatmin.__file__).parents[1]), str(HERE), str(HERE.parent)]
    common = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "hugging_ranks.py"), str(folder)],
            env={**os.environ, **common, "WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [torch.load(folder / f"rank{rank}of{processes}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trainings(tmp_path_factory.mktemp("two"), 2)


JOBS = ["trainer", "trainer-n2", "accelerate", "trainer-apart", "accelerate-apart"]


@pytest.mark.parametrize("job", JOBS)
def test_replicas_stay_equal_to_the_last_bit(seen: list[dict[str, Any]], job: str) -> None:
    first, second = seen
    if job not in first:
        pytest.skip("this AMP has no sync_perturbation")
    assert same(first[job]["weights"], second[job]["weights"])
    assert all(weight.isfinite().all() for weight in first[job]["weights"])
    assert first[job]["steps"] == second[job]["steps"] == 4  # 16 rows, two processes, windows of two twos, two epochs


def test_two_processes_are_one_with_batches_twice_as_large(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    """Sentences have unequal numbers of labels: Δ and the step come from the mean over all of them."""
    model = small_gpt(dropout=0.0)
    args = arguments(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4, optim="sgd")
    AMPTrainer(model=model, args=args, train_dataset=sentences(16), epsilon=0.1).train()
    for one, two in zip(weights(model), seen[0]["trainer-sgd"]["weights"], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    assert not same(weights(model), weights(small_gpt()))


def test_each_way_of_training_is_one_of_its_own(seen: list[dict[str, Any]]) -> None:
    """So that the law above compares trainings in which something happened."""
    first, _ = seen
    assert not same(first["trainer"]["weights"], first["trainer-n2"]["weights"])
    if "trainer-apart" in first:
        assert not same(first["trainer"]["weights"], first["trainer-apart"]["weights"])
