"""What a tuning found: the measure of every trial over each of the knobs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from flatmin_lab.report.figures.style import INK, STYLES, Drawn, look

WIDE = 20.0  # a range of values, highest over lowest, that is drawn by its logarithm
MARKS: dict[str, dict[str, Any]] = {"finished": {}, "pruned": {"mfc": "none"}}  # filled and hollow
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # 0.01, not a power of ten


class Range(NamedTuple):
    """Where a knob is looked for."""

    low: float
    high: float
    log: bool


def tuning(method: str, measure: str, knobs: Mapping[str, Range], trials: Sequence[Mapping[str, Any]]) -> Drawn:
    """A panel a knob, a mark a trial, which has settings (by knob), value, state and chosen.

    A pruned one stands at its last value, one that failed at the upper edge.
    """
    with look():
        figure = Figure(figsize=(3.5 * len(knobs), 3.0), layout="constrained")
        panels = figure.subplots(1, len(knobs), squeeze=False, sharey=True)[0]
        for axes, (knob, searched) in zip(panels, knobs.items(), strict=True):
            _marks(axes, knob, trials, STYLES[method][0])
            axes.set(xlabel=knob, xlim=(searched.low, searched.high))
            if searched.log:
                axes.set_xscale("log")
                _plain(axes.xaxis)
        _heights(panels[0], [trial["value"] for trial in trials if trial["value"] is not None])
        panels[0].set_ylabel(measure)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4)
    data = {
        "measure": measure,
        "searched": {knob: searched._asdict() for knob, searched in knobs.items()},
        "trials": [dict(trial) for trial in trials],
    }
    return Drawn(figure, data, f"{measure} over {' and '.join(knobs)}, a mark for each trial")


def _marks(axes: Axes, knob: str, trials: Sequence[Mapping[str, Any]], colour: str) -> None:
    shape: dict[str, Any] = {"ls": "", "marker": "o", "ms": 5, "color": colour, "clip_on": False}
    for state, mark in MARKS.items():
        own = [trial for trial in trials if trial["state"] == state and trial["value"] is not None]
        if own:
            places = [trial["settings"][knob] for trial in own]
            axes.plot(places, [trial["value"] for trial in own], label=state, **shape, **mark)
    failed = [trial["settings"][knob] for trial in trials if trial["state"] == "failed"]
    if failed:
        edge = axes.get_xaxis_transform()  # heights in parts of the panel
        axes.plot(failed, [0.98] * len(failed), "x", color=INK, ms=6, label="failed", transform=edge, clip_on=False)
    for trial in trials:
        if trial["chosen"]:
            place = trial["settings"][knob]
            axes.plot(place, trial["value"], "D", color=INK, ms=10, mfc="none", label="chosen", clip_on=False)


def _heights(axes: Axes, values: Sequence[float]) -> None:
    """From 0, or by the logarithm where bad trials would press the others together."""
    if values and 0 < WIDE * min(values) < max(values):
        axes.set_yscale("log")
        _plain(axes.yaxis)
    else:
        axes.set_ylim(0, 1.12 * max(values, default=0) or None)  # room for those that failed


def _plain(axis: Axis) -> None:
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())
