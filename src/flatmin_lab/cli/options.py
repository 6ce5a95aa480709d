"""What the commands share: options, settings, where data and devices are, and how an error is told."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from flatmin_lab.cli import display
from flatmin_lab.execution.cluster.scheduler import Scheduler, open_scheduler
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.machine import devices_named


def option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, **more)


Debug = Annotated[bool, option("Show the traceback of an error.", "--debug")]
DataDir = Annotated[Path, typer.Option(help="Where the official files of the data sets are.")]
Download = Annotated[bool, option("Fetch the official files if they are not there.", "--download")]
Device = Annotated[str | None, option("cpu, cuda, cuda:1 …; else a GPU where there is one.")]
Executor = Annotated[
    str, typer.Option(help="local: on this machine; ray: on a Ray cluster.", rich_help_panel="On a cluster")
]
Address = Annotated[
    str | None,
    option("HOST:PORT of the cluster, or auto; else RAY_ADDRESS, or one started here.", panel="On a cluster"),
]
Gpus = Annotated[
    float | None, option("Of a GPU for each worker there, as 0.5; else a whole one.", panel="On a cluster")
]
DATA = Path("data")
EXECUTORS = ("local", "ray")


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """An error as one message and an exit code; with --debug as Python shows it."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        display.say(display.terminal(), "flatmin: broken off", style="red")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    except Exception as error:
        if debug:
            raise
        text, code = explained(error)
        display.say(display.terminal(), f"flatmin: {text}", style="red")
        raise typer.Exit(code) from None


def explained(error: Exception) -> tuple[str, int]:
    """In words, and as an exit code: 2 for a request that makes no sense."""
    text, code = str(error) or type(error).__name__, 1
    if isinstance(error, ValueError | TypeError | ImportError | FileNotFoundError | FileExistsError):
        code = 2
    elif isinstance(error, torch.OutOfMemoryError):
        text = f"the device has no memory left; try smaller batches, fewer pictures, or --device cpu ({text})"
    elif not isinstance(error, RunError | OSError):
        text = f"{type(error).__name__}: {text} (run it again with --debug to see where)"
    return text, code


@contextmanager
def workplace(
    executor: str,
    *,
    address: str | None,
    gpus: float | None,
    device: str | None,
    workers: int | None,
    console: Console,
) -> Iterator[Scheduler | list[str]]:
    """Where trainings are carried out: on these devices of this machine, or by the scheduler of a cluster."""
    if executor not in EXECUTORS:
        raise ValueError(f"unknown executor {executor!r}; choose from {', '.join(EXECUTORS)}")
    if executor == "local":
        if given := [name for name, value in (("--address", address), ("--gpus", gpus)) if value is not None]:
            raise ValueError(f"{' and '.join(given)} belong to --executor ray; add it, or leave them out")
        yield devices_named(device)
        return

    def say(text: str) -> None:
        display.say(console, f"cluster: {text}")

    with open_scheduler(address, device=device, gpus=gpus, max_workers=workers, say=say) as scheduler:
        yield scheduler


def settings_given(pairs: list[str] | None) -> dict[str, Any]:
    """--set KEY=VALUE: numbers as numbers, words as words."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--set takes KEY=VALUE, got {pair!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
