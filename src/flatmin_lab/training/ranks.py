"""The ranks: processes that train one model together, each with a shard of every batch.

    RankGroup()                              one process alone; no communication
    DistributedRankGroup(rank=0, size=2)     one of two, in an open process group

What one process decides for itself, ranks must decide together: when to stop, when to save, whether a loss is finite. A
rank that left while the others wait for it would block them forever. So whatever may end a run is asked of all ranks
at the same point, and an error of one is an error of all (`raise_together`). The main rank's clock and files count.

Every method but `shard` must be called by all ranks, in the same order.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from flatmin.core import distributed
from flatmin_lab.runs.events import OtherRankError, OtherRankRefusedError

T = TypeVar("T")
REQUEST_ERRORS = (
    ValueError,
    TypeError,
    ImportError,
    FileNotFoundError,
    FileExistsError,
)  # an invalid request


class RankGroup:
    """A single process.

    >>> alone = RankGroup()
    >>> alone.is_main, alone.shard(10), alone.first(None), alone.main_flags(True, False)
    (True, slice(0, 10, None), None, [True, False])
    """

    rank, size = 0, 1
    shared_error: Exception | None = None  # an error that all ranks know of

    @property
    def is_main(self) -> bool:
        """Is this the main rank, which has the folder and prints?"""
        return self.rank == 0

    def shard(self, count: int) -> slice:
        """The rank's slice of `count` things; the sizes differ by one at most.

        >>> [DistributedRankGroup(rank=rank, size=3).shard(10) for rank in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
        """
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def any(self, flag: bool) -> bool:
        """Is the flag set on any rank?"""
        return flag

    def main_flags(self, *flags: bool) -> list[bool]:
        """The main rank's flags: its clock counts."""
        return list(flags)

    def all_gather(self, thing: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        return [thing]

    def broadcast(self, thing: T) -> T:
        """The main rank's value."""
        return thing

    def first(self, thing: T | None) -> T | None:
        """The value of the first rank that has one."""
        return next((found for found in self.all_gather(thing) if found is not None), None)

    def check_equal(self, mine: Mapping[str, object], *, way_out: str) -> None:
        """Raise on every rank if these values are not the same on all of them."""

    def raise_together(self) -> AbstractContextManager[None]:
        """A block without communication: if one rank raises in it, all raise at its end."""
        return nullcontext()


class DistributedRankGroup(RankGroup):
    """One of several ranks. Small values travel through the host, so that no rank waits for its device."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def any(self, flag: bool) -> bool:
        number = torch.tensor(int(flag))
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return bool(number)

    def main_flags(self, *flags: bool) -> list[bool]:
        numbers = torch.tensor([int(flag) for flag in flags])
        torch.distributed.broadcast(numbers, src=0)
        return [bool(number) for number in numbers]

    def all_gather(self, thing: T) -> list[T]:
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, thing)
        return found

    def broadcast(self, thing: T) -> T:
        things: list[Any] = [thing if self.is_main else None]
        torch.distributed.broadcast_object_list(things, src=0)
        value: T = things[0]
        return value

    def check_equal(self, mine: Mapping[str, object], *, way_out: str) -> None:
        everyone = torch.distributed.group.WORLD
        with self.raise_together():
            distributed.check_same(mine, [everyone], device=torch.device("cpu"), way_out=way_out)

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        found = self.all_gather(None if own is None else (_describe(own), isinstance(own, REQUEST_ERRORS)))
        for rank, what in enumerate(found):
            if what is not None:
                text, is_refused = what
                other = OtherRankRefusedError if is_refused else OtherRankError
                self.shared_error = own or other(f"rank {rank} of {self.size}: {text}")
                raise self.shared_error


def _describe(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, (*REQUEST_ERRORS, OSError, RuntimeError)) else f"{type(error).__name__}: {text}"


# ---- checks before the first step: enough images for every rank, and the same run on all


def check_batches(model: nn.Module, *, size: int, count: int, processes: int) -> None:
    """Batches of `size` from `count` images over so many processes: BatchNorm needs two images per shard."""
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    smallest = min(size, count % size or size)
    left = f"leaves one of {processes} processes {smallest // processes} of the {smallest} images of a batch"
    if norms and smallest // processes < 2:
        left = left if processes > 1 else f"leaves one of {count} images alone"
        raise ValueError(
            f"BatchNorm needs at least two images per batch, but a batch size of {size} {left}; "
            "choose another --batch-size"
        )
    if smallest < processes:
        raise ValueError(
            f"every process needs an image of every batch, but a batch size of {size} {left}; "
            "choose another --batch-size, or fewer processes"
        )


def check_same_run(
    config: Mapping[str, Any], device: torch.device, ranks: RankGroup, *, checkpoint_epochs: int
) -> None:
    """Raise where the ranks differ: versions first, because with different versions the rest may not be comparable."""
    ranks.check_equal(
        {key: config[key] for key in ("flatmin", "commit", "torch")},
        way_out="install the same on every machine (for a source without git history, FLATMIN_COMMIT names the commit)",
    )
    asked = {**config["recipe"], "seed": config["seed"], "checkpoint_epochs": checkpoint_epochs}
    way_out = "use the same flags on every machine"
    ranks.check_equal({**asked, "kind of device": device.type}, way_out=way_out)
    ranks.check_equal(
        {"data set (SHA-256)": config["data_sha256"]},
        way_out="put the same files on every machine, or name them with --data",
    )
