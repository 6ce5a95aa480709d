"""`flatmin reproduce`: the paper's tables and figures, trained, measured, and shown beside the paper's numbers.

Parsing. The work is in execution/runner.py, the tables in recipes/paper_tables.py, the files in runs/result_store.py;
what is shown is in reproduce_view.py.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from flatmin_lab.bench import amp_cost, time_estimate
from flatmin_lab.cli import display
from flatmin_lab.cli.commands import reproduce_view
from flatmin_lab.cli.commands.reproduce_select import Chosen, choose, exhibits_named
from flatmin_lab.cli.options import (
    DATA,
    Address,
    DataDir,
    Debug,
    Download,
    Executor,
    Gpus,
    option,
    reported,
    workplace,
)
from flatmin_lab.cli.request import read
from flatmin_lab.cli.signals import CODES, asked_to_stop
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.evaluation import post_training
from flatmin_lab.execution.cluster.run_queue import schedule_runs
from flatmin_lab.execution.cluster.scheduler import Scheduler
from flatmin_lab.execution.process_pool import Stop, cores, one_thread
from flatmin_lab.execution.runner import Run, RunOptions, run_all
from flatmin_lab.recipes.paper_tables import EXHIBITS, Exhibit
from flatmin_lab.runs.events import Epoch, Failed, Finished, Record, Stopped
from flatmin_lab.runs.result_store import PLANNED, Ledger
from flatmin_lab.system.files import standing
from flatmin_lab.system.machine import devices_named, hardware
from flatmin_lab.system.optional_deps import need

WHICH, HOW = "Which trainings", "How"
SMOKE = Path("out/smoke")  # what is no evidence is not put beside what is
COST_STEPS = 100  # a block, on a GPU


def reproduce(
    exhibits: Annotated[
        list[str] | None, typer.Argument(help=f"Tables and figures: {', '.join(EXHIBITS)}.", show_default=False)
    ] = None,
    protocol: Annotated[
        str | None,
        option("paper (200 epochs, 10 trials), short (60 epochs, 3) or smoke (seconds on a CPU); else paper."),
    ] = None,
    list_: Annotated[bool, option("What there is, what is done, and what is missing.", "--list")] = False,
    dry_run: Annotated[bool, option("What would be run, and how long it would take.", "--dry-run")] = False,
    planned: Annotated[bool, option("Carry out what was planned and is not done, in its order.", "--planned")] = False,
    plan: Annotated[bool, option("Write down in RESULTS/planned.json what is to be run, and end.", "--plan")] = False,
    seeds: Annotated[str | None, option("As in 0,1 or 0-9; else as many as the protocol has.", panel=WHICH)] = None,
    methods: Annotated[str | None, option("As in erm,amp; else all of the exhibit.", panel=WHICH)] = None,
    data: Annotated[str | None, option("As in cifar10,svhn; else all of the exhibit.", panel=WHICH)] = None,
    models: Annotated[str | None, option("As in vgg16; else all of the exhibit.", panel=WHICH)] = None,
    measure: Annotated[
        str | None, option(f"Also measure {', '.join(post_training.PARTS)}; as in attack,flatness.", panel=WHICH)
    ] = None,
    limit: Annotated[int | None, option("At most so many trainings now.", min=1, panel=WHICH)] = None,
    retry: Annotated[bool, option("Try those again that have failed.", "--retry", panel=WHICH)] = False,
    results: Annotated[
        Path | None, option("The folder of the result files; else results, for smoke out/smoke/results.", panel=HOW)
    ] = None,
    runs: Annotated[
        Path | None, option("The folder of the runs, with checkpoints; else runs, for smoke out/smoke/runs.", panel=HOW)
    ] = None,
    data_dir: DataDir = DATA,
    download: Download = False,
    device: Annotated[str | None, option("cpu, cuda:0, or cuda:0,cuda:2; else all GPUs there are.", panel=HOW)] = None,
    together: Annotated[
        int | None, option("So many at once on a GPU; else as many as make it faster.", min=1, panel=HOW)
    ] = None,
    workers: Annotated[
        int | None, option("On a CPU: processes, else one a core. On a cluster: at most so many.", min=1, panel=HOW)
    ] = None,
    checkpoint_epochs: Annotated[
        int, typer.Option(help="A checkpoint every so many epochs.", min=1, rich_help_panel=HOW)
    ] = 10,
    executor: Executor = "local",
    address: Address = None,
    gpus: Gpus = None,
    debug: Debug = False,
) -> None:
    """The paper's tables and figures from your own trainings, beside its numbers; killed, the same command goes on."""
    with reported(debug):
        need("flatmin_lab.report.paper.tables", "flatmin reproduce")
        above = SMOKE if protocol == "smoke" else Path()
        ledger, console = Ledger(results or above / "results", runs or above / "runs"), display.terminal()
        exhibits_ = exhibits_named(exhibits or (EXHIBITS if list_ else ()), protocol or "paper")
        if list_:
            reproduce_view.catalogue(exhibits_, ledger)
            return
        narrowed = {"seeds": seeds, "methods": methods, "data": data, "models": models, "measure": measure}
        chosen = choose(exhibits_, ledger, planned=planned, plan=plan, protocol=protocol, **narrowed)
        if plan:
            new = ledger.plan(chosen.runs, datetime.now(timezone.utc).date())
            typer.echo(f"{new} of {len(chosen.runs)} trainings are new in {ledger.results / PLANNED}")
            return
        todo = chosen.due(retry=retry, limit=limit)
        reproduce_view.what_is_there(console, chosen, retry=retry)
        for place in (ledger.results, ledger.runs):
            _check_place(place)
        asked: dict[str, Any] = {"address": address, "gpus": gpus, "device": device, "workers": workers}
        with workplace(executor, **asked, console=console) as where:
            # a missing file now, and not in hours
            sets, lacking = _read({run.job.recipe.data for run in todo}, data_dir, download=download)
            if lacking and not dry_run:
                raise FileNotFoundError("; ".join(lacking))
            for text in lacking:
                display.say(console, f"note: {text}", style="yellow")
            if dry_run:
                _dry_run(todo, chosen, sets, where, workers, console)
                return
            options = RunOptions(ledger, str(data_dir), together, checkpoint_epochs)
            with asked_to_stop() as stop:
                failed, reason = _followed(_records(todo, options, where, sets, workers, stop), todo, console, stop)
        for one in chosen.trained:
            reproduce_view.filled(one, ledger, chosen)
        if reason is not None:
            display.say(console, f"stopped by {reason}; the same command goes on")
            raise typer.Exit(CODES[reason])
        for one in chosen.measured:
            _cost(one, ledger, _first(where), data_dir, download, console)
        if failed:
            raise typer.Exit(1)


