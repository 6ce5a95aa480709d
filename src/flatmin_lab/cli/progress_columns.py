"""The text beside a progress bar: the time left once there is an estimate, and until then what is happening.

An estimate needs two points in time with work between them. Before that the time left is not shown at all, and the text
says what happens instead, such as compiling before the first steps.
"""

from datetime import timedelta
from math import ceil

from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from flatmin_lab.recipes.recipe import Recipe

COMPILING = "compiling: about half a minute the first time"  # PreActResNet18, an H200: docs/speed.md
WARMUP_STEPS = 2  # the first one is an ordinary step, the second one compiles and captures: no measure of the rest
WIDE = 110  # characters of a terminal that has room for a long bar and the time taken
SECONDS_OF_EPOCHS = 3600.0  # over which the speed is estimated where epochs are counted: one may take minutes


def first_steps_text(recipe: Recipe, *, on_gpu: bool, captured: bool = True) -> str:
    """What a run does before its first numbers arrive.

    >>> first_steps_text(Recipe(data="digits", method="amp", model="mlp", epochs=1), on_gpu=False)
    'the first steps'
    """
    if not (on_gpu and captured):
        return "the first steps"
    return COMPILING if recipe.compile else "recording the step as a CUDA graph"


def time_left(seconds: float | None) -> str:
    """As in 0:12:30 left; nothing where there is no estimate, or nothing left to do.

    >>> time_left(750), time_left(None)
    ('0:12:30 left', '')
    """
    return f"{timedelta(seconds=ceil(seconds))} left" if seconds else ""


class TimeLeftColumn(ProgressColumn):
    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(time_left(task.time_remaining), style="progress.remaining")


class NumbersColumn(ProgressColumn):
    """The field `numbers`, cut off where the terminal ends."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")


def columns(width: int) -> list[ProgressColumn]:
    """A bar in any terminal, a short one where the numbers need the room."""
    whole = Column(no_wrap=True)  # in a narrow terminal the numbers alone are cut
    bar = BarColumn(bar_width=24 if width >= WIDE else 10, table_column=whole)
    elapsed = [TimeElapsedColumn(table_column=whole)] if width >= WIDE else []
    return [TextColumn("{task.description}"), bar, *elapsed, TimeLeftColumn(table_column=whole), NumbersColumn()]
