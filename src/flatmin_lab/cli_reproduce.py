"""`flatmin reproduce`: the paper's tables and figures, trained, measured, and shown beside the paper's numbers.

Parsing, and what is shown; the work is in runs.py, the tables in recipes.py, the files in ledger.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table

from flatmin_lab import afterwards, estimate, show
from flatmin_lab.cli_parts import DATA, DataDir, Debug, Download, option, reported
from flatmin_lab.data.made import SUFFIX
from flatmin_lab.extras import need
from flatmin_lab.ledger import Ledger, State
from flatmin_lab.machine import devices_named, hardware
from flatmin_lab.recipe import Job
from flatmin_lab.recipes import EXHIBITS, Exhibit, Protocol
from flatmin_lab.records import Epoch, Failed, Finished, Note, Record, Started, Stopped
from flatmin_lab.request import read
from flatmin_lab.results import split_of
from flatmin_lab.runs import How, carry_out
from flatmin_lab.signals import CODES, asked_to_stop
from flatmin_lab.workers import cores

WHICH, HOW = "Which trainings", "How"
RUNS, RESULTS = Path("runs"), Path("results")
TENTHS = 10  # of a training, after each of which a line is shown


def reproduce(
    exhibits: Annotated[
        list[str] | None, typer.Argument(help=f"Tables and figures: {', '.join(EXHIBITS)}.", show_default=False)
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(help="paper (200 epochs, 10 trials), short (60 epochs, 3) or smoke (seconds on a CPU)."),
    ] = "paper",
    list_: Annotated[bool, option("What there is, what is done, and what is missing.", "--list")] = False,
    dry_run: Annotated[bool, option("What would be run, and how long it would take.", "--dry-run")] = False,
    plan: Annotated[bool, option("Write down in RESULTS/planned.json what is to be run, and end.", "--plan")] = False,
    seeds: Annotated[str | None, option("As in 0,1 or 0-9; else as many as the protocol has.", panel=WHICH)] = None,
    methods: Annotated[str | None, option("As in erm,amp; else all of the exhibit.", panel=WHICH)] = None,
    data: Annotated[str | None, option("As in cifar10,svhn; else all of the exhibit.", panel=WHICH)] = None,
    models: Annotated[str | None, option("As in vgg16; else all of the exhibit.", panel=WHICH)] = None,
    measure: Annotated[
        str | None, option(f"Also measure {', '.join(afterwards.PARTS)}; as in attack,flatness.", panel=WHICH)
    ] = None,
    retry: Annotated[bool, option("Try those again that have failed.", "--retry", panel=WHICH)] = False,
    results: Annotated[Path, typer.Option(help="The folder of the result files.", rich_help_panel=HOW)] = RESULTS,
    runs: Annotated[Path, typer.Option(help="The folder of the runs, with checkpoints.", rich_help_panel=HOW)] = RUNS,
    data_dir: DataDir = DATA,
    download: Download = False,
    device: Annotated[str | None, option("cpu, cuda:0, or cuda:0,cuda:2; else all GPUs there are.", panel=HOW)] = None,
    together: Annotated[
        int | None, option("So many at once on a GPU; else as many as make it faster.", min=1, panel=HOW)
    ] = None,
    workers: Annotated[int | None, option("On a CPU: processes; else one a core.", min=1, panel=HOW)] = None,
    checkpoint_epochs: Annotated[
        int, typer.Option(help="A checkpoint every so many epochs.", min=1, rich_help_panel=HOW)
    ] = 10,
    debug: Debug = False,
) -> None:
    """The paper's tables and figures from your own trainings, beside its numbers; killed, the same command goes on."""
    with reported(debug):
        need("flatmin_lab.report.exhibits", "flatmin reproduce")
        ledger = Ledger(results, runs)
        chosen = [_exhibit(name, protocol) for name in exhibits or (EXHIBITS if list_ else ())]
        if not chosen:
            raise ValueError(f"name a table or a figure: {', '.join(EXHIBITS)}; or see them with --list")
        if list_:
            _list(chosen, ledger)
            return
        wanted = {
            "methods": _words(methods, {recipe.method for one in chosen for recipe in one.recipes}, "--methods"),
            "data": _words(data, {_plain(recipe.data) for one in chosen for recipe in one.recipes}, "--data"),
            "models": _words(models, {recipe.model for one in chosen for recipe in one.recipes}, "--models"),
        }
        parts = tuple(
            dict.fromkeys(
                [*(part for one in chosen for part in one.parts), *_words(measure, set(afterwards.PARTS), "--measure")]
                if measure
                else [part for one in chosen for part in one.parts]
            )
        )
        jobs = _jobs(chosen, _seeds(seeds), wanted)
        if plan:
            new = ledger.plan(jobs, datetime.now(timezone.utc).date())
            typer.echo(f"{new} of {len(jobs)} trainings are new in {results / 'planned.json'}")
            return
        states = {job_key(job): ledger.state(job, parts) for job in jobs}
        todo = [job for job in jobs if states[job_key(job)] in _due(retry)]
        console = show.terminal()
        devices = devices_named(device)
        root = str(data_dir)
        _say_what_is_there(console, jobs, states, retry=retry)
        if dry_run:
            _dry_run(todo, states, devices, workers, data_dir, download, console)
            return
        for name in dict.fromkeys(job.recipe.data for job in todo):
            read(name, data_dir, download=download, size=None)  # a missing file now, and not in hours
        how = How(ledger, parts, root, together, checkpoint_epochs)
        failed, reason = _run(todo, how, devices, workers, console)
        for one in chosen:
            _show(one, ledger)
        if reason is not None:
            show.say(console, f"stopped by {reason}; the same command goes on")
            raise typer.Exit(CODES[reason])
        if failed:
            raise typer.Exit(1)


