"""`flatmin train` under torchrun: several processes train one model and report as one.

    torchrun --nproc-per-node 2 -m flatmin_lab train --data digits --method amp

torchrun gives each process its rank in environment variables. The process group is open while the command runs. An
error on one rank is reported once, by the first rank, and every rank exits; an error in the middle of a step, when the
other ranks are waiting, is reported by the rank where it occurs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import typer

from flatmin_lab.cli.options import explain_error
from flatmin_lab.cli.request import Plan, Request, read_run_data
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.events import DivergedError, RunError
from flatmin_lab.system.machine import device_named
from flatmin_lab.training.ranks import DistributedRankGroup, RankGroup

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def among_ranks() -> Iterator[RankGroup]:
    """The group of processes that torchrun started; a single process otherwise."""
    place = {name: os.environ.get(name) for name in PLACE}
    if None in place.values() or int(place["WORLD_SIZE"] or 1) == 1:
        yield RankGroup()
        return
    on_gpus = _open()
    ranks, has_met = (
        DistributedRankGroup(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size()),
        False,
    )
    try:
        yield ranks
        has_met = True
    except Exception as error:
        has_met = error is ranks.shared_error or isinstance(error, DivergedError)
        _tell(error, ranks, is_shared=has_met)
    finally:
        # NCCL would wait here for ranks that wait for this one; the end of this process releases them
        if has_met or not on_gpus:
            torch.distributed.destroy_process_group()


def _open() -> bool:
    """Open the process group; whether it has NCCL for GPUs. Tensors on the host go through gloo."""
    if not torch.distributed.is_available():
        raise ImportError(
            "this build of torch has no torch.distributed; run without torchrun, or install another torch"
        )
    on_gpus = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    try:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the processes that torchrun started could not connect ({error})") from error
    return on_gpus


def _tell(error: Exception, ranks: RankGroup, *, is_shared: bool) -> NoReturn:
    """Raise the error for the command to report, or exit silently if another rank reports it."""
    lost = _is_of_connection(error)
    if (is_shared or lost) and not ranks.is_main:
        raise typer.Exit(explain_error(error)[1]) from error
    if lost:
        raise RunError(
            "another process of this run has ended or does not respond, and none can continue without it; its error "
            "is above, or on its machine (--debug shows what this process saw). Resume with --resume"
        ) from error
    raise error


def _is_of_connection(error: Exception) -> bool:
    """NCCL's errors have a type; gloo raises a plain RuntimeError, known only by its source file, which it names."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def device_of(name: str | None, ranks: RankGroup) -> torch.device:
    """The device of that name; of several GPUs, the one that torchrun assigned to this process."""
    device = device_named(name)
    if ranks.size == 1 or device.type != "cuda":
        return device
    if device != torch.device("cuda"):  # it names a GPU
        raise ValueError(
            f"each of {ranks.size} processes has a GPU of its own, got --device {name}; write --device cuda"
        )
    number, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= count:
        raise ValueError(
            f"each process needs a GPU of its own, but there are {count}; start no more with --nproc-per-node, or use "
            "--device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def plan_of(request: Request, ranks: RankGroup) -> Plan:
    """The first rank's plan, as only it needs the folder. Every rank reads the data, one rank per machine first.

    So a download is complete when the others read.
    """
    asked = {"method": request.method, "seed": request.seed, "resume": request.resume}
    flags = {**asked, "recipe's flags": dict(request.changes), "method's settings": dict(request.settings)}
    ranks.check_equal(flags, way_out="use the same flags on every machine")
    with ranks.raise_together():
        plan = request.plan() if ranks.is_main else None
    mine = None if plan is None else (plan.recipe.as_json(), plan.seed, plan.folder)
    known = ranks.broadcast(mine)
    assert known is not None
    for turn in (True, False):
        with ranks.raise_together():
            if plan is None and turn == (os.environ["LOCAL_RANK"] == "0"):
                recipe = Recipe.from_json(known[0])
                data = read_run_data(recipe, request.data, request.data_dir, download=request.download)
                plan = Plan(recipe, known[1], data, known[2])
    assert plan is not None
    return plan


def check_one_model(ranks: RankGroup, *, seeds: int) -> None:
    if ranks.size > 1 and seeds > 1:
        raise ValueError(
            f"--seeds trains {seeds} models, but these {ranks.size} processes train one together; leave out --seeds, "
            "or torchrun"
        )


def in_words(ranks: RankGroup) -> str:
    return "" if ranks.size == 1 else f"{ranks.size} processes, the first on "


def command_of(ranks: RankGroup) -> str:
    """The start of the command line that resumes a run; torchrun's own arguments are not known here."""
    return "flatmin" if ranks.size == 1 else "torchrun … -m flatmin_lab"
