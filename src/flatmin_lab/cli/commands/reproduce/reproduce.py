"""`flatmin reproduce`: the paper's tables and figures, trained, measured, and shown beside the paper's numbers.

Here are its flags. Runs are executed by execution/runner.py, tables are in recipes/experiments, files in
runs/result_store.py, and the output is in reproduce_view.py.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from time import time
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console

from flatmin_lab.bench import amp_cost, time_estimate
from flatmin_lab.cli import display
from flatmin_lab.cli.commands.reproduce import reproduce_view
from flatmin_lab.cli.commands.reproduce.reproduce_select import Selection, experiments_named, select_runs, sharing
from flatmin_lab.cli.options import (
    DEFAULT_DATA_DIR,
    Address,
    DataDir,
    Debug,
    Download,
    Executor,
    Gpus,
    open_executor,
    option,
    report_errors,
)
from flatmin_lab.cli.process.signals import exit_code, stop_on_signals
from flatmin_lab.cli.progress_columns import COMPILING, SECONDS_OF_EPOCHS
from flatmin_lab.cli.request import read_data
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.evaluation import post_training
from flatmin_lab.execution.deadline import Deadline
from flatmin_lab.execution.pace import started_in_time
from flatmin_lab.execution.process_pool import cores
from flatmin_lab.execution.run_queue import RunExecutor, run_all
from flatmin_lab.execution.runner import Run, RunOptions
from flatmin_lab.execution.task_queue import Stop
from flatmin_lab.recipes.experiments import EXPERIMENTS, Experiment
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Postponed, Stopped
from flatmin_lab.runs.result_store import PLANNED, ResultStore
from flatmin_lab.system.files import nearest_existing
from flatmin_lab.system.machine import hardware
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.threads import computing_with

WHICH, HOW = "Which runs", "Execution"
SMOKE = Path("out/smoke")  # kept apart: these results are not evidence
COST_STEPS = 100  # in a block, on a GPU


def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(help=f"Tables and figures: {', '.join(EXPERIMENTS)}.", show_default=False)
    ] = None,
    protocol: Annotated[
        str | None,
        option(
            "paper (200 epochs, 10 trials, as in the published code), paper-v2 (the same, as in the code's second "
            "version and the paper's text), short (60 epochs, 3 trials, otherwise like paper-v2) or smoke (tiny, for "
            "a CPU, not evidence); default: paper."
        ),
    ] = None,
    list_: Annotated[bool, option("List all tables and figures, what is done, and what is missing.", "--list")] = False,
    dry_run: Annotated[bool, option("Show what would run, and how long it would take.", "--dry-run")] = False,
    planned: Annotated[
        bool, option("Execute the planned runs (of these tables) that are not done yet.", "--planned")
    ] = False,
    plan: Annotated[bool, option("Record the runs in RESULTS/planned.json as planned, and exit.", "--plan")] = False,
    seeds: Annotated[str | None, option("Seeds, such as 0,1 or 0-9; default: the protocol's.", panel=WHICH)] = None,
    methods: Annotated[
        str | None, option("Methods, such as erm,amp; default: all in the experiment.", panel=WHICH)
    ] = None,
    data: Annotated[
        str | None, option("Data sets, such as cifar10,svhn; default: all in the experiment.", panel=WHICH)
    ] = None,
    models: Annotated[str | None, option("Models, such as vgg16; default: all in the experiment.", panel=WHICH)] = None,
    measure: Annotated[
        str | None,
        option(f"What else to measure, separated by commas: {', '.join(post_training.PARTS)}.", panel=WHICH),
    ] = None,
    limit: Annotated[int | None, option("Execute at most this many runs now.", min=1, panel=WHICH)] = None,
    minutes: Annotated[
        float | None,
        option("Start only runs that will end within this many minutes; default: no limit.", panel=WHICH),
    ] = None,
    retry: Annotated[bool, option("Retry failed runs.", "--retry", panel=WHICH)] = False,
    results: Annotated[
        Path | None, option("Folder for result files; default: results, or out/smoke/results for smoke.", panel=HOW)
    ] = None,
    runs: Annotated[
        Path | None,
        option("Folder for the runs and their checkpoints; default: runs, or out/smoke/runs for smoke.", panel=HOW),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    download: Download = False,
    device: Annotated[str | None, option("cpu, cuda:0, or cuda:0,cuda:2; default: all GPUs.", panel=HOW)] = None,
    together: Annotated[
        int | None,
        option(
            "How many runs to train at once on a GPU; default: as many as increase the throughput.", min=1, panel=HOW
        ),
    ] = None,
    workers: Annotated[
        int | None,
        option(
            "On a CPU: how many processes; default: one per core. On a cluster: at most this many.", min=1, panel=HOW
        ),
    ] = None,
    no_share: Annotated[
        bool,
        option(
            "Train every run whole. Otherwise runs that are the same until AMP starts train their common beginning "
            "once.",
            "--no-share",
            panel=HOW,
        ),
    ] = False,
    checkpoint_epochs: Annotated[
        int, typer.Option(help="Epochs between checkpoints.", min=1, rich_help_panel=HOW)
    ] = 10,
    executor: Executor = "local",
    address: Address = None,
    gpus: Gpus = None,
    debug: Debug = False,
) -> None:
    """Reproduce the paper's tables and figures, next to its own numbers. To resume, repeat the command."""
    with report_errors(debug):
        deadline = None if minutes is None else _deadline(minutes)
        need("flatmin_lab.report.paper.tables", "flatmin reproduce")
        above = SMOKE if protocol == "smoke" else Path()
        store, console = ResultStore(results or above / "results", runs or above / "runs"), display.terminal()
        experiments_ = experiments_named(experiments or (EXPERIMENTS if list_ else ()), protocol or "paper")
        if list_:
            reproduce_view.show_experiments(experiments_, store, console)
            return
        narrowed = {"seeds": seeds, "methods": methods, "data": data, "models": models, "measure": measure}
        selection = select_runs(experiments_, store, planned=planned, plan=plan, protocol=protocol, **narrowed)
        if plan:
            claims: Any = need("flatmin_lab.report.paper.claims", "flatmin reproduce")
            families = claims.families_of([run.job.recipe.name for run in selection.runs])
            _check_place(store.results)
            new, extended = store.plan(selection.runs, datetime.now(timezone.utc).date(), families)
            typer.echo(f"{new} of {len(selection.runs)} runs are new in {store.results / PLANNED}")
            if extended:
                typer.echo(f"more is to be measured of {extended}")
            return
        todo = selection.due(retry=retry, limit=limit)
        reproduce_view.show_states(console, selection, retry=retry)
        for place in (store.results, store.runs):
            _check_place(place)
        asked: dict[str, Any] = {"address": address, "gpus": gpus, "device": device, "workers": workers}
        with open_executor(executor, **asked, console=console, default_workers=cores) as there:
            # a missing file is reported now, not in hours
            sets, lacking = _read_all(_data_names(todo), data_dir, download=download)
            if lacking and not dry_run:
                raise FileNotFoundError("; ".join(lacking))
            for text in lacking:
                display.say(console, f"note: {text}", style="yellow")
            if dry_run:
                _dry_run(todo, selection, sets, there, console, deadline)
                return
            shared = () if no_share else sharing(selection.runs, store)
            options = RunOptions(store, str(data_dir), together, checkpoint_epochs, sharing=shared, deadline=deadline)
            with stop_on_signals() as stop:
                compiles = there.device.startswith("cuda") and any(run.job.recipe.compile for run in todo)
                events = run_all(todo, options, there, sets, stop=stop)
                ended = follow(events, todo, console, stop, first=COMPILING if compiles else "")
        reproduce_view.show_postponed(console, ended.postponed, minutes)
        for one in selection.trained:
            reproduce_view.show_table(one, store, selection)
        if ended.stopped_by is not None:
            display.say(console, f"stopped by {ended.stopped_by}; the same command resumes")
            raise typer.Exit(exit_code(ended.stopped_by))
        for one in selection.measured:
            _cost(one, store, torch.device(there.device_here), data_dir, download, console)
        if ended.failed or selection.damaged:
            raise typer.Exit(1)


