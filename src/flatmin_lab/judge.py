"""The commands that look at trained models: evaluate, landscape, report, theory. Parsing; nothing is computed here."""

import json
import shlex
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from flatmin.ball import NORMS
from flatmin_lab import examine, judgements, landscapes, own_model, show, subject, trained
from flatmin_lab.cli_parts import DATA, DataDir, Debug, Device, Download, option, reported
from flatmin_lab.extras import need
from flatmin_lab.files import written_whole
from flatmin_lab.machine import device_named, facts
from flatmin_lab.request import read, read_for
from flatmin_lab.signals import ended_by_signals
from flatmin_lab.subject import Subject
from flatmin_lab.trained import Trained

OWN, ATTACK, FLATNESS = "A model of your own", "Attack", "Flatness"
Model = Annotated[
    str | None,
    option("Your own: file.py:make_model or mymodule:make_model. CHECKPOINT is then a file with weights.", panel=OWN),
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
        Path | None, typer.Argument(help="A run's folder, or one of its checkpoints.", show_default=False)
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
        int | None, option("Attack so many test pictures (else all), and take so many for flatness (else 1000).")
    ] = None,
    radius: Annotated[
        str, typer.Option(help="Of the attack, in units of a pixel's range.", rich_help_panel=ATTACK)
    ] = "4/255",
    step_size: Annotated[str, typer.Option(help="Of PGD.", rich_help_panel=ATTACK)] = "1/255",
    steps: Annotated[int, typer.Option(help="Of PGD.", rich_help_panel=ATTACK)] = examine.STEPS,
    norm: Annotated[str, typer.Option(help="linf or l2.", rich_help_panel=ATTACK)] = "linf",
    epsilon: Annotated[
        float, typer.Option(help="The radius of the ball around the weights.", rich_help_panel=FLATNESS)
    ] = examine.EPSILON,
    model: Model = None,
    normalised: Normalised = False,
    device: Device = None,
    as_json: Annotated[bool, option("Print JSON.", "--json")] = False,
    debug: Debug = False,
) -> None:
    """Measure a trained model: error, calibration, robustness, flatness. What is found is kept in the run's folder."""
    with reported(debug), ended_by_signals():
        if pictures is not None and pictures < 1:
            raise ValueError(f"--pictures must be at least 1, got {pictures}")
        if norm not in NORMS:
            raise ValueError(f"--norm must be one of {', '.join(NORMS)}, got {norm}")
        knobs: dict[str, Any] = {"radius": _share(radius), "step_size": _share(step_size), "steps": steps, "norm": norm}
        (looked,) = _looked_at([checkpoint], model, data, data_dir, download, normalised, averaged, device)
        with show.busy(show.terminal()) as say:
            say("the test set")
            found = {**looked.place, **examine.calibration(looked.subject)}
            if attack:
                found["attack"] = examine.robustness(looked.subject, pictures=pictures, say=say, **knobs)
            if flatness:
                found["flatness"] = examine.flatness_of(looked.subject, epsilon=epsilon, pictures=pictures, say=say)
        found["facts"] = facts(looked.subject.device)
        looked.keep(judgements.EVALUATION, found)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            show.measurements(found)


