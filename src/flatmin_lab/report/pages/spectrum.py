"""The report's section about the spectrum of the Hessian: a figure of all methods, smoothed alike, and a table."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatmin import flatness
from flatmin_lab.report import figures
from flatmin_lab.report.figures.style import DrawnFigure
from flatmin_lab.report.html import percent
from flatmin_lab.system.json_data import numbers


class SpectrumRow(NamedTuple):
    """A method's numbers, as the table shows them: means over its runs."""

    name: str
    runs: int
    largest: str
    smallest: str
    trace: str
    negative_curvature: str


class SpectrumSection(NamedTuple):
    """What the template shows."""

    figure: DrawnFigure
    rows: list[SpectrumRow]
    words: str


def spectrum_section(methods: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> SpectrumSection | None:
    """The section of methods, each with its name and the spectra of its runs; None if there is no spectrum.

    Spectra share the figure only if they are of as many images and parameters: those of the majority.
    """
    kinds = [_kind(one) for _, _, own in methods for one in own]
    if not kinds:
        return None
    usual = max(kinds, key=kinds.count)
    shown = [(method, name, [one for one in own if _kind(one) == usual]) for method, name, own in methods]
    shown = [(method, name, own) for method, name, own in shown if own]
    spectra = {method: _pooled(own) for method, _, own in shown}
    grid, _, width = _pooled([one for _, _, own in shown for one in own]).density()  # one grid and width for all
    pictures, parameters = usual
    drawn = figures.spectrum(
        grid.tolist(),
        {method: numbers(one.density(grid, width=width).values) for method, one in spectra.items()},
        one_eigenvalue=1 / (parameters * width * math.sqrt(2 * math.pi)),
    )
    return SpectrumSection(
        drawn,
        [_row(name, own) for _, name, own in shown],
        f"The {parameters:,} eigenvalues of the Hessian of the training loss, on {pictures:,} examples without "
        "augmentation, BatchNorm fixed. Estimated by stochastic Lanczos quadrature and smoothed with a Gaussian of "
        f"standard deviation {width:.2g}; a single eigenvalue is a peak near the bottom. Negative curvature: the "
        "negative eigenvalues' share of the sum of all squares. Means over the seeds; beside the trace is the standard "
        "error of its estimate from random probes.",
    )


def _kind(found: Mapping[str, Any]) -> tuple[int, int]:
    return found["pictures"], found["parameters"]


def _pooled(spectra: Sequence[Mapping[str, Any]]) -> flatness.Spectrum:
    """The probes of several runs as those of one."""

    def tensors(name: str) -> list[Tensor]:
        return [torch.tensor(probe, dtype=torch.float64) for one in spectra for probe in one[name]]

    return flatness.Spectrum(tensors("values"), tensors("weights"), spectra[0]["parameters"], 0)


def _row(name: str, spectra: Sequence[Mapping[str, Any]]) -> SpectrumRow:
    largest, smallest, trace, negative = (
        mean(one[key] for one in spectra) for key in ("largest", "smallest", "trace", "negative_curvature")
    )
    errors = [one["trace_error"] for one in spectra if one.get("trace_error") is not None]
    error = f" ± {math.hypot(*errors) / len(errors):.2g}" if len(errors) == len(spectra) else ""
    return SpectrumRow(
        name, len(spectra), f"{largest:.4g}", f"{smallest:.3g}", f"{trace:.4g}{error}", percent(negative, digits=2)
    )
