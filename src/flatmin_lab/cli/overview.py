"""What `flatmin --help` and `flatmin --version` say, without importing torch, which takes seconds.

The help equals that of the whole command, but is made from a table of the commands; tests keep the two in step.
"""

import re
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import typer

HELP = "Train with Adversarial Model Perturbation (AMP), or with the methods that the paper compares it with."
COMMANDS = {
    "demo": "Train the paper's eight methods on handwritten digits, a fifth of them mislabelled; write a results page.",
    "train": "Train a model with the paper's protocol. A killed run can be resumed with --resume.",
    "doctor": "Check this machine (versions, devices, data sets, AMP on a model), or your own training code.",
    "compare": (
        "Does AMP help? Train with it, without it, and without it at equal cost; answer yes, no, or cannot tell."
    ),
    "evaluate": (
        "Measure a trained model: error, calibration, robustness, flatness. flatmin report shows the results."
    ),
    "landscape": (
        "Measure the loss around the weights of trained models, in the same directions; write a page with 3D plots."
    ),
    "predict": "Classify images with a trained model: the class, its probability, and the runner-up.",
    "export": "Write a trained model to files that can be used without flatmin.",
    "reproduce": ("Reproduce the paper's tables and figures, next to its own numbers. To resume, repeat the command."),
    "tune": ("Tune AMP's ε and ζ, or another method's settings, without the test set. To resume, repeat the command."),
    "report": (
        "Write one page about finished runs: tables, tests, calibration, robustness, landscapes, curves, cost, tuning."
    ),
    "theory": ("Write a page on why flat minima win: change the radius and the minima, and see which one AMP chooses."),
    "bench": "Time a training step, eager and as a CUDA graph, with SGD, AMP and SAM.",
}
ASKED_FOR_HELP: tuple[list[str], ...] = ([], ["--help"], ["-h"])


def new_app() -> typer.Typer:
    """The command, without its commands."""
    return typer.Typer(
        name="flatmin",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def answer(arguments: list[str]) -> bool:
    """Answer what can be answered from here; False if the whole command is needed."""
    if arguments == ["--version"]:
        return _say_version()
    if arguments not in ASKED_FOR_HELP:
        return False
    app = new_app()
    app.callback()(_main)
    for name, text in COMMANDS.items():
        app.command(name, help=text)(_nothing)
    app(arguments)  # which ends the program
    return True


def _main(show_version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    pass


def _nothing() -> None:
    pass


def _say_version() -> bool:
    flatmin, torch = find_spec("flatmin"), PathFinder.find_spec("torch")
    if flatmin is None or flatmin.origin is None or torch is None or torch.origin is None:
        return False
    # the package's metadata may lack the "+cu130" that torch.__version__ has
    known = _version_in(Path(flatmin.origin)), _version_in(Path(torch.origin).with_name("version.py"))
    if None in known:
        return False
    typer.echo("flatmin {}, torch {}".format(*known))
    return True


def _version_in(file: Path) -> str | None:
    """What a Python file sets __version__ to; None if it does not."""
    try:
        found = re.search(r"""^__version__ = ["'](.+)["']""", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found and found[1]