# ---- what was asked for


def _exhibit(name: str, protocol: str) -> Exhibit:
    if name not in EXHIBITS:
        raise ValueError(f"unknown table or figure {name!r}; choose from {', '.join(EXHIBITS)}")
    if protocol not in get_args(Protocol):
        raise ValueError(f"unknown protocol {protocol!r}; choose from {', '.join(get_args(Protocol))}")
    return EXHIBITS[name](cast(Protocol, protocol))


def _words(text: str | None, known: set[str], flag: str) -> set[str]:
    """Those that were named, or all."""
    if text is None:
        return known
    named = {word.strip() for word in text.split(",")}
    if unknown := sorted(named - known):
        raise ValueError(f"{flag} takes {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return named


def _seeds(text: str | None) -> tuple[int, ...] | None:
    """0,1 or 0-9."""
    if text is None:
        return None
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--seeds takes whole numbers, as in 0,1 or 0-9, got {text!r}")
        found += range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError(f"--seeds must name one at least, got {text!r}")
    return tuple(dict.fromkeys(found))


def _plain(data: str) -> str:
    return data.removesuffix(SUFFIX)


def job_key(job: Job) -> tuple[str, int]:
    return job.recipe.name, job.seed


def _jobs(exhibits: Sequence[Exhibit], seeds: tuple[int, ...] | None, wanted: dict[str, set[str]]) -> list[Job]:
    """Of all exhibits, each training once."""
    found: dict[tuple[str, int], Job] = {}
    for exhibit in exhibits:
        for job in exhibit.jobs(seeds):
            recipe = job.recipe
            if (
                recipe.method in wanted["methods"]
                and _plain(recipe.data) in wanted["data"]
                and recipe.model in wanted["models"]
            ):
                found.setdefault(job_key(job), job)
    if not found:
        raise ValueError("no training of these is of that method, data and model; name others, or leave them out")
    return list(found.values())


def _due(retry: bool) -> set[State]:
    return {"missing", "begun", "unmeasured", *(("failed",) if retry else ())}


# ---- what is shown


def _list(exhibits: Sequence[Exhibit], ledger: Ledger) -> None:
    table = Table("", "what", "protocol", "trainings", "done", "failed", "missing", box=None, pad_edge=False)
    for exhibit in exhibits:
        states = Counter(ledger.state(job, exhibit.parts) for job in exhibit.jobs())
        missing = sum(states.values()) - states["done"] - states["failed"]
        table.add_row(
            exhibit.name,
            exhibit.title,
            exhibit.protocol,
            str(states.total()),
            str(states["done"]),
            str(states["failed"] or ""),
            str(missing or ""),
        )
    Console(highlight=False, soft_wrap=True).print(table)


def _say_what_is_there(
    console: Console, jobs: Sequence[Job], states: dict[tuple[str, int], State], *, retry: bool
) -> None:
    count = Counter(states.values())
    words = {
        "done": "done",
        "unmeasured": "to be measured",
        "begun": "to be gone on with",
        "missing": "to be trained",
        "failed": f"failed before ({'tried again' if retry else 'try them again with --retry'})",
        "without weights": "done, but without the weights that would be measured",
    }
    said = ", ".join(f"{count[state]} {text}" for state, text in words.items() if count[state])  # type: ignore[index]
    show.say(console, f"{len(jobs)} trainings: {said}")


def _dry_run(
    todo: Sequence[Job],
    states: dict[tuple[str, int], State],
    devices: Sequence[str],
    workers: int | None,
    data_dir: Path,
    download: bool,
    console: Console,
) -> None:
    """What would run, and an estimate of the time from a few steps of each kind."""
    training = [job for job in todo if states[job_key(job)] != "unmeasured"]
    names = dict.fromkeys(job.recipe.data for job in training)
    sets = {name: read(name, data_dir, download=download, size=None) for name in names}
    with show.busy(console) as say:
        where = torch.device(devices[0])
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if where.type == "cpu" else threads)
        try:
            seconds = estimate.seconds_of_all(training, sets, device=where, say=say)
        finally:
            torch.set_num_threads(threads)
    took = {job_key(job): time for job, time in zip(training, seconds, strict=True)}
    table = Table("training", "seed", "now", "time", box=None, pad_edge=False)
    for job in todo:
        time = took.get(job_key(job))
        table.add_row(job.recipe.name, str(job.seed), states[job_key(job)], "" if time is None else _time(time))
    Console(highlight=False, soft_wrap=True).print(table)
    beside = min(workers or cores(), max(len(todo), 1)) if devices[0] == "cpu" else len(devices)
    total = max([sum(seconds) / beside, *seconds])
    where_words = f"{beside} process{'es' if beside > 1 else ''}" if devices[0] == "cpu" else f"{beside} GPU(s)"
    show.say(
        console,
        f"{len(todo)} trainings, some {_time(total)} on {hardware(where)} with {where_words}; "
        "from a few steps each, one training at a time; begun ones have less to do"
        + ("" if devices[0] == "cpu" else "; several at once on a GPU take less"),
    )


