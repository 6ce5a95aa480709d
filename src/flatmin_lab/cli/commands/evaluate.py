"""The commands that look at trained models: evaluate, landscape, report, theory. Parsing; nothing is computed here."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flatmin_lab.cli import display, model_source
from flatmin_lab.cli.model_source import Asked, Looked
from flatmin_lab.cli.options import DATA, DataDir, Debug, Device, Download, option, reported
from flatmin_lab.cli.signals import ended_by_signals
from flatmin_lab.evaluation import landscapes, measurements
from flatmin_lab.runs import evaluation_files
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.machine import facts
from flatmin_lab.system.optional_deps import need

OWN, ATTACK, FLATNESS = "A model of your own", "With --attack", "With --flatness"
Model = Annotated[
    str | None,
    option("file.py:make_model or mymodule:make_model; CHECKPOINT is then a file with its weights.", panel=OWN),
]
Data = Annotated[
    str | None,
    option("With --model: a data set, an .npz file or a folder. Else where files of your own are, if they moved."),
]
Normalised = Annotated[
    bool,
    option(
        "It takes pictures normalised by the training set's mean and deviation; else from 0 to 1.",
        "--normalised",
        panel=OWN,
    ),
]
Averaged = Annotated[bool, option("The running average of the weights (train --ema).", "--averaged")]


def evaluate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A run's folder, one of its checkpoints, or with --model a file of weights.", show_default=False
        ),
    ] = None,
    attack: Annotated[bool, option("Also the error under FGSM and PGD.", "--attack")] = False,
    flatness: Annotated[
        bool, option("Also the worst and mean loss around the weights, and the Hessian.", "--flatness")
    ] = False,
    data: Data = None,
    data_dir: DataDir = DATA,
    download: Download = False,
    averaged: Averaged = False,
    pictures: Annotated[
        int | None,
        option("How many test pictures to attack (else all), and training pictures for flatness (else 1000)."),
    ] = None,
    radius: Annotated[
        str | None, option("The ball around a picture, in units of a pixel's range; else 4/255.", panel=ATTACK)
    ] = None,
    step_size: Annotated[str | None, option("The length of a step of PGD; else 1/255.", panel=ATTACK)] = None,
    steps: Annotated[int | None, option("The steps of PGD; else 10.", panel=ATTACK)] = None,
    norm: Annotated[str | None, option("The ball's norm: linf or l2; else linf.", panel=ATTACK)] = None,
    epsilon: Annotated[float | None, option("The ball around the weights; else 0.1.", panel=FLATNESS)] = None,
    model: Model = None,
    normalised: Normalised = False,
    device: Device = None,
    as_json: Annotated[bool, option("Print JSON.", "--json")] = False,
    debug: Debug = False,
) -> None:
    """Measure a trained model: error, calibration, robustness, flatness. For the report, the run's folder keeps it."""
    with reported(debug), ended_by_signals():
        lengths = {"radius": model_source.length(radius), "step_size": model_source.length(step_size)}
        attacked = _given(attack, "--attack", {**lengths, "steps": steps, "norm": norm})
        flat = _given(flatness, "--flatness", {"epsilon": epsilon})
        if pictures is not None and not (attack or flatness):
            raise ValueError(
                "--pictures belongs to --attack and --flatness; the rest is measured on the whole test set"
            )
        model_source.check_count("--pictures", pictures)
        asked = Asked(model, data, data_dir, download, normalised, averaged, device)
        (looked,) = asked.models([checkpoint])
        with display.busy(display.terminal()) as say:
            say("the test set")
            found = {**looked.place, **measurements.calibration(looked.subject)}
            if attack:
                found["attack"] = measurements.robustness(looked.subject, pictures=pictures, say=say, **attacked)
            if flatness:
                found["flatness"] = measurements.flatness_of(looked.subject, pictures=pictures, say=say, **flat)
        found["facts"] = facts(looked.subject.device)
        _keep(looked, evaluation_files.EVALUATION, found)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            display.measurements(found)


