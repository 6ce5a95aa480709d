"""What the commands share: options, the choice of devices or a cluster, settings, and how errors are reported."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from flatmin_lab.cli import display
from flatmin_lab.execution.process_pool import local_executor
from flatmin_lab.execution.run_queue import RunExecutor
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.machine import devices_named
from flatmin_lab.system.optional_deps import need


def option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, **more)


Debug = Annotated[bool, option("Show the traceback of an error.", "--debug")]
OpenPage = Annotated[bool, option("Open the page in the default browser.", "--open")]
DataDir = Annotated[Path, typer.Option(help="Folder with the official files of the data sets.")]
Download = Annotated[bool, option("Download the official files if they are missing.", "--download")]
Device = Annotated[str | None, option("cpu, cuda, cuda:1 …; default: a GPU if there is one.")]
ConfigFile = Annotated[Path | None, option("Start from a recipe: a JSON file, or a run folder. Flags override it.")]
Executor = Annotated[
    str, typer.Option(help="local: on this machine; ray: on a Ray cluster.", rich_help_panel="On a cluster")
]
Address = Annotated[
    str | None,
    option(
        "HOST:PORT of the cluster, or auto; default: RAY_ADDRESS, or a new one on this machine.", panel="On a cluster"
    ),
]
Gpus = Annotated[
    float | None, option("GPUs for each worker on the cluster, such as 0.5; default: 1.", panel="On a cluster")
]
DEFAULT_DATA_DIR = Path("data")
EXECUTORS = ("local", "ray")


@contextmanager
def report_errors(debug: bool) -> Iterator[None]:
    """Report an error as one message and an exit code; with --debug, as Python shows it."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        display.say(display.terminal(), "flatmin: interrupted", style="red")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    except Exception as error:
        if debug:
            raise
        text, code = explain_error(error)
        display.say(display.terminal(), f"flatmin: {text}", style="red")
        raise typer.Exit(code) from None


def explain_error(error: Exception) -> tuple[str, int]:
    """The message and the exit code of an error; 2 is for an invalid request."""
    text, code = str(error) or type(error).__name__, 1
    if isinstance(error, ValueError | TypeError | ImportError | FileNotFoundError | FileExistsError):
        code = 2
    elif isinstance(error, torch.OutOfMemoryError):
        text = f"the device is out of memory; try smaller batches, fewer images, or --device cpu ({text})"
    elif not isinstance(error, RunError | OSError):
        text = f"{type(error).__name__}: {text} (run it again with --debug to see where)"
    return text, code


@contextmanager
def open_executor(
    executor: str,
    *,
    address: str | None,
    gpus: float | None,
    device: str | None,
    workers: int | None,
    console: Console,
    default_workers: Callable[[], int] | None = None,
) -> Iterator[RunExecutor]:
    """What executes runs: this machine, or a cluster, whose code is imported only then.

    With `default_workers` there are that many CPU workers with one thread each; without, one per device.
    """
    _check_without_torchrun()
    if executor not in EXECUTORS:
        raise ValueError(f"unknown executor {executor!r}; choose from {', '.join(EXECUTORS)}")
    if executor == "local":
        if given := [name for name, value in (("--address", address), ("--gpus", gpus)) if value is not None]:
            raise ValueError(f"{' and '.join(given)} belong to --executor ray; add it, or leave them out")
        yield _on_this_machine(devices_named(device), workers, default_workers)
        return

    def say(text: str) -> None:
        display.say(console, f"cluster: {text}")

    cluster = need("flatmin_lab.execution.cluster.scheduler", "--executor ray", extra="cluster")
    with cluster.open_scheduler(address, device=device, gpus=gpus, max_workers=workers, say=say) as scheduler:
        yield scheduler


def _check_without_torchrun() -> None:
    """Every process of torchrun would train all models, and they would take each other's folders."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and processes != "1":
        raise ValueError(
            f"torchrun is for one model that several processes train (flatmin train), got {processes} processes for a "
            "command that trains many models; leave out torchrun, which --workers replaces on a CPU"
        )


def _on_this_machine(devices: list[str], workers: int | None, default_workers: Callable[[], int] | None) -> RunExecutor:
    if default_workers is None:
        return local_executor([devices[number % len(devices)] for number in range(workers or len(devices))])
    if devices[0] == "cpu":
        return local_executor(["cpu"] * (workers or default_workers()), single_thread=True)
    return local_executor(devices)


def parse_settings(pairs: list[str] | None, flag: str = "--set") -> dict[str, Any]:
    """The settings of --set KEY=VALUE; numbers become numbers, also .5, and 0.9,0.95 a list of them."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{flag} takes KEY=VALUE, got {pair!r}")
        whole = re.sub(r"(?<![\w.])\.(?=\d)", "0.", value)  # JSON has no .5
        for text in (value, whole, *([f"[{whole}]"] if "," in value else []), json.dumps(value)):
            try:
                found[key] = json.loads(text)
            except ValueError:
                continue
            break
    return found
