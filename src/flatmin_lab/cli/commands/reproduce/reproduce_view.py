"""The output of `flatmin reproduce`: which runs there are, their progress, and the paper's tables, filled."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatmin_lab.cli import display
from flatmin_lab.cli.commands.reproduce.reproduce_select import Selection, states_of
from flatmin_lab.execution.runner import Run
from flatmin_lab.recipes import paper_numbers
from flatmin_lab.recipes.experiments import Experiment
from flatmin_lab.recipes.protocols import PAPER_LENGTH, FollowedProtocol
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Note, Postponed, Started
from flatmin_lab.runs.result import split_of
from flatmin_lab.runs.result_store import ResultStore, State
from flatmin_lab.system.optional_deps import need

SHOWN_TENTHS = 10  # a line is shown after each tenth of a run
NAMED_RUNS = 10  # of those that did not fit into the time


def show_experiments(experiments: Sequence[Experiment], store: ResultStore, console: Console) -> None:
    """All tables and figures, what is done, and what is missing, which includes results that cannot be read."""
    table = Table("", "what", "protocol", "runs", "done", "failed", "missing", box=None, pad_edge=False)
    unreadable: dict[tuple[str, int], str] = {}
    for experiment in experiments:
        known, damaged = states_of([Run(job, experiment.parts) for job in experiment.jobs()], store)
        unreadable |= damaged
        states = Counter(known.values())
        states["missing"] += len(damaged)
        if not experiment.trials:
            states["done" if store.costs(experiment.protocol) else "missing"] += 1
        missing = states.total() - states["done"] - states["failed"]
        table.add_row(
            experiment.name,
            f"{experiment.title} ({experiment.in_paper})" if experiment.in_paper else experiment.title,
            experiment.protocol,
            str(states.total()),
            str(states["done"]),
            str(states["failed"] or ""),
            str(missing or ""),
        )
    wide().print(table)
    display.say(console, "figures 1, 3, 4 and 9 and the theorems need no training: flatmin theory")
    show_damaged(console, unreadable)


def show_damaged(console: Console, damaged: Mapping[tuple[str, int], str]) -> None:
    """The results that cannot be read: their runs are left alone."""
    for why in damaged.values():
        display.say(console, f"note: {why}", style="yellow")


def show_states(console: Console, selection: Selection, *, retry: bool) -> None:
    count = Counter(selection.states.values())
    words: dict[State, str] = {
        "done": "done",
        "unmeasured": "to be measured",
        "begun": "to be resumed",
        "missing": "to be trained",
        "failed": f"failed before ({'retried now' if retry else 'retry with --retry'})",
        "without weights": "done, but their weights are not in --runs (to measure them, name the folder they are in)",
    }
    said = [f"{count[state]} {text}" for state, text in words.items() if count[state]]
    said += [f"{len(selection.damaged)} left alone, as their results cannot be read"] if selection.damaged else []
    if selection.runs:
        display.say(console, f"{len(selection.runs)} run{'s' if len(selection.runs) > 1 else ''}: {', '.join(said)}")
    show_damaged(console, selection.damaged)


def duration_text(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _time_text(result: Mapping[str, Any]) -> str:
    """The seconds of a run; if it shared a CPU with others, its CPU time."""
    if result.get("at_once", 1) == 1 or "cpu_seconds" not in result:
        return f"{result['seconds']:.0f} s"
    return f"{result['cpu_seconds']:.0f} s of CPU time"


def event_lines(event: Event, run: Run) -> Iterator[tuple[str, str]]:
    """The lines to print for an event, and their colours."""
    epochs = run.job.recipe.epochs
    match event:
        case Started() if event.began_from is not None:
            yield f"began at epoch {event.step * epochs // event.steps} of {epochs}, from {event.began_from}", ""
        case Started() if event.step:
            yield f"resumed after step {event.step} of {event.steps}", ""
        case Epoch() if epochs >= SHOWN_TENTHS and event.epoch % (epochs // SHOWN_TENTHS) == 0 and event.epoch < epochs:
            yield display.epoch_line(event.numbers, epochs), ""
        case Finished():
            which = split_of(event.result)
            said = ", ".join(
                f"{label} {display.number(name, event.result[f'{which}_{name}'])}"
                for name, label in (("error", "error"), ("nll", "NLL"), ("ece", "ECE"))
            )
            measured = f"; measured: {', '.join(run.parts)}" if run.parts else ""
            yield f"{which} {said}; trained in {_time_text(event.result)}{measured}", ""
        case Failed():
            what = (
                "another process is training it; repeat the command once that has ended" if event.busy else event.what
            )
            yield f"{'not now' if event.later else 'failed'}: {what}", "yellow" if event.later else "red"
        case Postponed(given_up=True):
            saved = "; its last checkpoint is kept" if event.step else ""
            yield f"given up after step {event.step}: {event.reason}{saved}", "yellow"
        case Note():
            yield f"note: {event.text}", "yellow"


def show_postponed(console: Console, runs: Sequence[Run], minutes: float | None) -> None:
    """The runs that did not fit into the time."""
    if not runs or minutes is None:
        return
    names = [f"{run.job.recipe.name} seed {run.job.seed}" for run in runs[:NAMED_RUNS]]
    names += [f"and {len(runs) - NAMED_RUNS} more"] if len(runs) > NAMED_RUNS else []
    count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    within = f"{minutes:g} minute{'' if minutes == 1 else 's'}"
    display.say(console, f"{count} {'does' if len(runs) == 1 else 'do'} not fit into {within}: {', '.join(names)}")


def show_table(experiment: Experiment, store: ResultStore, selection: Selection) -> None:
    """The table, ours beside the paper's: the rows of the selected data sets and networks."""
    asked, wanted = {run.job.recipe.name for run in selection.runs}, selection.places()
    experiments: Any = need("flatmin_lab.report.paper.tables", "flatmin reproduce")
    page: Any = need("flatmin_lab.report.html", "flatmin reproduce")
    found = experiments.fill_table(experiment, experiments.read_all(store), experiments.planned_families(store))
    agreeing = ["agree"] if experiment.protocol in PAPER_LENGTH else []
    table = Table(box=None, pad_edge=False)
    for label in ("method", "n"):
        table.add_column(label, no_wrap=True)
    for column, in_paper in zip(found.columns, found.in_paper, strict=True):
        for label in (column.label, *(["paper", *agreeing] if in_paper else [])):
            table.add_column(label.replace("\u00a0", " "), no_wrap=True)
    before = None
    rows = [row for row in found.rows if row.place[:2] in wanted and (row.has_values or row.recipe.name in asked)]
    for row in rows:
        if row.place != before:
            before = row.place
            words = [name for name in before[:3] if name not in ("vanilla", "none")]
            words += [f"{before.label_noise:.0%} of the labels wrong"] if before.label_noise else []
            words += ["held-out images"] if before.validation else []
            table.add_row(Text(", ".join(words), style="bold"))
        indent = "    " if row.at_best_epoch else "  "
        table.add_row(f"{indent}{row.name}", str(row.count), *_cells(found, row, page))
    console = wide()
    display.say(console, f"\n{experiment.name}: {experiment.title}; protocol {experiment.protocol}")
    console.print(table)
    if any(cell.better is not None for row in rows for cell in row.cells):
        display.say(
            console, "▼ ▲: significantly below or above ERM's (Welch's test, corrected for the planned comparisons)"
        )
    if any(cell.smoothed(0) for row in rows for cell in row.cells):
        display.say(console, "smoothed: the loss smoothed over the other classes, as the paper's NLL seems to be")
    if experiment.protocol == "short" and any(row.recipe.protocol == FollowedProtocol("short") for row in rows):
        what = "paper-v2 with fewer epochs and AMP's radius chosen for them"
        display.say(console, f"short: {what}, unless a row says otherwise; the paper has no numbers for this length")
    if experiment.protocol == "smoke":
        display.say(console, "smoke: synthetic images, narrow networks, 3 epochs. These numbers are not evidence")
    display.say(console, f"tests, claims and figures: flatmin report {shlex.quote(str(store.results))}")


