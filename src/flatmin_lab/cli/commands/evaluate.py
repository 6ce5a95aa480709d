"""`flatmin evaluate`, `landscape`, `report` and `theory`: their flags, and the files that they write."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flatmin.flatness.weights import check_radius
from flatmin_lab.cli import browser, display, model_source
from flatmin_lab.cli.model_source import EvaluatedModel, ModelSource
from flatmin_lab.cli.options import DEFAULT_DATA_DIR, DataDir, Debug, Device, Download, OpenPage, option, report_errors
from flatmin_lab.cli.process.signals import exit_on_signals
from flatmin_lab.evaluation import landscapes, measurements
from flatmin_lab.evaluation.confidence import detection
from flatmin_lab.runs import evaluation_files
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.machine import facts
from flatmin_lab.system.optional_deps import need

PRODUCTS = measurements.SPECTRUM_PROBES * measurements.SPECTRUM_STEPS  # of two passes each
OWN, ATTACK, FLATNESS = "Your own model", "With --attack", "With --flatness"
Model = Annotated[
    str | None,
    option("file.py:make_model or mymodule:make_model; CHECKPOINT is then a file with its weights.", panel=OWN),
]
Data = Annotated[
    str | None,
    option(
        "With --model: a data set, an .npz file or a folder. For a run: where your own data is now, if it has moved."
    ),
]
Size = Annotated[
    tuple[int, int] | None, option("Resize the images of a folder to this height and width, such as 32 32.", panel=OWN)
]
Normalised = Annotated[
    bool,
    option(
        "Its inputs are normalised by the training set's mean and standard deviation; default: from 0 to 1.",
        "--normalised",
        panel=OWN,
    ),
]
Averaged = Annotated[bool, option("Use the EMA of the weights (train --ema).", "--averaged")]


def evaluate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A run folder, one of its checkpoints, or with --model a file of weights.", show_default=False
        ),
    ] = None,
    attack: Annotated[bool, option("Also measure the error under FGSM and PGD.", "--attack")] = False,
    flatness: Annotated[
        bool, option("Also measure the worst and mean loss around the weights, and the Hessian.", "--flatness")
    ] = False,
    spectrum: Annotated[
        bool, option(f"Also the density of the Hessian's eigenvalues, from {PRODUCTS} products with it.", "--spectrum")
    ] = False,
    outside: Annotated[
        list[str] | None,
        option("Also AUROC and FPR95 against another data set's test images: a name, an .npz file or a folder."),
    ] = None,
    data: Data = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    download: Download = False,
    use_ema: Averaged = False,
    images: Annotated[
        int | None,
        option(
            "Number of test images to attack (default: all), or of training images for flatness and spectrum "
            "(default: 1000).",
            "--images",
        ),
    ] = None,
    radius: Annotated[
        str | None,
        option("Radius of the ball around an image, as a fraction of the pixel range; default: 4/255.", panel=ATTACK),
    ] = None,
    step_size: Annotated[str | None, option("PGD's step size; default: a quarter of the radius.", panel=ATTACK)] = None,
    steps: Annotated[int | None, option("Number of PGD steps; default: 10.", panel=ATTACK)] = None,
    norm: Annotated[str | None, option("The ball's norm: linf or l2; default: linf.", panel=ATTACK)] = None,
    epsilon: Annotated[
        float | None, option("Radius of the ball around the weights; default: 0.1.", panel=FLATNESS)
    ] = None,
    model: Model = None,
    size: Size = None,
    normalised: Normalised = False,
    device: Device = None,
    as_json: Annotated[bool, option("Print JSON.", "--json")] = False,
    debug: Debug = False,
) -> None:
    """Measure a trained model: error, calibration, robustness, flatness. flatmin report shows the results."""
    with report_errors(debug), exit_on_signals():
        lengths = {
            "radius": model_source.parse_length("--radius", radius),
            "step_size": model_source.parse_length("--step-size", step_size),
        }
        attacked = _given(attack, "--attack", {**lengths, "steps": steps, "norm": norm})
        flat = _given(flatness, "--flatness", {"epsilon": epsilon})
        measurements.check_attack(**attacked)  # now, and not after an hour of other measurements
        check_radius(measurements.FLATNESS_EPSILON if epsilon is None else epsilon)
        if images is not None and not (attack or flatness or spectrum):
            raise ValueError(
                "--images belongs to --attack, --flatness and --spectrum; everything else uses the whole test set"
            )
        model_source.check_count("--images", images)
        source = ModelSource(model, data, size, data_dir, download, normalised, use_ema, device)
        (evaluated,) = source.models([checkpoint])
        measurements.check_attack(**attacked, pixels=evaluated.subject.test.is_images)
        others = list(source.outside(outside or [], evaluated.subject))  # a bar of its own, and errors at once
        found: dict[str, Any] = {}
        try:
            with display.busy(display.terminal()) as say:
                say("evaluating the test set")
                logits = measurements.logits_on_test(evaluated.subject)
                found |= {**evaluated.description, **measurements.calibration(evaluated.subject, logits)}
                for other in others:
                    say("comparing with outside data")
                    found.setdefault("outside", {})[other.name] = detection(evaluated.subject, logits, other)
                if attack:
                    found["attack"] = measurements.robustness(evaluated.subject, images=images, say=say, **attacked)
                if flatness:
                    found["flatness"] = measurements.flatness_of(evaluated.subject, images=images, say=say, **flat)
                if spectrum:
                    found["spectrum"] = measurements.spectrum_of(evaluated.subject, images=images, say=say)
        finally:  # an hour of attacks is kept, whatever happens to what comes after them
            if found:
                found["facts"] = facts(evaluated.subject.device)
                _keep(evaluated, evaluation_files.EVALUATION, found)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            display.measurements(found)


def landscape(
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, checkpoints, or with --model files of weights.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("out/landscape.html"),
    points: Annotated[int, typer.Option(help="Points along each side of the plane (odd).")] = landscapes.POINTS,
    reach: Annotated[
        float, typer.Option(help="Half the side of the plane; at 1, a filter has moved by its own length.")
    ] = landscapes.REACH,
    images: Annotated[
        int, typer.Option(help="Number of images of each split to compute the loss on.")
    ] = landscapes.IMAGES,
    seed: Annotated[int, typer.Option(help="Seed for the two directions, which all models share.")] = 0,
    lines_only: Annotated[
        bool, option("Measure only a line through the weights, not a plane.", "--lines-only")
    ] = False,
    between: Annotated[
        bool, option("Measure the loss and the error on the line between two models instead.", "--between")
    ] = False,
    data: Data = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    download: Download = False,
    use_ema: Averaged = False,
    model: Model = None,
    size: Size = None,
    normalised: Normalised = False,
    device: Device = None,
    in_browser: OpenPage = False,
    debug: Debug = False,
) -> None:
    """Measure the loss around the weights of trained models, in the same directions; write a page with 3D plots."""
    with report_errors(debug), exit_on_signals():
        for package in ("matplotlib", "jinja2"):
            need(package, "flatmin landscape")
        landscapes.check_options(points, reach, images)
        _check_page(out)  # now, not after an hour of measuring
        source = ModelSource(model, data, size, data_dir, download, normalised, use_ema, device)
        places: list[Path | None] = [*(checkpoints or [])] or [None]
        if between:
            if lines_only or (reach, seed) != (landscapes.REACH, 0):
                raise ValueError("--reach, --seed and --lines-only belong to random directions; --between has none")
            _line_between(source, places, points=points, images=images, out=out, in_browser=in_browser)
            return
        count = landscapes.count_points(points, lines_only=lines_only)
        seen = []
        with display.bars(display.terminal()) as progress:
            task = progress.add_task("landscape", total=count * len(places), numbers="")
            for number, evaluated in enumerate(source.models(places)):
                found = landscapes.landscape(
                    evaluated.subject,
                    points=points,
                    reach=reach,
                    images=images,
                    seed=seed,
                    lines_only=lines_only,
                    progress=lambda n: progress.update(task, completed=number * count + n),  # noqa: B023
                )
                event = {**evaluated.description, **found, "facts": facts(evaluated.subject.device)}
                _keep(evaluated, evaluation_files.LANDSCAPE, event)
                seen.append((evaluated.name, evaluated.method, event))
        _write(
            out,
            need("flatmin_lab.report.pages.landscape", "flatmin landscape").landscape_page(seen),
            in_browser=in_browser,
        )


def _line_between(
    source: ModelSource, places: list[Path | None], *, points: int, images: int, out: Path, in_browser: bool
) -> None:
    if len(places) != 2:
        raise ValueError(f"--between needs two run folders, checkpoints or files of weights, got {len(places)}")
    if None not in places and len({place.resolve() for place in places if place is not None}) == 1:
        raise ValueError(
            f"--between needs two different models, got {places[0]} twice; give another one's folder or file"
        )
    first, second = source.models(places)
    with display.bars(display.terminal()) as progress:
        task = progress.add_task("line", total=2 * points, numbers="")
        found = landscapes.line_between(
            first.subject,
            second.subject,
            points=points,
            images=images,
            progress=lambda n: progress.update(task, completed=n),
        )
    page = need("flatmin_lab.report.pages.between", "flatmin landscape")
    for sentence in page.barrier_sentences(found):
        typer.echo(sentence)
    made = page.between_page((first.name, second.name), found, facts(first.subject.device))
    _write(out, made, in_browser=in_browser)


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders, tuning folders, folders of these, or result files; default: runs and tuning.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("out/report.html"),
    in_browser: OpenPage = False,
    debug: Debug = False,
) -> None:
    """Write one page about finished runs: tables, tests, calibration, robustness, landscapes, curves, cost, tuning."""
    with report_errors(debug):
        for package in ("matplotlib", "jinja2"):
            need(package, "flatmin report")
        make = need("flatmin_lab.report.pages.report", "flatmin report").report_page
        load_results = need("flatmin_lab.report.loader", "flatmin report").load_results
        here = [folder for folder in (Path("runs"), Path("tuning")) if folder.exists()] or [Path("runs")]
        found = load_results(runs or here)
        for unusable in found.unusable:
            display.say(display.terminal(), f"note: {unusable.path}: {unusable.why}", style="yellow")
        if not found.runs and not found.tunings:
            display.say(display.terminal(), f"flatmin: nothing to report, so {out} was not written", style="red")
            raise typer.Exit(1)
        _write(out, make(found), in_browser=in_browser)


def theory(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("out/theory.html"),
    in_browser: OpenPage = False,
    debug: Debug = False,
) -> None:
    """Write a page on why flat minima win: change the radius and the minima, and see which one AMP chooses."""
    with report_errors(debug):
        need("jinja2", "flatmin theory")
        _write(out, need("flatmin_lab.report.pages.theory", "flatmin theory").theory_page(), in_browser=in_browser)


def _given(wanted: bool, flag: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; an error if the flag they belong to was not."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and not wanted:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} belongs to {flag}; add it, or leave this out")
    return given


def _keep(evaluated: EvaluatedModel, file: str, found: dict[str, Any]) -> None:
    """Keep the results in the run folder, if these are its newest weights."""
    console = display.terminal()
    if evaluated.is_average:
        display.say(console, "not saved for the report: it shows what was measured of the last weights")
    if evaluated.run is None:
        return
    if not evaluated.run.is_newest:
        display.say(console, "not saved for the report: these are not the run's newest weights")
        return
    try:
        kept = evaluation_files.write_evaluation(
            evaluated.run.folder, file, {**found, "checkpoint": evaluated.run.path.name}
        )
        display.say(console, f"saved in {kept}")
    except OSError as error:
        display.say(console, f"note: not saved in {evaluated.run.folder}: {error}", style="yellow")


def _check_page(path: Path) -> None:
    """Raise where no page can be written; the folder it goes to is made."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file with --out, such as {path / 'page.html'}")
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def _write(path: Path, page: str, *, in_browser: bool) -> None:
    _check_page(path)
    with _writable(path), atomic_write(path) as file:
        file.write(page.encode())
    browser.announce(path, in_browser=in_browser)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); choose another place with --out") from error
