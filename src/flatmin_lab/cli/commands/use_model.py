"""`flatmin predict` and `flatmin export`: a trained model put to use."""

import csv
import io
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from flatmin_lab.cli import display
from flatmin_lab.cli.options import DEFAULT_DATA_DIR, DataDir, Debug, Device, option, report_errors
from flatmin_lab.cli.process.signals import exit_on_signals
from flatmin_lab.evaluation.export import description_of
from flatmin_lab.evaluation.export import export as write_export
from flatmin_lab.evaluation.prediction import Prediction, Unreadable, image_files, predict_files
from flatmin_lab.evaluation.trained_model import TrainedModel, load_run
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.machine import device_named

COLUMNS = ("file", "class", "probability", "runner-up", "its probability")
Run = Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.", show_default=False)]
WeightsOption = Annotated[
    str | None, option("ema or last; default: the EMA of the weights if the run has one (train --ema).")
]


def predict(
    run: Run,
    places: Annotated[
        list[Path],
        typer.Argument(help="Image files, or folders of them.", metavar="IMAGES", show_default=False),
    ],
    out: Annotated[Path | None, option("Also write the table to this CSV file.")] = None,
    weights: WeightsOption = None,
    device: Device = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    debug: Debug = False,
) -> None:
    """Classify images with a trained model: the class, its probability, and the runner-up."""
    with report_errors(debug), exit_on_signals():
        console = display.terminal()
        files = image_files(places)
        _check_out(out)
        trained = _load(run, weights, data_dir, device=str(device_named(device)))
        found = list(predict_files(trained, files))
        rows = [one for one in found if isinstance(one, Prediction)]
        refused = [one for one in found if isinstance(one, Unreadable)]
        display.say(console, f"{trained.recipe.model}, {trained.weights_text} after epoch {trained.epoch}")
        if resized := sum(one.size != trained.input_shape[1:] for one in rows):
            size = " × ".join(map(str, trained.input_shape[1:]))
            display.say(console, f"note: {resized} of {len(rows)} images were resized to {size}", style="yellow")
        if rows:
            Console(highlight=False, soft_wrap=True).print(_table(rows))
        if out is not None:
            _write_csv(out, rows)
        for one in refused:
            display.say(console, f"not predicted: {one.why}", style="red")
        if refused:
            raise typer.Exit(1)


def export(
    run: Run,
    to: Annotated[
        Path,
        typer.Option(
            help="NAME.safetensors for the weights alone, a plain state dict; NAME.pt2 for a torch.export program, "
            "normalisation included. A JSON file beside it describes it.",
            show_default=False,
        ),
    ],
    weights: WeightsOption = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    debug: Debug = False,
) -> None:
    """Write a trained model to files that can be used without flatmin."""
    with report_errors(debug), exit_on_signals():
        trained = _load(run, weights, data_dir, device="cpu")
        said = write_export(trained, to)
        text = f"{trained.weights_text} after epoch {trained.epoch} of {trained.recipe.epochs}: {to}"
        if "largest_difference" in said:
            text += f", whose logits are the model's (largest difference {said['largest_difference']:.1g})"
        typer.echo(f"{text}; described in {description_of(to)}")


def _load(run: Path, weights: str | None, data_dir: Path, *, device: str) -> TrainedModel:
    return load_run(run, weights=weights, device=device, data_dir=data_dir)  # type: ignore[arg-type]


def _table(rows: list[Prediction]) -> Table:
    table = Table(*(Column(name, overflow="fold") for name in COLUMNS), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(display.escape_controls(value)) for value in _values(row)))
    return table


def _values(row: Prediction) -> list[str]:
    shares = [f"{share:.4f}" for share in (row.probability, row.runner_up_probability)]
    return [str(row.file), row.label, shares[0], row.runner_up, shares[1]]


def _check_out(out: Path | None) -> None:
    if out is not None and out.is_dir():
        raise ValueError(f"{out} is a folder; name the file with --out, such as {out / 'predictions.csv'}")


def _write_csv(out: Path, rows: list[Prediction]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name.replace("its", "runner-up").replace("-", "_").replace(" ", "_") for name in COLUMNS])
    writer.writerows(_values(row) for row in rows)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) as file:
            file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); choose another place with --out") from error
    display.say(display.terminal(), f"written to {out}")
