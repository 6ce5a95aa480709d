"""A progress bar for downloads, on the error stream, so that what a command prints stays clean."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from flatmin_lab.data.formats.download import Progress


@contextmanager
def download_bar() -> Iterator[Progress]:
    """One bar per file, for `load("cifar10", download=True, progress=progress)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def progress(name: str, there: int, size: int) -> None:
        if name not in tasks:
            bars.start()  # not before: if nothing is downloaded, nothing is shown
            tasks[name] = bars.add_task(name, total=size)
        bars.update(tasks[name], completed=there)

    try:
        yield progress
    finally:
        if tasks:
            bars.stop()
