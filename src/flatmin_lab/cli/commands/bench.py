"""`flatmin bench`: its flags. The measurement is in bench/benchmark.py, the tables in bench_view.py."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from flatmin_lab import models
from flatmin_lab.bench.benchmark import (
    DEFAULT_AT_ONCE,
    DEFAULT_BATCH_SIZES,
    DEFAULT_MODELS,
    DEFAULT_STEPS,
    BenchmarkOptions,
    run_benchmark,
)
from flatmin_lab.bench.contenders import FORMS, METHODS, MODES
from flatmin_lab.cli import display
from flatmin_lab.cli.commands import bench_view
from flatmin_lab.cli.options import Debug, Device, option, report_errors
from flatmin_lab.cli.process.signals import exit_on_signals
from flatmin_lab.data.augment.transforms import KINDS, Kind
from flatmin_lab.recipes.recipe import PRECISIONS
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.files import TEMPORARY_SUFFIX, atomic_write
from flatmin_lab.system.machine import device_named

Names = list[str] | None


def _list_of(values: Any) -> str:
    return ", ".join(map(str, values))


def bench(
    model: Annotated[Names, option(f"{', '.join(models.MODELS)}; default: {_list_of(DEFAULT_MODELS)}.")] = None,
    batch_size: Annotated[Names, option(f"Images per step; default: {_list_of(DEFAULT_BATCH_SIZES)}.")] = None,
    methods: Annotated[Names, option(f"{', '.join(METHODS + MODES)}; default: {_list_of(METHODS)}.")] = None,
    forms: Annotated[Names, option(f"{', '.join(FORMS)}; default: all.")] = None,
    at_once: Annotated[Names, option(f"How many models to step at once; default: {_list_of(DEFAULT_AT_ONCE)}.")] = None,
    steps: Annotated[int, typer.Option(help="Maximum number of steps to time per row.")] = DEFAULT_STEPS,
    precision: Annotated[str | None, option(f"{', '.join(PRECISIONS)}; default: bf16 on a GPU, fp32 on a CPU.")] = None,
    augment: Annotated[str, typer.Option(help=f"How a step augments its images: {', '.join(KINDS)}.")] = "vanilla",
    quick: Annotated[
        bool, option("Only preactresnet18 with batches of 50, unless you name others (always so on a CPU).", "--quick")
    ] = False,
    device: Device = None,
    json_file: Annotated[Path, typer.Option("--json", help="File for all the numbers.")] = Path("out/bench.json"),
    debug: Debug = False,
) -> None:
    """Time a training step, eager and as a CUDA graph, with SGD, AMP and SAM.

    To give an option several values, repeat it or separate them with commas.

    amp-idle never perturbs; amp-quarter computes Δ on a quarter of the batch, amp-half on images of half the size.

    If --json is results/bench-MACHINE.json, the report shows what these modes cost.
    """
    with report_errors(debug), exit_on_signals():
        where = device_named(device)
        quick = quick or where.type != "cuda"  # everything would take hours on a CPU
        options = BenchmarkOptions(
            models=_words("--model", model) or (DEFAULT_MODELS[:1] if quick else DEFAULT_MODELS),
            batch_sizes=_counts("--batch-size", batch_size)
            or (DEFAULT_BATCH_SIZES[:1] if quick else DEFAULT_BATCH_SIZES),
            methods=_words("--methods", methods) or METHODS,
            forms=_words("--forms", forms) or FORMS,
            at_once=_counts("--at-once", at_once) or DEFAULT_AT_ONCE,
            steps=steps,
            precision=precision or ("bf16" if where.type == "cuda" else "fp32"),
            augment=cast(Kind, augment),
        )
        _make_room(json_file)

        console = display.terminal()

        def after(result: dict[str, Any]) -> None:
            _write(json_file, result, console)  # after every table, and before it is printed: its reader may be gone
            bench_view.table(result, result["tables"][-1])

        with display.busy(console) as say:
            result = run_benchmark(options, device=where, say=say, after=after)
        _write(json_file, result)
        bench_view.footer(result, json_file)
        if not any("ms" in row for table in result["tables"] for row in table["rows"]):
            raise typer.Exit(1)


def _words(flag: str, values: Names) -> tuple[str, ...]:
    words = tuple(word.strip() for value in values or [] for word in value.split(",") if word.strip())
    if values and not words:
        raise ValueError(
            f"{flag} takes at least one word or number, got {' '.join(values)!r}; leave it out for the default"
        )
    return words


def _counts(flag: str, values: Names) -> tuple[int, ...]:
    words = _words(flag, values)
    try:
        return tuple(map(int, words))
    except ValueError as error:
        raise ValueError(f"{flag} takes whole numbers, as in 50,128, got {', '.join(values or [])}") from error


def _make_room(path: Path) -> None:
    """Check before minutes of work that the result can be written."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file with --json, such as {path / 'bench.json'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); choose another place with --json") from error


def _write(path: Path, result: dict[str, Any], console: Console | None = None) -> None:
    """Write the result so far. If that fails, print a note and continue, or raise if there is no console."""
    try:
        with atomic_write(path) as file:
            file.write((json.dumps(result, indent=2) + "\n").encode())
    except OSError as error:
        text = f"{path} could not be written ({error.strerror or error})"
        if console is None:
            raise RunError(
                f"{text}; the tables above are what was measured. Make room, or choose another place with --json"
            ) from error
        display.say(
            console, f"note: {text}; make room: it is written again after the next table and at the end", style="yellow"
        )
