"""`flatmin train --seeds N`: one recipe with several seeds, at once if that is faster, and its output."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from flatmin_lab.cli import display
from flatmin_lab.cli.process.signals import exit_code, stop_on_signals
from flatmin_lab.cli.progress_columns import first_steps_text
from flatmin_lab.cli.request import Plan
from flatmin_lab.execution.replicas import train_together
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Epoch, Event, Failed, Finished, Note, Progress, RunError, Started, Stopped
from flatmin_lab.runs.result import AVERAGE, split_of
from flatmin_lab.system.machine import hardware

End = Finished | Stopped | Failed


def train_seeds(plans: Sequence[Plan], console: Console, *, count: int | None, **settings: Any) -> None:
    """Train all plans, each in its folder; then show what finished, what a signal stopped, and what failed.

    After a signal every run has saved, and the exit code is the signal's; otherwise it is 1 if one failed.
    """
    seeds, folders = [plan.seed for plan in plans], [plan.folder for plan in plans]
    runs, failure = SeedRuns(seeds), None
    with stop_on_signals() as stop:
        jobs = [Job(plan.recipe, plan.seed) for plan in plans]
        events = train_together(jobs, plans[0].data, folders=folders, count=count, stop=stop, **settings)
        on_gpu = settings["device"].type == "cuda"
        first_steps = first_steps_text(plans[0].recipe, on_gpu=on_gpu, captured=settings["capture"])
        headline = display.headline(plans[0].recipe, f"{seeds[0]} to {seeds[-1]}", hardware(settings["device"]))
        try:
            follow(events, console, headline, runs, first_steps)
        except RunError as error:  # raised for failed runs once the others have ended
            failure = error
    reason = runs.stopped()
    if reason is not None:
        display.say(console, f"stopped by {reason}: {runs.progress_text()}; resume with the same command and --resume")
    if results := runs.results():
        outcome(results, len(seeds), folders)
    if failure is not None:
        fail(console, runs, failure, stopped=reason is not None)
    if reason is not None:
        raise typer.Exit(exit_code(reason))


class SeedRuns:
    """The state of the run of each seed: which are running, the steps done, and how they ended."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self.running: set[int] = set()
        self.done = [0] * len(seeds)
        self.steps = self.epochs = 0  # of each run
        self.ends: dict[int, End] = {}

    def update(self, number: int, event: Event) -> None:
        match event:
            case Started():
                self.running.add(number)
                self.steps, self.epochs = event.steps, event.epochs
                self.done[number] = event.step
            case Progress() | Epoch():
                self.done[number] = event.step
            case Finished() | Stopped() | Failed():
                self.running.discard(number)
                self.ends[number] = event

    def completed(self) -> int:
        """Steps done in all runs. A run that had finished before is not started, and counts as done."""
        whole = (isinstance(self.ends.get(number), Finished) for number in range(len(self.seeds)))
        return sum(self.steps if all_of_it else done for all_of_it, done in zip(whole, self.done, strict=True))

    def results(self) -> dict[int, Mapping[str, Any]]:
        """The results of finished runs, by seed."""
        ends = sorted(self.ends.items())
        return {self.seeds[number]: end.result for number, end in ends if isinstance(end, Finished)}

    def failed(self) -> dict[int, str]:
        """The errors of failed runs, by seed."""
        return {self.seeds[n]: end.what for n, end in sorted(self.ends.items()) if isinstance(end, Failed)}

    def stopped(self) -> str | None:
        return next((end.reason for end in self.ends.values() if isinstance(end, Stopped)), None)

    def progress_text(self) -> str:
        """As in: seed 0 finished, seed 1 saved after step 133, seed 2 not started."""
        return ", ".join(f"seed {self.seeds[n]} {_end_text(end)}" for n, end in sorted(self.ends.items()))


def _end_text(end: End) -> str:
    match end:
        case Finished():
            return "finished"
        case Failed():
            return "failed"
        case Stopped():
            return f"saved after step {end.step}" if end.step else "not started"


def fail(console: Console, runs: SeedRuns, failure: RunError, *, stopped: bool) -> None:
    """Name the seeds that failed; if all failed because the request is invalid, raise that error alone."""
    failed, cause = runs.failed(), failure.__cause__
    if len(failed) == len(runs.seeds) and isinstance(cause, ValueError | TypeError):
        raise cause
    who = f"seed{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
    text = f"{len(failed)} of {len(runs.seeds)} runs failed ({who}): {next(iter(failed.values()))}"
    if not stopped:
        raise RunError(text) from cause
    display.say(console, text, style="red")


def follow(
    events: Iterable[tuple[int, Event]], console: Console, headline: str, runs: SeedRuns, first_steps: str
) -> None:
    """Show the runs until all have ended, a line for each epoch of each; at first, what `first_steps` says."""
    seeds = runs.seeds
    width = max(len(str(seed)) for seed in seeds)
    display.say(console, headline)
    with display.bars(console) as progress:
        task = progress.add_task(f"0 of {len(seeds)} runs", total=None, numbers=first_steps)
        for number, event in events:
            runs.update(number, event)
            who = f"seed {seeds[number]:{width}}"
            match event:
                case Started() if event.step:
                    display.say(console, f"{who}  resumed after step {event.step} of {event.steps}")
                case Epoch():
                    display.say(console, f"{who}  {display.epoch_line(event.numbers, runs.epochs)}")
                case Note():
                    display.say(console, f"note: {who}: {event.text}", style="yellow")
                case Failed():
                    when = "" if event.step is None else f" after step {event.step}"
                    display.say(console, f"{who}  failed{when}: {event.what}", style="red")
            progress.update(
                task,
                completed=runs.completed(),
                total=len(seeds) * runs.steps or None,
                description=f"{len(runs.ends)} of {len(seeds)} runs",
                numbers=f"{len(runs.running)} at once" if any(runs.done) else first_steps,
            )


def outcome(results: Mapping[int, Mapping[str, Any]], count: int, folders: Sequence[Path]) -> None:
    """The last epoch's numbers of every finished seed, out of `count`, and their means; then the averaged weights'."""
    console = Console(highlight=False, soft_wrap=True)
    first = next(iter(results.values()))
    which = split_of(first)
    for weights, title in (("", f"{which}, last epoch"), (AVERAGE, f"{which}, averaged weights")):
        if keys := display.shown_measures(first, weights):
            table = Table(title, *keys.values(), box=None, pad_edge=False)
            for seed, result in results.items():
                table.add_row(f"seed {seed}", *(display.number(key, result[key]) for key in keys))
            found = {key: [result[key] for result in results.values()] for key in keys}
            means = (display.number(key, None if None in values else fmean(values)) for key, values in found.items())
            table.add_row(f"mean of {len(results)}{f' of {count}' if len(results) < count else ''}", *means)
            console.print(table)
    display.say(console, f"everything is in {folders[0]} to {folders[-1]}")
