"""Pages from templates and numbers: one HTML file that needs no network, for light and dark, paper and phones."""

import base64
import json
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import mean, stdev
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flatmin_lab.recipes.paper_numbers import Value
from flatmin_lab.report.stats import LEVEL, MIN_RUNS


def render(template: str, **values: Any) -> str:
    """Fill a template. Every value is escaped except `Markup`: names in run folders are untrusted."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("flatmin_lab.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    found.filters.update(mean_and_std=mean_and_std, as_printed=as_printed, percent=percent, whole=whole, data=data)
    return found


def mean_and_std(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation; fewer than three values are listed, as two give no useful spread.

    >>> mean_and_std([1.0, 2.0, 3.0]), mean_and_std([1.0, 2.5])
    ('2.0 ± 1.0', '1.0, 2.5')
    """
    if not values:
        return "not finite"
    if len(values) < MIN_RUNS:
        return ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def as_printed(value: Value, digits: int) -> str:
    """A value of the paper, as the paper prints it.

    >>> as_printed(Value(3.97, 0.091), 2), as_printed(Value(1.25), 2)
    ('3.97 ± 0.09', '1.25')
    """
    return f"{value.mean:.{digits}f}" + (f" ± {value.std:.{digits}f}" if value.std is not None else "")


def format_p(p: float) -> str:
    """A p-value as written after "p": with two or three digits, or as a bound; more where they would hide the verdict.

    >>> format_p(0.0004), format_p(0.0284), format_p(0.3), format_p(0.04996)
    ('<\\xa00.001', '=\\xa00.028', '=\\xa00.30', '=\\xa00.04996')
    """
    if p < 0.001:
        return "<\u00a00.001"
    texts = (f"{p:.{digits}f}" for digits in ((2,) if p >= 0.1 else (3, 4, 5, 6)))
    shown = next((text for text in texts if (float(text) < LEVEL) == (p < LEVEL)), f"{p:.3f}")
    return f"=\u00a0{shown}"


def joined(words: Sequence[str]) -> str:
    """Words as a list in a sentence.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}\u00a0%"


def short_fact(key: str, value: str) -> str:
    """A commit by its first digits, as git shows it, and whether the files had changed since; other facts as they are.

    >>> short_fact("commit", "0123456789abcdef-dirty"), short_fact("torch", "2.13.0")
    ('0123456-dirty', '2.13.0')
    """
    if key != "commit":
        return value
    return f"{value[:7]}-dirty" if value.endswith("-dirty") else value[:7]


def whole(value: float) -> str:
    """A whole number with a true minus sign.

    >>> whole(-13.6), whole(-0.2)
    ('−14', '0')
    """
    return str(round(value)).replace("-", "−")


def data(value: Mapping[str, Any] | Sequence[Any]) -> Markup:
    """JSON for a script in the page, escaped so that no text can end the script.

    >>> data({"name": "</script>"})
    Markup('{"name": "\\\\u003c/script>"}')
    """
    text = json.dumps(value, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def data_link(value: Mapping[str, Any]) -> str:
    """JSON as a data: URL, which a reader can save without a server."""
    content = base64.b64encode(json.dumps(value, allow_nan=False).encode()).decode()
    return f"data:application/json;base64,{content}"


def pool_bins(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The reliability bins of several runs, pooled into one set."""
    numbers = [sum(counts) for counts in zip(*(part["number"] for part in parts), strict=True)]

    def of(name: str) -> list[float]:
        weighted = [[n * v for n, v in zip(part["number"], part[name], strict=True)] for part in parts]
        return [
            sum(values) / number if number else 0.0
            for values, number in zip(zip(*weighted, strict=True), numbers, strict=True)
        ]

    return {"number": [float(number) for number in numbers], "accuracy": of("accuracy"), "confidence": of("confidence")}
