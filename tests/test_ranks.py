"""Two gloo processes: replicas stay equal to the last bit, and tensors spread over ranks count whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from cases import METHODS, same
from ranks import JOBS, RANKS, work

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every job of ranks.py returned, for each rank."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn(work, args=(str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("job", [name for name in JOBS if name.startswith("ddp")])
def test_two_ranks_stay_equal_to_the_last_bit(seen: list[dict[str, Any]], job: str) -> None:
    first, second = (results[job] for results in seen)
    assert same(first["weights"], second["weights"])
    assert same(first["momentum"], second["momentum"])
    assert all(tensor.isfinite().all() for tensor in (*first["weights"], *first["momentum"]))
    assert first["skipped"] == second["skipped"] == [False, False, job.endswith("spoilt"), False, False]


def test_every_method_was_trained_on_two_ranks(seen: list[dict[str, Any]]) -> None:
    assert all(f"ddp-{method}" in seen[0] for method in METHODS)


def test_tensors_spread_over_ranks_count_whole(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        for name, (spread, whole) in results["dtensors"].items():
            torch.testing.assert_close(spread, whole, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_sharded_weights_are_trained_as_whole_ones(seen: list[dict[str, Any]], inner_iter: int) -> None:
    for results in seen:
        job = results[f"sharded-{inner_iter}"]
        torch.testing.assert_close(job["sharded"], job["single"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("ball", "bound"), [("global", 0.1), ("group", 0.1), ("tensor", 0.1 * 3**0.5)])
def test_a_random_point_of_sharded_weights_has_one_radius(seen: list[dict[str, Any]], ball: str, bound: float) -> None:
    first, second = (results[f"rmp-{ball}"]["lengths"] for results in seen)
    assert first == second
    assert 0.5 * bound < max(first) <= bound * (1 + 1e-6)
