"""What a tuning found: the measure of every trial over each hyper-parameter."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from flatmin_lab.report.figures.style import INK, LINE_STYLES, DrawnFigure, styled

LOG_SCALE_RATIO = 20.0  # of the highest value to the lowest; above it the axis is logarithmic
STATE_MARKS: dict[str, dict[str, Any]] = {"finished": {}, "pruned": {"mfc": "none"}}  # filled and hollow circles
PLAIN_NUMBERS = FuncFormatter(lambda value, _: f"{value:g}")  # 0.01, not a power of ten


class SearchRange(NamedTuple):
    """The range that is searched for a hyper-parameter."""

    low: float
    high: float
    log: bool


def tuning(
    method: str, measure: str, parameters: Mapping[str, SearchRange], trials: Sequence[Mapping[str, Any]]
) -> DrawnFigure:
    """A panel per hyper-parameter, a mark per trial; a trial has settings, value, state, chosen and is_erm.

    A pruned trial is drawn at its last value, a failed one at the upper edge. ERM, which has no hyper-parameter, is a
    line across all panels.
    """
    with styled():
        figure = Figure(figsize=(3.5 * len(parameters), 3.0), layout="constrained")
        panels = figure.subplots(1, len(parameters), squeeze=False, sharey=True)[0]
        for axes, (parameter, searched) in zip(panels, parameters.items(), strict=True):
            _draw_marks(axes, parameter, [trial for trial in trials if not trial["is_erm"]], LINE_STYLES[method][0])
            for trial in trials:
                if trial["is_erm"] and trial["state"] == "finished":
                    axes.axhline(trial["value"], color=LINE_STYLES["erm"][0], lw=1.2, ls="--", label="ERM", zorder=1)
            axes.set(xlabel=parameter, xlim=(searched.low, searched.high))
            if searched.log:
                axes.set_xscale("log")
                _label_plainly(axes.xaxis)
        _set_value_scale(panels[0], [trial["value"] for trial in trials if trial["value"] is not None])
        panels[0].set_ylabel(measure)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=5)
    data = {
        "measure": measure,
        "searched": {parameter: searched._asdict() for parameter, searched in parameters.items()},
        "trials": [dict(trial) for trial in trials],
    }
    return DrawnFigure(figure, data, f"{measure} over {' and '.join(parameters)}, a mark for each trial")


def _draw_marks(axes: Axes, parameter: str, trials: Sequence[Mapping[str, Any]], colour: str) -> None:
    shape: dict[str, Any] = {"ls": "", "marker": "o", "ms": 5, "color": colour, "clip_on": False}
    for state, mark in STATE_MARKS.items():
        own = [trial for trial in trials if trial["state"] == state and trial["value"] is not None]
        if own:
            places = [trial["settings"][parameter] for trial in own]
            axes.plot(places, [trial["value"] for trial in own], label=state, **shape, **mark)
    failed = [trial["settings"][parameter] for trial in trials if trial["state"] == "failed"]
    if failed:
        edge = axes.get_xaxis_transform()  # heights as fractions of the panel
        axes.plot(failed, [0.98] * len(failed), "x", color=INK, ms=6, label="failed", transform=edge, clip_on=False)
    for trial in trials:
        if trial["chosen"]:
            place = trial["settings"][parameter]
            axes.plot(place, trial["value"], "D", color=INK, ms=10, mfc="none", label="chosen", clip_on=False)


def _set_value_scale(axes: Axes, values: Sequence[float]) -> None:
    """Start at 0, or use a logarithmic axis if bad trials would squeeze the others together."""
    if values and 0 < LOG_SCALE_RATIO * min(values) < max(values):
        axes.set_yscale("log")
        _label_plainly(axes.yaxis)
    else:
        axes.set_ylim(0, 1.12 * max(values, default=0) or None)  # room for failed trials


def _label_plainly(axis: Axis) -> None:
    axis.set_major_formatter(PLAIN_NUMBERS)
    axis.set_minor_formatter(NullFormatter())