def _deadline(minutes: float) -> Deadline:
    if not minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {minutes:g}; leave it out to train all runs")
    return Deadline(minutes, time() + 60 * minutes)


def _data_names(runs: Sequence[Run]) -> set[str]:
    """The data sets that the runs train on, and those that their networks are tested with."""
    measured = [post_training.outside_names(run.job.recipe.data) for run in runs if "outside" in run.parts]
    return {run.job.recipe.data for run in runs}.union(*measured)


def _read_all(names: set[str], root: Path, *, download: bool) -> tuple[dict[str, Dataset], list[str]]:
    """The data sets, and the errors of those that are missing."""
    sets, lacking = {}, []
    for name in sorted(names):
        try:
            sets[name] = read_data(name, root, download=download, size=None)
        except FileNotFoundError as error:
            lacking.append(str(error))
    return sets, lacking


def _check_place(place: Path) -> None:
    """Check that the folder can be written to."""
    above = nearest_existing(place)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{place} cannot be written to (see {above}); choose other places with --results and --runs")


def _dry_run(
    todo: Sequence[Run],
    selection: Selection,
    sets: dict[str, Dataset],
    executor: RunExecutor,
    console: Console,
    deadline: Deadline | None,
) -> None:
    """Show what would run, and how long it would take, estimated from a few steps of each kind."""
    for one in selection.measured:
        typer.echo(f"{one.name}: a few steps of {' and '.join(r.method for r in one.recipes)}, no training run")
    if not selection.runs:
        return
    known = [run.job for run in todo if selection.state(run.job) != "unmeasured"]
    training = [job for job in known if job.recipe.data in sets]
    device = torch.device(executor.device_here)
    on_cpu = device.type == "cpu"
    with display.busy(console) as say, computing_with(1) if on_cpu else nullcontext():
        seconds = time_estimate.estimate_all_seconds(training, sets, device=device, say=say)
    beside, count = executor.capacity(len(todo))
    late: list[Run] = []
    if deadline is not None:  # the estimate itself is not part of the command
        started = started_in_time(seconds, beside, 60 * deadline.minutes)
        of_late = {job.key for job, fits in zip(training, started, strict=True) if not fits}
        late = [run for run in todo if run.job.key in of_late]
        todo = [run for run in todo if run.job.key not in of_late]
        kept = [(job, own) for job, own, fits in zip(training, seconds, started, strict=True) if fits]
        training, seconds = [job for job, _ in kept], [own for _, own in kept]
    begin = f"{len(todo)} run{'' if len(todo) == 1 else 's'}"
    if training:
        total = max([sum(seconds) / beside, *seconds])
        begin += f", about {reproduce_view.duration_text(total)} on {hardware(device)} with {count}"
    if unknown := len(todo) - len(training):
        begin += f"; how long {f'{unknown} of them take' if training else 'they take'} is not known"
    display.say(reproduce_view.wide(), begin)
    reproduce_view.show_dry_run(todo, selection, {job.key: took for job, took in zip(training, seconds, strict=True)})
    if training:
        display.say(
            console,
            f"estimated from a few steps each, one run at a time{'' if on_cpu else ' on a GPU (several take less)'}; "
            "resumed runs and common beginnings take less, and measurements are extra",
        )
    if deadline is not None:
        reproduce_view.show_postponed(console, late, deadline.minutes)


