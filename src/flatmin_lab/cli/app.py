"""The command `flatmin`: flags turned into calls. Nothing is computed here.

Exit codes: 0; 1 for a run that failed; 2 for an invalid request; 130, 143 and 129 after Ctrl-C, SIGTERM and a closed
terminal.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

import flatmin
from flatmin_lab.cli import browser, display
from flatmin_lab.cli.commands import bench, compare, evaluate, train, tune, use_model
from flatmin_lab.cli.commands import doctor as doctor_command
from flatmin_lab.cli.commands.reproduce import reproduce
from flatmin_lab.cli.options import DEFAULT_DATA_DIR, DataDir, Debug, Device, OpenPage, option, report_errors
from flatmin_lab.cli.overview import new_app
from flatmin_lab.cli.process.signals import exit_on_signals
from flatmin_lab.cli.training_options import parse_numbers
from flatmin_lab.system.machine import device_named
from flatmin_lab.system.optional_deps import need

app = new_app()
OLD_NAMES = {"pictures": "images"}  # of options: they still work, and the help has the new ones
RENAMED = {"token_normalize_func": lambda name: OLD_NAMES.get(name, name)}


def version(asked: bool) -> None:
    if asked:
        typer.echo(f"flatmin {flatmin.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[bool, option("Print the version.", "--version", callback=version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.html and demo.json.")] = Path("out/demo"),
    seeds: Annotated[int, typer.Option(help="Training runs per method, with seeds 0, 1, 2, …")] = 5,
    noise: Annotated[float, typer.Option(help="Fraction of the training labels to replace with wrong ones.")] = 0.2,
    epochs: Annotated[int, typer.Option(help="Epochs per run.")] = 18,
    workers: Annotated[int | None, option("How many runs to train at once; default: one per core.")] = None,
    in_browser: OpenPage = False,
    debug: Debug = False,
) -> None:
    """Train the paper's eight methods on handwritten digits, a fifth of them mislabelled; write a results page."""
    with report_errors(debug), exit_on_signals():
        for package in ("matplotlib", "jinja2", "sklearn"):
            need(package, "flatmin demo")
        # imported here, so that other commands need not wait for matplotlib
        run_demo = need("flatmin_lab.cli.commands.demo", "flatmin demo").run_demo
        page = run_demo(out, seeds=seeds, noise=noise, epochs=epochs, workers=workers, console=display.terminal())
        browser.announce(page, in_browser=in_browser)


app.command()(train.train)


@app.command()
def doctor(
    training: Annotated[
        str | None, typer.Argument(help="Your own training code: mymodule:make_training or file.py:make_training.")
    ] = None,
    model: Annotated[str | None, option("A built-in model, or your own: file.py:make_model; default: convnet.")] = None,
    shape: Annotated[str | None, option("The shape of one input of that model; default: 3,32,32.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Check this machine (versions, devices, data sets, AMP on a model), or your own training code."""
    with report_errors(debug):
        if training is not None:
            if (model, shape, device) != (None, None, None):
                raise ValueError(
                    "training code has its own model, inputs and device; leave out the flags, or the training code"
                )
            sound = doctor_command.show_findings(training, doctor_command.examine_user_training(training))
        else:
            given = parse_numbers("3,32,32" if shape is None else shape)
            sizes = [int(side) for side in given]
            if min(sizes) < 1 or sizes != [*given]:
                raise ValueError(f"--shape takes whole numbers above 0, as in 3,32,32, got {shape}")
            sound = doctor_command.run(model or "convnet", sizes, data_dir, device_named(device))
        if not sound:
            raise typer.Exit(1)


app.command()(compare.compare)
app.command(context_settings=RENAMED)(evaluate.evaluate)
app.command(context_settings=RENAMED)(evaluate.landscape)
for command in (
    use_model.predict,
    use_model.export,
    reproduce.reproduce,
    tune.tune,
    evaluate.report,
    evaluate.theory,
    bench.bench,
):
    app.command()(command)
