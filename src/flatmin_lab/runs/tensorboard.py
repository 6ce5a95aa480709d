"""The numbers of metrics.jsonl as TensorBoard curves, where TensorBoard is installed."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Board:
    """TensorBoard files in a folder: a point per epoch for every number."""

    def __init__(self, folder: Path, *, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # points after the epoch that training resumes from are hidden: they will be written again
        self.writer = SummaryWriter(str(folder), purge_step=after + 1)

    @staticmethod
    def where_installed(folder: Path, *, after: int = 0) -> "Board | None":
        return Board(folder, after=after) if find_spec("tensorboard") else None

    def add(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if isinstance(value, int | float) and name != "epoch":
                self.writer.add_scalar(name, value, line["epoch"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