def _read(names: set[str], root: Path, *, download: bool) -> tuple[dict[str, Dataset], list[str]]:
    """The data sets, and what is wrong with those that are not there."""
    sets, lacking = {}, []
    for name in sorted(names):
        try:
            sets[name] = read(name, root, download=download, size=None)
        except FileNotFoundError as error:
            lacking.append(str(error))
    return sets, lacking


def _check_place(place: Path) -> None:
    """Can something be written there?"""
    above = standing(place)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(
            f"{place} cannot be written to (look at {above}); choose other places with --results and --runs"
        )


def _dry_run(
    todo: Sequence[Run],
    chosen: Chosen,
    sets: dict[str, Dataset],
    where: Scheduler | list[str],
    workers: int | None,
    console: Console,
) -> None:
    """What would run, and an estimate of the time from a few steps of each kind."""
    for one in chosen.measured:
        typer.echo(f"{one.name}: some steps of {' and '.join(r.method for r in one.recipes)}, and no training")
    if not chosen.runs:
        return
    known = [run.job for run in todo if chosen.state(run.job) != "unmeasured"]
    training = [job for job in known if job.recipe.data in sets]
    device = _first(where)
    on_cpu = device.type == "cpu"
    with display.busy(console) as say, one_thread() if on_cpu else nullcontext():
        seconds = time_estimate.seconds_of_all(training, sets, device=device, say=say)
    reproduce_view.would_run(todo, chosen, {job.key: took for job, took in zip(training, seconds, strict=True)})
    if not training:
        return
    if isinstance(where, Scheduler):
        beside, count = where.room(), f"{where.room()} at once, if the cluster's nodes were like this one"
    else:
        beside = min(workers or cores(), max(len(todo), 1)) if on_cpu else len(where)
        count = f"{beside} {'process' if on_cpu else 'GPU'}{('es' if on_cpu else 's') if beside > 1 else ''}"
    total = max([sum(seconds) / beside, *seconds])
    display.say(
        console,
        f"{len(training)} trainings, some {reproduce_view.time(total)} on {hardware(device)} with {count}; "
        f"from a few steps each, one training at a time{'' if on_cpu else ' on a GPU (several take less)'}; "
        "begun ones have less to do, "
        "and measuring comes on top",
    )


