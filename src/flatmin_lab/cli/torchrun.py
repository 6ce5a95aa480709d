"""`flatmin train` as one of the processes that torchrun starts: they train one model, and speak as one.

    torchrun --nproc-per-node 2 -m flatmin_lab train --data digits --method amp

torchrun tells each process its place by environment variables. The process group is open while the command runs. What
goes wrong on one rank is told by the first one, once, and every rank leaves; an error that a rank has in the middle of
a step, when the others wait for it, it tells itself.
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
from flatmin_lab.training.ranks import Ranks, Team

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def among_ranks() -> Iterator[Team]:
    """The team that torchrun started this process in; alone, where it did not, or has started no other."""
    place = {name: os.environ.get(name) for name in PLACE}
    if None in place.values() or int(place["WORLD_SIZE"] or 1) == 1:
        yield Team()
        return
    on_gpus = _open()
    team, has_met = Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size()), False
    try:
        yield team
        has_met = True
    except Exception as error:
        has_met = error is team.shared or isinstance(error, DivergedError)
        _tell(error, team, is_shared=has_met)
    finally:
        # NCCL would wait here for ranks that wait for this one; the end of the process ends their wait
        if has_met or not on_gpus:
            torch.distributed.destroy_process_group()


def _open() -> bool:
    """The process group; whether GPUs can be in it. What goes through the host goes through gloo."""
    if not torch.distributed.is_available():
        raise ImportError("this build of torch has no torch.distributed; leave torchrun out, or install another torch")
    on_gpus = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    try:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the processes that torchrun started did not find one another ({error})") from error
    return on_gpus


def _tell(error: Exception, team: Team, *, is_shared: bool) -> NoReturn:
    """As an error that the command reports; in silence, where another rank reports it."""
    lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
    if (is_shared or lost) and not team.leads:
        raise typer.Exit(explain_error(error)[1]) from error
    if lost:
        raise RunError(
            "another process of this training has ended, or answers no more, and none can go on without it; what it "
            "said stands above, or on its machine (--debug shows what was heard of it here). Go on with --resume"
        ) from error
    raise error


def device_of(name: str | None, team: Team) -> torch.device:
    """The device of that name; of several GPUs, the one that torchrun has given this process."""
    device = device_named(name)
    if team.size == 1 or device.type != "cuda":
        return device
    if ":" in str(device):
        raise ValueError(
            f"each of {team.size} processes has a GPU of its own, got --device {name}; write --device cuda"
        )
    number, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= count:
        raise ValueError(
            f"each process needs a GPU of its own, and here are {count}; start no more with --nproc-per-node, or use "
            "--device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def plan_of(request: Request, team: Team) -> Plan:
    """What the first rank plans, for it alone need have the folder; every rank reads the data, one a machine first.

    So what must be downloaded is there when the others look.
    """
    asked = {"method": request.method, "seed": request.seed, "resume": request.resume}
    flags = {**asked, "recipe's flags": dict(request.changes), "method's settings": dict(request.settings)}
    team.compare(flags, way_out="call it with the same flags on every machine")
    with team.together():
        plan = request.plan() if team.leads else None
    mine = None if plan is None else (plan.recipe.as_json(), plan.seed, plan.folder)
    known = team.told(mine)
    assert known is not None
    for turn in (True, False):
        with team.together():
            if plan is None and turn == (os.environ["LOCAL_RANK"] == "0"):
                recipe = Recipe.from_json(known[0])
                data = read_run_data(recipe, request.data, request.data_dir, download=request.download)
                plan = Plan(recipe, known[1], data, known[2])
    assert plan is not None
    return plan


def check_one_model(team: Team, *, seeds: int) -> None:
    if team.size > 1 and seeds > 1:
        raise ValueError(
            f"--seeds trains {seeds} models, and these {team.size} processes train one together; leave out --seeds, "
            "or torchrun"
        )


def in_words(team: Team) -> str:
    return "" if team.size == 1 else f"{team.size} processes, the first on "


def command_of(team: Team) -> str:
    """What begins the line that goes on with a training; what torchrun was told is not known here."""
    return "flatmin" if team.size == 1 else "torchrun … -m flatmin_lab"