class Ended(NamedTuple):
    """How many runs failed, what stopped the command, and which runs would not have ended in time."""

    failed: int = 0
    stopped_by: str | None = None
    postponed: Sequence[Run] = ()


def follow(
    events: Iterable[tuple[int, Event]], todo: Sequence[Run], console: Console, stop: Stop, *, first: str
) -> Ended:
    """Show all runs until they have ended. `first` says what happens until an epoch has ended."""
    if not todo:
        return Ended()
    failed, reason, postponed = 0, None, []
    width = max(len(run.job.recipe.name) for run in todo) + 1
    if first:
        display.say(console, first)
    with display.bars(console, speed_seconds=SECONDS_OF_EPOCHS) as progress:
        beginning = f"0 of {len(todo)} runs, {first or 'no epoch has ended yet'}"
        task = progress.add_task("runs", total=sum(run.job.recipe.epochs for run in todo), numbers=beginning)
        done = [0] * len(todo)
        ended = 0
        for number, event in events:
            job = todo[number].job
            who = f"{job.recipe.name:{width}} seed {job.seed}"
            for text, style in reproduce_view.event_lines(event, todo[number]):
                display.say(console, f"{who}  {text}", style=style)
            match event:
                case Epoch():
                    done[number] = event.epoch
                case Finished() | Failed():
                    done[number], ended = job.recipe.epochs, ended + 1
                    failed += isinstance(event, Failed) and not event.busy
                case Postponed():
                    done[number] = job.recipe.epochs
                    postponed.append(todo[number])
                case Stopped():
                    reason = event.reason
            numbers = f"{ended} of {len(todo)} runs" if any(done) else beginning
            progress.update(task, completed=sum(done), numbers=numbers)
        reason = stop() if reason is not None else None
    return Ended(failed, reason, postponed)


def _cost(
    experiment: Experiment, store: ResultStore, where: torch.device, data_dir: Path, download: bool, console: Console
) -> None:
    """Time steps of ERM and AMP in turns, show the result and write its file."""
    recipes = {recipe.method: recipe for recipe in experiment.recipes}
    dataset = read_data(recipes["erm"].data, data_dir, download=download, size=None).to(where)
    with display.busy(console) as say:
        say("steps of ERM and AMP in turns")
        found = amp_cost.measure_cost(recipes, dataset, device=where, steps=COST_STEPS if where.type == "cuda" else 1)
    reproduce_view.show_costs(found, experiment.protocol, str(store.write_cost(experiment.protocol, found)))