def landscape(
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs' folders, checkpoints, or with --model files of weights.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("out/landscape.html"),
    points: Annotated[int, typer.Option(help="How many points a side of the plane has; odd.")] = landscapes.POINTS,
    reach: Annotated[
        float, typer.Option(help="How far the plane goes; at 1 a filter has moved by its own length.")
    ] = landscapes.REACH,
    pictures: Annotated[
        int, typer.Option(help="How many pictures of each split the loss is computed on.")
    ] = landscapes.PICTURES,
    seed: Annotated[int, typer.Option(help="The two directions, the same for every model.")] = 0,
    lines_only: Annotated[bool, option("The line through the weights alone.", "--lines-only")] = False,
    data: Data = None,
    data_dir: DataDir = DATA,
    download: Download = False,
    averaged: Averaged = False,
    model: Model = None,
    normalised: Normalised = False,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """The loss around the weights of trained models, all along the same directions: numbers, and a page to turn it."""
    with reported(debug), ended_by_signals():
        for package in ("matplotlib", "jinja2"):
            need(package, "flatmin landscape")
        landscapes.check(points, reach, pictures)
        asked = Asked(model, data, data_dir, download, normalised, averaged, device)
        places: list[Path | None] = [*(checkpoints or [])] or [None]
        count = landscapes.count(points, lines_only=lines_only)
        seen = []
        with display.bars(display.terminal()) as progress:
            task = progress.add_task("landscape", total=count * len(places), numbers="")
            for number, looked in enumerate(asked.models(places)):
                found = landscapes.landscape(
                    looked.subject,
                    points=points,
                    reach=reach,
                    pictures=pictures,
                    seed=seed,
                    lines_only=lines_only,
                    progress=lambda n: progress.update(task, completed=number * count + n),  # noqa: B023
                )
                record = {**looked.place, **found, "facts": facts(looked.subject.device)}
                _keep(looked, evaluation_files.LANDSCAPE, record)
                seen.append((looked.name, looked.method, record))
        _write(out, need("flatmin_lab.report.pages.landscape", "flatmin landscape").landscape_page(seen))


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Runs' folders, tunings, folders of them, or result files; else runs and tuning.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("out/report.html"),
    debug: Debug = False,
) -> None:
    """One page about finished trainings: tables, tests, calibration, robustness, landscapes, curves, cost, tuning."""
    with reported(debug):
        for package in ("matplotlib", "jinja2"):
            need(package, "flatmin report")
        make = need("flatmin_lab.report.pages.report", "flatmin report").report_page
        collect = need("flatmin_lab.report.loader", "flatmin report").collect
        here = [folder for folder in (Path("runs"), Path("tuning")) if folder.exists()] or [Path("runs")]
        found = collect(runs or here)
        page = make(found)
        for broken in found.broken:
            display.say(display.terminal(), f"note: {broken.path}: {broken.why}", style="yellow")
        _write(out, page)
        if not found.runs and not found.tunings:
            raise typer.Exit(1)


def theory(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("out/theory.html"),
    debug: Debug = False,
) -> None:
    """A page about why flat minima win: move the radius and the minima with sliders, and see which one AMP takes."""
    with reported(debug):
        need("jinja2", "flatmin theory")
        _write(out, need("flatmin_lab.report.pages.theory", "flatmin theory").theory_page())


def _given(wanted: bool, flag: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Those that were given; an error where they belong to something that was not asked for."""
    given = {name: value for name, value in knobs.items() if value is not None}
    if given and not wanted:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} belongs to {flag}; add it, or leave this out")
    return given


def _keep(looked: Looked, file: str, found: dict[str, Any]) -> None:
    """In the run's folder, where these are its newest weights."""
    console = display.terminal()
    if looked.run is None:
        return
    if not looked.run.newest:
        display.say(console, "not kept for the report: these are not the run's newest weights")
        return
    try:
        kept = evaluation_files.write_evaluation(looked.run.folder, file, {**found, "checkpoint": looked.run.path.name})
        display.say(console, f"kept in {kept}")
    except OSError as error:
        display.say(console, f"note: not kept in {looked.run.folder}: {error}", style="yellow")


def _write(path: Path, page: str) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file with --out, such as {path / 'page.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(page.encode())
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); choose another place with --out") from error
    typer.echo(f"the page: {path}")