def landscape(
    checkpoints: Annotated[
        list[Path] | None, typer.Argument(help="Runs' folders, or checkpoints of them.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("out/landscape.html"),
    points: Annotated[int, typer.Option(help="Of each side of the plane; odd.")] = landscapes.POINTS,
    reach: Annotated[float, typer.Option(help="How far it goes; 1: as far as weights are long.")] = landscapes.REACH,
    pictures: Annotated[int, typer.Option(help="Of each split, to compute the loss on.")] = landscapes.PICTURES,
    seed: Annotated[int, typer.Option(help="Of the two directions, the same for every model.")] = 0,
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
        places: list[Path | None] = list(checkpoints or [])
        seen = []
        console = show.terminal()
        with show.bars(console) as progress:
            total = landscapes.count(points, lines_only=lines_only) * max(len(places), 1)
            task = progress.add_task("landscape", total=total, numbers="")
            done = 0
            for looked in _looked_at(places or [None], model, data, data_dir, download, normalised, averaged, device):
                found = landscapes.landscape(
                    looked.subject,
                    points=points,
                    reach=reach,
                    pictures=pictures,
                    seed=seed,
                    lines_only=lines_only,
                    progress=lambda n: progress.update(task, completed=done + n),  # noqa: B023
                )
                done += landscapes.count(points, lines_only=lines_only)
                record = {**looked.place, **found, "facts": facts(looked.subject.device)}
                looked.keep(judgements.LANDSCAPE, record)
                seen.append((looked.name, looked.method, record))
        page = need("flatmin_lab.report.landscape_page", "flatmin landscape").landscape_page(seen)
        _write(out, page)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs' folders, folders of them, or result files; else runs.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("out/report.html"),
    debug: Debug = False,
) -> None:
    """One page about finished trainings: tables, tests, calibration, robustness, landscapes, curves, cost."""
    with reported(debug):
        for package in ("matplotlib", "jinja2"):
            need(package, "flatmin report")
        make = need("flatmin_lab.report.report_page", "flatmin report").report_page
        collect = need("flatmin_lab.report.collected", "flatmin report").collect
        found = collect(runs or [Path("runs")])
        for broken in found.broken:
            show.say(show.terminal(), f"note: {broken.path}: {broken.why}", style="yellow")
        _write(out, make(found))


def theory(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("out/theory.html"),
    debug: Debug = False,
) -> None:
    """A page about why flat minima win: move the radius and the minima with sliders, and see which one AMP takes."""
    with reported(debug):
        need("jinja2", "flatmin theory")
        _write(out, need("flatmin_lab.report.theory_page", "flatmin theory").theory_page())


def _write(path: Path, page: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            file.write(page.encode())
    except (IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError) as error:
        raise ValueError(f"{path} cannot be written ({error}); choose another place with --out") from error
    typer.echo(f"the page: {path}")


# ---- which model, on which data


class Looked(NamedTuple):
    """A model to look at, what it is called, and where what is found is kept."""

    name: str
    method: str | None
    subject: Subject
    place: dict[str, Any]
    run: Trained | None

    def keep(self, file: str, found: dict[str, Any]) -> None:
        """In the run's folder, where these are its newest weights."""
        if self.run is None or not self.run.newest:
            return
        console = show.terminal()
        try:
            kept = judgements.keep(self.run.folder, file, {**found, "checkpoint": self.run.path.name})
            show.say(console, f"kept in {kept}")
        except OSError as error:
            show.say(console, f"note: not kept in {self.run.folder}: {error}", style="yellow")


def _looked_at(
    places: list[Path | None],
    model: str | None,
    data: str | None,
    data_dir: Path,
    download: bool,
    normalised: bool,
    averaged: bool,
    device: str | None,
) -> Iterator[Looked]:
    where = device_named(device)
    if model is None and None in places:
        raise ValueError("name a run's folder or a checkpoint, or a model of your own with --model and --data")
    if model is not None and (data is None or averaged):
        raise ValueError("--model needs --data, and has no --averaged weights")
    for place in places:
        if model is not None and data is not None:
            yield _own(model, place, read(data, data_dir, download=download, size=None), normalised, where)
            continue
        assert place is not None
        run = trained.find(place)
        for damaged in run.passed_over:
            show.say(show.terminal(), f"note: {damaged}; the one before it is measured", style="yellow")
        pictures = read_for(run.recipe, data, data_dir, download=download)
        examined = trained.subject_of(run, pictures, averaged=averaged, device=where)
        kept = None if averaged else run
        name = f"{run.recipe.method}, seed {run.seed}"
        yield Looked(name, run.recipe.method, examined, run.place(), kept)


def _own(name: str, weights: Path | None, pictures: Any, normalised: bool, device: Any) -> Looked:
    made = own_model.make(name)
    if weights is not None:
        own_model.load(made, weights)
    shown = weights.name if weights is not None else name
    place = {"model": name, "weights": None if weights is None else str(weights), "data": pictures.name}
    return Looked(shown, None, subject.of_own(made, pictures, normalised=normalised, device=device), place, None)


def _share(text: str) -> float:
    """A number, or a fraction: 4/255."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"a length must be a number or a fraction such as 4/255, got {shlex.quote(text)}") from error
    if value < 0:
        raise ValueError(f"a length must be at least 0, got {text}")
    return value
