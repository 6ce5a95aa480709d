"""The output of `flatmin compare`: what is trained and about how long, a line per run, the table, and the answer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flatmin.comparison import PLAIN, Outcome
from flatmin.comparison import show as shown
from flatmin.comparison.contenders import PASSES
from flatmin.comparison.run_comparison import Progress
from flatmin.comparison.verdict import PERCENT, duration
from flatmin_lab.cli import display
from flatmin_lab.cli.commands.reproduce.reproduce_view import wide
from flatmin_lab.comparing.comparer import Comparison
from flatmin_lab.comparing.comparison_file import TITLES, About, interval_text
from flatmin_lab.comparing.contender_recipes import Entry
from flatmin_lab.comparing.training_queue import Training
from flatmin_lab.execution.executor import Executor
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Note, Started


def headline(about: About, entries: Sequence[Entry], where: str) -> str:
    names = "; ".join(entry.contender.name for entry in entries)
    count = f"{about.wanted} seed{'s' if about.wanted > 1 else ''} of {len(entries)} training runs each"
    return f"{about.what}, on {where}\n{count}: {names}\nmeasured on {about.held_out}"


def follow(
    events: Iterable[tuple[Training, Event]], console: Console, comparison: Comparison, executor: Executor
) -> None:
    """Show the runs until all have ended, a line for each."""
    total = sum(entry.recipe.epochs for entry in comparison.entries) * comparison.about.wanted
    done: dict[tuple[str, int], int] = {}
    estimated = False
    with display.bars(console) as progress:
        task = progress.add_task("comparing", total=total, numbers="")
        for training, event in events:
            who = training.entry.contender.key, training.seed
            for outcome in comparison.outcomes:
                done.setdefault((outcome.contender, outcome.seed), _epochs(comparison, outcome))
            match event:
                case Started() if event.step:
                    display.say(console, f"{_name(training)}: resumed after step {event.step} of {event.steps}")
                case Epoch():
                    done[who] = event.epoch
                case Finished() | Failed():
                    done[who] = training.entry.recipe.epochs
                    display.say(console, outcome_line(training.entry.contender.name, _outcome(comparison, *who)))
                case Note():
                    display.say(console, f"note: {_name(training)}: {event.text}", style="yellow")
            if not estimated and (seconds := comparison.seconds_a_seed(executor)) is not None:
                estimated = True
                display.say(console, duration_line(seconds, comparison.about.wanted))
            progress.update(task, completed=sum(done.values()), numbers=_name(training))


def _epochs(comparison: Comparison, outcome: Outcome) -> int:
    return next(one.recipe.epochs for one in comparison.entries if one.contender.key == outcome.contender)


def _outcome(comparison: Comparison, contender: str, seed: int) -> Outcome:
    return next(one for one in comparison.outcomes if (one.contender, one.seed) == (contender, seed))


def _name(training: Training) -> str:
    return f"seed {training.seed}  {training.entry.contender.name}"


def outcome_line(name: str, outcome: Outcome) -> str:
    """The result of a run."""
    who = f"seed {outcome.seed}  {name}"
    if outcome.failed is not None:
        return f"{who}: diverged: {outcome.failed}"
    numbers = ", ".join(f"{TITLES.get(key, key)} {shown(key, value)}" for key, value in outcome.measures.items())
    return f"{who}: {numbers}; {outcome.seconds:.0f} s"


class OwnProgress:
    """Shows the runs of a user's own loop as they end, and after the first about how long all of them take."""

    def __init__(self, console: Console, seeds: int, radii: int) -> None:
        self.console, self.seeds, self.radii, self.estimated = console, seeds, radii, False

    def show(self, event: Progress) -> None:
        if event.outcome is None:
            return
        earlier = " (from an earlier call)" if event.was_there else ""
        display.say(self.console, f"{outcome_line(event.contender.name, event.outcome)}{earlier}")
        if not self.estimated and event.contender.key == PLAIN and event.outcome.failed is None:
            self.estimated = True
            display.say(
                self.console, duration_line(event.outcome.seconds * (1 + PASSES * (1 + self.radii)), self.seeds)
            )


def duration_line(seconds: float, seeds: int) -> str:
    return f"about {duration(seconds)} per seed, {duration(seconds * seeds)} in total"


# ---- the answer


def show(content: Mapping[str, Any]) -> None:
    """The table, then why it has fewer seeds than asked for, then the answer."""
    console = Console(highlight=False, soft_wrap=True)
    if content["rows"]:
        wide().print(table(content))
    if content["stopped"]:
        display.say(console, content["stopped"])
    display.say(console, content["sentence"])


def table(content: Mapping[str, Any]) -> Table:
    """A row per contender: its measures, and the differences from the plain runs in the measure that decides."""
    rows, decides = content["rows"], content["measure"]
    title, unit = TITLES.get(decides, decides), ", points" if decides in PERCENT else ""
    found = Table(
        "",
        "seeds",
        "passes",
        *(TITLES.get(measure, measure) for measure in rows),
        f"{title} vs. plain (95 %{unit})",
        "vs. plain with as many passes",
        box=None,
        pad_edge=False,
    )
    for number, contender in enumerate(content["contenders"]):
        main = rows[decides][number]
        failed = f" ({main['failed']} diverged)" if main["failed"] else ""
        found.add_row(
            contender["name"],
            f"{len(main['values'])}{failed}",
            f"{contender['passes']:g}",
            *(number_text(measure, own[number]["mean"]) for measure, own in rows.items()),
            interval_text(decides, main["from_plain"]),
            interval_text(decides, main["from_longer"]),
        )
    return found


def number_text(measure: str, value: float | None) -> str:
    return "—" if value is None else shown(measure, value)