def _time(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _run(
    todo: Sequence[Job], how: How, devices: Sequence[str], workers: int | None, console: Console
) -> tuple[int, str | None]:
    """Carry out; how many failed, and what stopped it."""
    failed, reason = 0, None
    if not todo:
        return failed, reason
    width = max(len(job.recipe.name) for job in todo) + 1
    with asked_to_stop() as stop, show.bars(console) as progress:
        task = progress.add_task("trainings", total=sum(job.recipe.epochs for job in todo), numbers="")
        done = [0] * len(todo)
        ended = 0
        for number, record in carry_out(todo, how, devices=devices, workers=workers, stop=stop):
            job = todo[number]
            who = f"{job.recipe.name:{width}} seed {job.seed}"
            for text, style in _said(record, job):
                show.say(console, f"{who}  {text}", style=style)
            match record:
                case Epoch():
                    done[number] = record.epoch
                case Finished() | Failed():
                    done[number], ended = job.recipe.epochs, ended + 1
                    failed += isinstance(record, Failed)
                case Stopped():
                    reason = record.reason
            progress.update(task, completed=sum(done), numbers=f"{ended} of {len(todo)} trainings")
        reason = stop() if reason is not None else None
    return failed, reason


def _said(record: Record, job: Job) -> Iterator[tuple[str, str]]:
    """Of a record: what is worth a line, and its colour."""
    epochs = job.recipe.epochs
    match record:
        case Started() if record.step:
            yield f"going on after step {record.step} of {record.steps}", ""
        case Epoch() if epochs >= TENTHS and record.epoch % (epochs // TENTHS) == 0 and record.epoch < epochs:
            yield show.epoch_line(record.numbers, epochs), ""
        case Finished():
            which = split_of(record.result)
            said = ", ".join(
                f"{label} {show.number(name, record.result[f'{which}_{name}'])}"
                for name, label in (("error", "error"), ("nll", "NLL"), ("ece", "ECE"))
            )
            yield f"{which} {said}; {record.result['seconds']:.0f} s", ""
        case Failed():
            yield f"failed: {record.what}", "red"
        case Note():
            yield f"note: {record.text}", "yellow"


def _show(exhibit: Exhibit, ledger: Ledger) -> None:
    """The table, ours beside the paper's."""
    exhibits: Any = need("flatmin_lab.report.exhibits", "flatmin reproduce")
    spread = need("flatmin_lab.report.page", "flatmin reproduce").spread
    found = exhibits.filled(exhibit, ledger)
    console = Console(highlight=False, soft_wrap=True)
    show.say(console, f"\n{exhibit.name}: {exhibit.title}; protocol {exhibit.protocol}")
    table = Table("", "method", "n", box=None, pad_edge=False)
    for column in found.columns:
        for label in (column.label, "paper", ""):
            table.add_column(label.replace("\u00a0", " "), no_wrap=True)
    before = None
    for row in found.rows:
        data, model, augment = row.place
        place = f"{data}, {model}{'' if augment == 'vanilla' else f', {augment}'}"
        cells = []
        for column, cell in zip(found.columns, row.cells, strict=True):
            theirs = "" if cell.paper is None else spread_of_paper(cell.paper, column.digits)
            said = {None: "", True: "agrees", False: "differs"}[cell.agrees]
            cells += [spread(cell.values, column.digits) if cell.values else "–", theirs, said]
        table.add_row(place if place != before else "", row.name, str(len(row.runs)), *cells)
        before = place
    console.print(table)


def spread_of_paper(value: Any, digits: int) -> str:
    deviation = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{value.mean:.{digits}f}{deviation}"
