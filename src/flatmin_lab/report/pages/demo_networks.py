"""The demo page's closer look at two networks, made from the numbers that `flatmin demo` keeps of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from flatmin_lab.report import figures
from flatmin_lab.report.figures.style import NAMES, svg


class Answer(NamedTuple):
    name: str
    label: int
    is_given: bool  # the wrong label, which it was trained with


class ShownDigit(NamedTuple):
    drawing: Markup
    given: int
    true: int
    answers: list[Answer]


class Calibration(NamedTuple):
    method: str
    name: str
    temperature: float | None  # None where none could be fitted
    plain: Mapping[str, float | None]
    scaled: Mapping[str, float | None] | None


class Networks(NamedTuple):
    """What the template shows."""

    train: int
    held_out: int
    digits: list[ShownDigit]
    repeated: dict[str, int]  # how many of the wrong labels shown each network repeats, by name
    lines: list[Markup]
    rises: dict[str, tuple[float, float]]  # training loss at the weights, and the mean of both ends of the line
    calibration: list[Calibration]
    answer: str  # to whether AMP is worse calibrated


def networks(found: Mapping[str, Mapping[str, Any]], test: int) -> Networks | None:
    """By method, measured on so many test digits; None where the numbers have none."""
    if not found:
        return None
    first = next(iter(found.values()))
    digits = [_digit(place, found) for place in range(len(first["digits"]))]
    repeated = {
        NAMES[method]: sum(digit["answer"] == digit["given"] for digit in own["digits"])
        for method, own in found.items()
    }
    calibration = [_calibration(method, own["calibration"]) for method, own in found.items()]
    return Networks(
        first["train"],
        first["held_out"],
        digits,
        repeated,
        _lines(found),
        {NAMES[method]: rise for method, own in found.items() if (rise := _rise(own)) is not None},
        calibration,
        _answer({one.method: one for one in calibration}, 1 / test),
    )


def _digit(place: int, found: Mapping[str, Mapping[str, Any]]) -> ShownDigit:
    own = next(iter(found.values()))["digits"][place]
    answers = [
        Answer(NAMES[method], network["digits"][place]["answer"], network["digits"][place]["answer"] == own["given"])
        for method, network in found.items()
    ]
    return ShownDigit(drawn_digit(own["pixels"]), own["given"], own["true"], answers)


def drawn_digit(pixels: list[list[int]]) -> Markup:
    """Ink on the page's own background, one square per pixel: it follows light and dark mode."""
    squares = "".join(
        f'<rect x="{x}" y="{y}" width="1.02" height="1.02" opacity="{value / 255:.2f}"/>'
        for y, row in enumerate(pixels)
        for x, value in enumerate(row)
        if value
    )
    size = len(pixels)
    return Markup(
        f'<svg class="digit" viewBox="0 0 {size} {size}" fill="currentColor" aria-hidden="true">{squares}</svg>'
    )


def _lines(found: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    """A figure per split, with a scale of its own: the training labels are wrong in part."""
    first = next(iter(found.values()))["landscape"]
    drawn = []
    for split in first["splits"]:
        losses = {method: own["landscape"]["splits"][split]["line"] for method, own in found.items()}
        drawn.append(
            Markup(svg(figures.lines(first["axis"], {split: losses}, methods={method: method for method in losses})))
        )
    return drawn


def _rise(own: Mapping[str, Any]) -> tuple[float, float] | None:
    line = own["landscape"]["splits"]["training"]["line"]
    middle, ends = line[len(line) // 2], (line[0], line[-1])
    return None if None in (middle, *ends) else (middle, sum(ends) / 2)


def _calibration(method: str, own: Mapping[str, Any]) -> Calibration:
    return Calibration(method, NAMES[method], own["temperature"], own["plain"], own["scaled"])


def _answer(found: Mapping[str, Calibration], one_digit: float) -> str:
    """Whether AMP is worse calibrated than ERM; empty where the numbers do not say.

    A single digit, right instead of wrong, changes an ECE by up to `one_digit`: a smaller difference says nothing.
    """
    erm, amp = (found.get(method) for method in ("erm", "amp"))
    if erm is None or amp is None or erm.scaled is None or amp.scaled is None:
        return ""
    plain, scaled = (
        (amp_.get("ece"), erm_.get("ece")) for amp_, erm_ in ((amp.plain, erm.plain), (amp.scaled, erm.scaled))
    )
    if None in (*plain, *scaled):
        return ""
    before = plain[0] - plain[1] > one_digit  # type: ignore[operator]
    higher: float = scaled[0] - scaled[1]  # type: ignore[operator]
    after = higher > one_digit
    if before and not after:
        is_lower = higher < -one_digit
        how = "its ECE is the lower one" if is_lower else "the two differ by less than one test digit can make"
        return f"Is AMP worse calibrated? Only before scaling; afterwards {how}."
    if before:
        return "Is AMP worse calibrated? Here, yes, both before and after scaling."
    return (
        "AMP is not worse calibrated here, even before scaling."
        if not after
        else "AMP's ECE is the higher one only after scaling."
    )
