"""`flatmin train --seeds N`: one recipe with many seeds, all at once where that is faster, and what is shown of it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from flatmin_lab import show
from flatmin_lab.machine import hardware
from flatmin_lab.records import Epoch, Finished, Note, Progress, Record, Started, Stopped
from flatmin_lab.replicas import together
from flatmin_lab.request import Plan
from flatmin_lab.results import split_of
from flatmin_lab.runs import Job
from flatmin_lab.signals import CODES, asked_to_stop


def train_seeds(plans: Sequence[Plan], console: Console, *, count: int | None, **settings: Any) -> None:
    """Train all of them, each in its folder; after a signal all have saved, and the exit code is the signal's."""
    jobs = [Job(plan.recipe, plan.seed) for plan in plans]
    folders = [plan.folder for plan in plans]
    with asked_to_stop() as stop:
        records = together(jobs, plans[0].data, folders=folders, count=count, stop=stop, **settings)
        seeds = [plan.seed for plan in plans]
        headline = show.headline(plans[0].recipe, f"{seeds[0]} to {seeds[-1]}", hardware(settings["device"]))
        ends = follow(records, console, headline, seeds)
    stopped = [end for end in ends if isinstance(end, Stopped)]
    if not stopped:
        outcome({seed: end.result for seed, end in zip(seeds, ends, strict=True) if isinstance(end, Finished)}, folders)
        return
    steps = ", ".join(str(end.step) if isinstance(end, Stopped) else "the last one" for end in ends)
    show.say(
        console,
        f"stopped by {stopped[0].reason}, saved after steps {steps}; go on with the same command and --resume",
    )
    raise typer.Exit(CODES[stopped[0].reason])


def follow(
    records: Iterable[tuple[int, Record]], console: Console, headline: str, seeds: Sequence[int]
) -> list[Finished | Stopped | None]:
    """Show the trainings until all have ended, a line for each epoch of each; and how each ended."""
    ends: list[Finished | Stopped | None] = [None] * len(seeds)
    done, totals, epochs = [0] * len(seeds), [0] * len(seeds), 0
    width = max(len(str(seed)) for seed in seeds)
    show.say(console, headline)
    with show.bars(console) as progress:
        task = progress.add_task("starting", total=None, numbers="")
        for number, record in records:
            who = f"seed {seeds[number]:{width}}"
            match record:
                case Started():
                    epochs, totals[number] = record.epochs, record.steps
                    if record.step:
                        show.say(console, f"{who}  going on after step {record.step} of {record.steps}")
                case Epoch():
                    show.say(console, f"{who}  {show.epoch_line(record.numbers, epochs)}")
                case Note():
                    show.say(console, f"note: {who}: {record.text}", style="yellow")
                case Finished() | Stopped():
                    ends[number] = record
            if isinstance(record, Started | Progress | Epoch):
                done[number] = record.step
            begun, ended = sum(map(bool, totals)), sum(end is not None for end in ends)
            progress.update(
                task,
                completed=sum(done),
                total=len(seeds) * max(totals) or None,
                description=f"{ended} of {len(seeds)} trainings",
                numbers=f"{begun - ended} at once",
            )
    return ends


def outcome(results: Mapping[int, Mapping[str, Any]], folders: Sequence[Path]) -> None:
    """The last epoch's numbers of every seed, and their means."""
    console = Console(highlight=False, soft_wrap=True)
    which = split_of(next(iter(results.values())))
    table = Table(f"{which}, last epoch", *show.MEASURES.values(), box=None, pad_edge=False)
    keys = {name: f"{which}_{name}" for name in show.MEASURES}
    for seed, result in results.items():
        table.add_row(f"seed {seed}", *(show.number(name, result[key]) for name, key in keys.items()))
    found = {name: [result[key] for result in results.values()] for name, key in keys.items()}
    means = (show.number(name, None if None in values else fmean(values)) for name, values in found.items())
    table.add_row(f"mean of {len(results)}", *means)
    console.print(table)
    show.say(console, f"all of it in {folders[0]} to {folders[-1]}")
