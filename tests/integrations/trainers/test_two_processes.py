"""Two gloo processes under Trainer and Accelerate: replicas stay equal to the last bit.

Each process is this file as a program, with a folder to write to.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator

import flatmin
from flatmin.integrations.accelerate import Window
from flatmin.integrations.transformers import AMPTrainer
from tests import HANG_SECONDS, PYTHONPATH
from tests.integrations.trainers.small_transformer import arguments, sentences, small_gpt, weights
from tests.support.cases import same
from tests.support.ports import reserved_port

ROWS = 16
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")


def with_trainer(folder: Path, **settings: Any) -> dict[str, Any]:
    optim = {"optim": settings.pop("optim", "adamw_torch_fused"), "ddp_find_unused_parameters": False}
    args = arguments(folder, gradient_accumulation_steps=2, ddp_backend="gloo", **optim)
    model = small_gpt(dropout=settings.pop("dropout", 0.1))
    trainer = AMPTrainer(model=model, args=args, train_dataset=sentences(ROWS), epsilon=0.1, **settings)
    trainer.train()
    assert int(os.environ["WORLD_SIZE"]) == trainer.accelerator.num_processes
    return {"weights": weights(model), "steps": trainer.state.global_step}


def resumed_between_evaluations(folder: Path) -> dict[str, Any]:
    """An automatic radius: a training, and one that goes on from its checkpoint."""

    def train(name: str, checkpoint: Path | None = None) -> AMPTrainer:
        saved = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 3}
        fast = {"learning_rate": 1.0, "optim": "sgd", "num_train_epochs": 4, "gradient_accumulation_steps": 2}
        args = arguments(folder / name, ddp_backend="gloo", ddp_find_unused_parameters=False, **saved, **fast)
        rows, model = sentences(40), small_gpt(dropout=0.0)
        trainer = AMPTrainer(model, args, train_dataset=rows[:ROWS], eval_dataset=rows[ROWS:], epsilon="auto")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return trainer

    straight = train("straight")
    resumed = train("resumed", folder / "straight" / "checkpoint-6")
    found, expected = (one.optimizer.param_groups[0]["epsilon"] for one in (resumed, straight))
    return {"found": found, "expected": expected, "same": same(weights(resumed.model), weights(straight.model))}


def with_accelerate(**settings: Any) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_gpt()
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1, momentum=0.9), **{"epsilon": 0.1, **settings}, model=model)
    loader: DataLoader[dict[str, Tensor]] = DataLoader(sentences(ROWS), batch_size=2)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    window = Window(accelerator, prepared, optimizer)
    prepared.train()
    steps = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(prepared):
                window.backward(prepared, **batch)
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
    return {"weights": weights(model), "steps": steps}


def runs(folder: Path, processes: int, port: int) -> list[dict[str, Any]]:
    """What each process saw."""
    common = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.trainers.test_two_processes", str(folder)],
            env={**os.environ, **common, "WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return [torch.load(folder / f"rank{rank}of{processes}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with reserved_port() as port:
        return runs(tmp_path_factory.mktemp("two"), 2, port)


JOBS = ["trainer", "trainer-n2", "accelerate", "trainer-apart", "accelerate-apart", "accelerate-still"]


@pytest.mark.parametrize("job", JOBS)
def test_replicas_stay_equal_to_the_last_bit(seen: list[dict[str, Any]], job: str) -> None:
    first, second = seen
    assert same(first[job]["weights"], second[job]["weights"])
    assert all(weight.isfinite().all() for weight in first[job]["weights"])
    assert first[job]["steps"] == second[job]["steps"] == 4  # 16 rows, two processes, windows of two twos, two epochs


def test_two_processes_are_one_with_batches_twice_as_large(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    """Sentences have unequal numbers of labels: Δ and the step come from the mean over all of them."""
    model = small_gpt(dropout=0.0)
    args = arguments(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4, optim="sgd")
    AMPTrainer(model=model, args=args, train_dataset=sentences(ROWS), epsilon=0.1).train()
    for one, two in zip(weights(model), seen[0]["trainer-sgd"]["weights"], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    assert not same(weights(model), weights(small_gpt()))


def test_an_automatic_radius_of_two_processes_is_resumed_between_evaluations(seen: list[dict[str, Any]]) -> None:
    """Each process has measured its own part of the data."""
    first, second = (one["resumed"] for one in seen)
    assert first == second
    assert first["found"] == first["expected"] != 0.1
    assert first["same"]


def test_each_way_of_training_is_one_of_its_own(seen: list[dict[str, Any]]) -> None:
    """So that the law above compares runs in which something happened."""
    first, _ = seen
    assert not same(first["trainer"]["weights"], first["trainer-n2"]["weights"])
    assert not same(first["trainer-n2"]["weights"], first["trainer-apart"]["weights"])
    assert not same(first["accelerate"]["weights"], first["accelerate-apart"]["weights"])


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    seen = {
        "trainer": with_trainer(folder / "trainer"),
        "trainer-n2": with_trainer(folder / "trainer", inner_iter=2),
        "accelerate": with_accelerate(),
        "trainer-apart": with_trainer(folder / "trainer", inner_iter=2, sync_perturbation=False),
        "accelerate-apart": with_accelerate(sync_perturbation=False),
        "accelerate-still": with_accelerate(sync_perturbation=False, epsilon=0.0),
        "trainer-sgd": with_trainer(folder / "trainer", dropout=0.0, optim="sgd"),
        "resumed": resumed_between_evaluations(folder / "resumed"),
    }
    torch.save(seen, folder / f"rank{rank}of{os.environ['WORLD_SIZE']}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