def _first(where: Scheduler | list[str]) -> torch.device:
    """What is measured in some steps is measured on this machine."""
    return torch.device(devices_named(None)[0] if isinstance(where, Scheduler) else where[0])


def _records(
    todo: Sequence[Run],
    options: RunOptions,
    where: Scheduler | list[str],
    sets: Mapping[str, Dataset],
    workers: int | None,
    stop: Stop,
) -> Iterator[tuple[int, Record]]:
    if isinstance(where, Scheduler):
        return schedule_runs(todo, options, where, sets, stop=stop)
    count = (workers or cores()) if where == ["cpu"] else options.at_once
    return run_all(todo, options._replace(at_once=count), devices=where, workers=workers, stop=stop)


def _followed(
    records: Iterable[tuple[int, Record]], todo: Sequence[Run], console: Console, stop: Stop
) -> tuple[int, str | None]:
    """Show what is said of all, until they have ended; how many failed, and what stopped it."""
    failed, reason = 0, None
    if not todo:
        return failed, reason
    width = max(len(run.job.recipe.name) for run in todo) + 1
    with display.bars(console) as progress:
        task = progress.add_task("trainings", total=sum(run.job.recipe.epochs for run in todo), numbers="")
        done = [0] * len(todo)
        ended = 0
        for number, record in records:
            job = todo[number].job
            who = f"{job.recipe.name:{width}} seed {job.seed}"
            for text, style in reproduce_view.said(record, todo[number]):
                display.say(console, f"{who}  {text}", style=style)
            match record:
                case Epoch():
                    done[number] = record.epoch
                case Finished() | Failed():
                    done[number], ended = job.recipe.epochs, ended + 1
                    failed += isinstance(record, Failed) and not record.busy
                case Stopped():
                    reason = record.reason
            progress.update(task, completed=sum(done), numbers=f"{ended} of {len(todo)} trainings")
        reason = stop() if reason is not None else None
    return failed, reason


def _cost(
    exhibit: Exhibit, ledger: Ledger, where: torch.device, data_dir: Path, download: bool, console: Console
) -> None:
    """Measure ERM's and AMP's steps in turns, and write it down."""
    recipes = {recipe.method: recipe for recipe in exhibit.recipes}
    pictures = read(recipes["erm"].data, data_dir, download=download, size=None).to(where)
    with display.busy(console) as say:
        say("steps of ERM and AMP in turns")
        found = amp_cost.cost(recipes, pictures, device=where, steps=COST_STEPS if where.type == "cuda" else 1)
    reproduce_view.costs(found, exhibit.protocol, str(ledger.write_cost(exhibit.protocol, found)))
