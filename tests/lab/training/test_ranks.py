"""What one rank knows without the others: its place, its device, its shard and its random numbers."""

from typing import Any

import pytest
import torch
import typer

from flatmin_lab.cli.process import torchrun
from flatmin_lab.cli.process.torchrun import among_ranks, device_of
from flatmin_lab.runs.events import DivergedError, RunError
from flatmin_lab.training.data_parallel import BatchSharding
from flatmin_lab.training.ranks import DistributedRankGroup, RankGroup

PLACE = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, rank: int, on_gpus: bool) -> list[str]:
    """As if torchrun had started this process and another one; what is done to the process group."""
    done: list[str] = []
    distributed = torch.distributed
    for name, value in {"RANK": str(rank), **PLACE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpus)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed, "init_process_group", done.append)
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: done.append("closed"))
    return done


def left_with(error: Exception | None, *, shared: bool = False) -> Exception | None:
    """The error that leaves `among_ranks` when that is raised inside."""
    try:
        with among_ranks() as ranks:
            ranks.shared_error = error if shared else None
            if error is not None:
                raise error
    except Exception as found:
        return found
    return None


@pytest.mark.parametrize("place", [{}, {"RANK": "0", **PLACE, "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}])
def test_without_other_processes_it_is_alone(monkeypatch: pytest.MonkeyPatch, place: dict[str, str]) -> None:
    for name in ("RANK", *PLACE):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with among_ranks() as ranks:
        assert type(ranks) is RankGroup


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_group_is_opened_for_the_devices_and_closed(closed: list[str], on_gpus: bool) -> None:
    assert left_with(None) is None
    assert closed == ["cpu:gloo,cuda:nccl" if on_gpus else "gloo", "closed"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_an_error_of_all_is_told_by_the_first(closed: list[str], rank: int) -> None:
    for error in (ValueError("wrong"), DivergedError("infinite", "a loss")):
        found = left_with(error, shared=isinstance(error, ValueError))
        if rank == 0:
            assert found is error
        else:
            assert isinstance(found, typer.Exit)
            assert found.exit_code == (2 if isinstance(error, ValueError) else 1)
    assert closed.count("closed") == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_an_error_of_one_is_told_by_itself_and_nccl_is_not_waited_for(closed: list[str], on_gpus: bool) -> None:
    error = ZeroDivisionError("alone")
    assert left_with(error) is error
    assert ("closed" in closed) is not on_gpus


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("on_gpus", [False])
def test_who_has_lost_another_process_says_so_once(closed: list[str], rank: int) -> None:
    found = left_with(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer\nmore"))
    assert isinstance(found, RunError if rank == 0 else typer.Exit)
    assert rank or "another process of this run has ended or does not respond" in str(found)


def test_every_process_has_the_gpu_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torchrun, "device_named", torch.device)
    monkeypatch.setenv("LOCAL_RANK", "1")
    ranks = DistributedRankGroup(rank=3, size=4)
    assert device_of("cuda", ranks) == torch.device("cuda", 1)
    assert chosen == [1]
    assert device_of("cpu", ranks) == torch.device("cpu")
    assert device_of("cuda:0", RankGroup()) == torch.device("cuda:0")
    with pytest.raises(ValueError, match="got --device cuda:0; write --device cuda"):
        device_of("cuda:0", ranks)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="here are 2; start no more"):
        device_of("cuda", ranks)


def test_shares_are_the_whole() -> None:
    for size in (1, 2, 3, 7):
        parts = [DistributedRankGroup(rank=rank, size=size).shard(10) for rank in range(size)]
        assert [number for part in parts for number in range(10)[part]] == list(range(10))
        lengths = [part.stop - part.start for part in parts]
        assert max(lengths) - min(lengths) <= 1


def test_a_rank_s_own_numbers_follow_from_the_common_ones() -> None:
    """Other ones on each rank and at each time, the same ones again; and what all draw afterwards is the same."""
    drawn: dict[tuple[int, int], list[torch.Tensor]] = {}
    for time in (0, 1):
        for rank in (0, 1):
            sharding = BatchSharding(DistributedRankGroup(rank=rank, size=2), torch.device("cpu"))
            sharding.draws = True
            torch.manual_seed(5)
            drawn[time, rank] = []
            for _ in range(2):
                with sharding.own_random_numbers():
                    drawn[time, rank].append(torch.rand(3))
            drawn[time, rank].append(torch.rand(3))
    assert all(torch.equal(a, b) for rank in (0, 1) for a, b in zip(drawn[0, rank], drawn[1, rank], strict=True))
    first, other = drawn[0, 0], drawn[0, 1]
    assert torch.equal(first[2], other[2])
    assert len({tuple(numbers.tolist()) for numbers in (*first[:2], *other[:2])}) == 4


def test_a_model_that_draws_nothing_leaves_the_common_numbers_alone() -> None:
    sharding = BatchSharding(DistributedRankGroup(rank=1, size=2), torch.device("cpu"))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with sharding.own_random_numbers():
        assert torch.equal(torch.rand(3), expected)