def _cells(found: Any, row: Any, page: Any) -> Iterator[str]:
    for column, in_paper, cell in zip(found.columns, found.in_paper, row.cells, strict=True):
        mark = {None: "", True: " ▼", False: " ▲"}[cell.better]
        yield cell.shown(column.digits, mark) if cell.compared else "" if row.at_best_epoch else "not measured"
        if in_paper:
            yield "" if cell.paper is None else page.as_printed(cell.paper, column.digits)
        if in_paper and found.experiment.protocol in PAPER_LENGTH:
            yield cell.agreement


def wide() -> Console:
    """As wide as the terminal; without one, wide enough for a table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def show_dry_run(todo: Sequence[Run], selection: Selection, seconds: Mapping[tuple[str, int], float]) -> None:
    """What would run, and how long each run would take by itself."""
    table = Table("run", "seed", "now", "time", box=None, pad_edge=False)
    for job, _ in todo:
        took = seconds.get(job.key)
        table.add_row(job.recipe.name, str(job.seed), selection.state(job), "" if took is None else duration_text(took))
    wide().print(table)


def show_costs(found: Mapping[str, Any], protocol: str, where: str) -> None:
    """Milliseconds per step and hours of ERM and AMP, beside the paper's."""
    table = Table("", "ms per step", "quartiles", "hours", "paper, hours (V100)", box=None, pad_edge=False)
    for method, one in found["methods"].items():
        low, high = one["ms_quartiles"]
        hours = f"{one['hours']:.3g}"
        table.add_row(
            method, f"{one['ms']:.3g}", f"{low:.3g} to {high:.3g}", hours, f"{paper_numbers.TRAINING_HOURS[method]:g}"
        )
    console = wide()
    display.say(console, f"\ncost: {found['model']} on {found['data']}, {found['epochs']} epochs; protocol {protocol}")
    console.print(table)
    longer = found["methods"]["amp"]["hours"] / found["methods"]["erm"]["hours"]
    display.say(
        console,
        f"AMP takes {longer:.2f} times as long as ERM (the paper: {paper_numbers.COST_RATIO}), "
        f"a step {found['ratio']:.2f}",
    )
    display.say(console, f"saved in {where}")
