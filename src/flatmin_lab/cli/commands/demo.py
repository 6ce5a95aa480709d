"""`flatmin demo`: the idea in a minute and a half on a laptop. Eight methods on handwritten digits, some labels wrong.

The data are scikit-learn's 1,438 training digits, a fifth of them with a wrong label: a network that memorises these
labels gets test digits wrong. The labels of the 359 test digits are correct. For each of the seeds 0, 1, 2, … all
methods start from the same weights and see the same batches. It makes a table, a page, and a file with their numbers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flatmin_lab.cli.display import bars, epochs_text, say
from flatmin_lab.cli.progress_columns import SECONDS_OF_EPOCHS
from flatmin_lab.data.sources.digits import load
from flatmin_lab.execution.close_up_task import close_up_jobs, train_with_close_up
from flatmin_lab.execution.process_pool import cores, train_in_pool
from flatmin_lab.methods import METHODS
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.report.html import mean_and_std
from flatmin_lab.report.pages.demo import demo_page, row
from flatmin_lab.runs.events import Epoch, Finished
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.machine import facts

ORDER = ("erm", "amp", *(name for name in METHODS if name not in ("erm", "amp")))  # the two that matter first
COLUMNS = {
    "error": "error, %",
    "nll": "NLL",
    "ece": "ECE, %",
    "memorised": "memorised, %",
    "passes": "passes",
    "cpu_seconds": "CPU s",
}
DIGITS = {"nll": 2, "passes": 0}  # the others: 1


def run_demo(out: Path, *, seeds: int, noise: float, epochs: int, workers: int | None, console: Console) -> Path:
    """Train, print the table, write the files; the path of the page."""
    workers = cores() if workers is None else workers
    for name, value in (("seeds", seeds), ("epochs", epochs), ("workers", workers)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 <= noise < 1:
        raise ValueError(f"--noise must be at least 0 and below 1 (0.2 is a fifth), got {noise}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out} cannot be created ({error}); choose another folder with --out") from error
    data = load()
    if noise > 0 and round(noise * len(data.train)) == 0:
        raise ValueError(f"--noise must be 0, or change at least one of the {len(data.train)} labels, got {noise}")
    usual: dict[str, Any] = {"label_noise": noise, "epochs": epochs, "channels_last": True}  # NHWC: an eighth faster
    recipes = {name: default_recipe("digits", data, method=name, **usual) for name in ORDER}
    jobs = [Job(recipe, seed) for recipe in recipes.values() for seed in range(seeds)]
    close_ups = close_up_jobs(recipes)
    start = perf_counter()
    results = train_all([*close_ups, *jobs], workers, console)
    networks, runs = results[: len(close_ups)], results[len(close_ups) :]
    summary: dict[str, Any] = {
        "noise": noise,
        "seeds": seeds,
        "epochs": epochs,
        "workers": min(workers, len(close_ups) + len(jobs)),
        "train": len(data.train),
        "test": len(data.test),
        "seconds": perf_counter() - start,
        "facts": {**facts(torch.device("cpu")), "threads": 1},
        "runs": runs,
        "networks": {run["method"]: run["close_up"] for run in reversed(networks)},
    }
    Console(highlight=False).print(table(runs, with_noise=noise > 0))
    for name, content in (("demo.json", json.dumps(summary, indent=1)), ("demo.html", demo_page(summary))):
        with atomic_write(out / name) as file:
            file.write(content.encode())
    return out / "demo.html"


def train_all(jobs: Sequence[Job], workers: int, console: Console) -> list[dict[str, Any]]:
    """Run all jobs, showing progress; a result per job, with its epochs."""
    lines: list[list[dict[str, Any]]] = [[] for _ in jobs]
    results: list[dict[str, Any] | None] = [None] * len(jobs)
    say(console, f"{len(jobs)} runs of {epochs_text(jobs[0].recipe.epochs)}, {min(workers, len(jobs))} at once")
    with bars(console, speed_seconds=SECONDS_OF_EPOCHS) as progress:
        total = sum(job.recipe.epochs for job in jobs)
        task = progress.add_task("training", total=total, numbers="starting processes")
        for number, event in train_in_pool(jobs, workers=workers, work=train_with_close_up):
            if isinstance(event, Epoch):
                lines[number].append(dict(event.numbers))
                progress.advance(task)
            elif isinstance(event, Finished):
                results[number] = {**event.result, "lines": lines[number]}
                _say_if_complete(jobs[number].recipe, [r for r in results if r], jobs, console)
            progress.update(task, numbers=f"{sum(r is not None for r in results)} of {len(jobs)} runs")
    return [result for result in results if result is not None]


def _say_if_complete(recipe: Recipe, results: Sequence[dict[str, Any]], jobs: Sequence[Job], console: Console) -> None:
    """The test error of a method once all its seeds are done; the networks with a validation split have none."""
    own = [result for result in results if result["method"] == recipe.method and "test_error" in result]
    if len(own) == sum(job.recipe == recipe for job in jobs):
        say(console, f"{recipe.method}: test error {mean_and_std([100 * result['test_error'] for result in own])} %")


def table(runs: Sequence[dict[str, Any]], *, with_noise: bool) -> Table:
    """Mean ± standard deviation over the seeds, a row per method."""
    columns = {key: label for key, label in COLUMNS.items() if with_noise or key != "memorised"}
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("method", no_wrap=True)
    for label in columns.values():
        shown.add_column(label, justify="right", no_wrap=True)
    for method in ORDER:
        values = row(method, [run for run in runs if run["method"] == method])
        shown.add_row(method, *(mean_and_std(values[key], DIGITS.get(key, 1)) for key in columns))
    return shown
