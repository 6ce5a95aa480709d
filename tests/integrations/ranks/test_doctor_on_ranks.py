"""The doctor on two gloo processes: all ranks find the same, and none waits for one that crashed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from flatmin import AMP
from flatmin.doctor import examine
from tests.integrations.ranks.processes import in_ranks
from tests.support.cases import mlp
from tests.support.doctor_cases import TrainingParts, closure_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")


def parallel(
    rank: int, *, epsilon: float = 0.1, average: bool = True, spare: bool = False, one_for_all: bool = True
) -> TrainingParts:
    torch.manual_seed(0)
    model: Any = mlp()
    whole: Any = DistributedDataParallel(model) if average else model
    base = SGD(model.parameters(), lr=0.1)
    optimizer = AMP(base, epsilon=epsilon, model=whole, sync_perturbation=one_for_all)
    torch.manual_seed(rank)
    return whole, optimizer, closure_of(whole[:1] if spare and rank else whole, optimizer)


def crashing(rank: int, where: str) -> TrainingParts:
    model, optimizer, closure = parallel(rank, average=False)[:3]

    def broken() -> Any:
        if rank:
            raise ZeroDivisionError("of the user's")
        return closure()

    if where == "make_training" and rank:
        broken()
    return (model, optimizer) if where == "answer" and rank else (model, optimizer, broken)  # type: ignore[return-value]


TRAININGS: dict[str, tuple[Callable[[int], TrainingParts], str]] = {
    "alike": (parallel, ""),
    "a perturbation a rank": (partial(parallel, one_for_all=False), ""),
    "one has its own": (lambda rank: parallel(rank, one_for_all=not rank), "sync_perturbation is True, False"),
    "another ε": (lambda rank: parallel(rank, epsilon=0.1 * (1 + rank)), "epsilon is [0.1], [0.2]"),
    "not averaged": (partial(parallel, average=False), "each would find its own Δ"),
    "another layer": (partial(parallel, average=False, spare=True), "has a gradient only on some ranks"),
}
CRASHES = ("make_training", "answer", "closure")


def told(rank: int, name: str) -> dict[str, Any]:
    make_training = partial(crashing, where=name) if name in CRASHES else TRAININGS[name][0]
    try:
        return {"told": [[f.name, f.verdict, f.seen] for f in examine(partial(make_training, rank))]}
    except TypeError as error:
        return {"told": [["refused", "error", str(error)]]}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    jobs = {name: partial(told, name=name) for name in (*TRAININGS, *CRASHES)}
    return in_ranks(jobs, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_that_do_not_agree_find_the_same(seen: list[dict[str, Any]], name: str) -> None:
    text = TRAININGS[name][1]
    for results in seen:
        findings = results[name]["told"]
        assert [which for which, verdict, _ in findings if verdict == "error"] == (["ranks"] if text else [])
        (found,) = (found for which, _, found in findings if which == "ranks")
        assert (text or "2 ranks have the same settings, weights and gradients") in found


@pytest.mark.parametrize("name", CRASHES)
def test_a_rank_that_crashes_says_so_to_the_others(seen: list[dict[str, Any]], name: str) -> None:
    healthy, ill = (results[name]["told"][-1] for results in seen)
    assert healthy == ["ranks", "error", "the examination crashed on rank 1"]
    assert ("must return" if name == "answer" else "of the user's") in ill[2]
