"""The page of `flatmin demo`, made only from its numbers (demo.json)."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from markupsafe import Markup

from flatmin_lab.methods import mean_passes
from flatmin_lab.report.figures import curves, reliability_diagram
from flatmin_lab.report.figures.style import NAMES, legend_sample, svg
from flatmin_lab.report.html import percent, pool_bins, render
from flatmin_lab.report.pages.demo_networks import networks

METHOD_DESCRIPTIONS = {
    "erm": "ordinary training",
    "amp": "the worst weights in a ball of radius {epsilon:g}",
    "label_smoothing": "0.2 of the target spread over all classes",
    "flooding": "the loss kept above 0.02",
    "mixup": "pairs of images and labels mixed",
    "adversarial": "pixels moved by 1/255 so that the loss rises",
    "dropout": "a tenth of the neurons dropped",
    "rmp": "random weights in a ball of radius 0.1",
}


def demo_page(demo: Mapping[str, Any]) -> str:
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in demo["runs"]:
        runs.setdefault(run["method"], []).append(run)
    bins = {method: pool_bins([run["reliability"] for run in own]) for method, own in runs.items()}
    return render(
        "demo.html.jinja",
        demo=demo,
        noisy=demo["noise"] > 0,
        rows=[row(method, own) for method, own in runs.items()],
        words=summary_sentence(demo, runs),
        facts={method: facts(own, bins[method]) for method, own in runs.items()},
        entropy=entropy(demo["noise"], classes=10),
        flooding_is_erm=all(map(_nearly_equal, _losses(runs["flooding"]), _losses(runs["erm"]))),
        networks=networks(demo.get("networks", {}), demo["test"]),
        legend=[(Markup(legend_sample(method)), NAMES[method]) for method in runs],
        curves=[Markup(svg(curves(title, lines))) for title, lines in _over_epochs(runs).items()],
        reliability=[Markup(svg(reliability_diagram(NAMES[method], bins[method], method=method))) for method in runs],
    )


class Facts(NamedTuple):
    """Means over the seeds, for the page's sentences."""

    error: float
    ece: float
    memorised: float
    train_loss: float
    confidence: float


def facts(runs: Sequence[Mapping[str, Any]], bins: Mapping[str, Sequence[float]]) -> Facts:
    confident = sum(n * c for n, c in zip(bins["number"], bins["confidence"], strict=True)) / sum(bins["number"])
    return Facts(
        error=mean(_errors(runs)),
        ece=mean(run["test_ece"] for run in runs),
        memorised=mean(run.get("memorised", 0.0) for run in runs),
        train_loss=mean(run["lines"][-1]["train_loss"] for run in runs),
        confidence=confident,
    )


def row(method: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def values(key: str, scale: float = 1.0) -> list[float]:
        return [scale * run[key] for run in runs if run.get(key) is not None]

    return {
        "method": method,
        "name": NAMES[method],
        "what": METHOD_DESCRIPTIONS[method].format(**runs[0]["settings"])
        if method == "amp"
        else METHOD_DESCRIPTIONS[method],
        "error": values("test_error", 100),
        "nll": values("test_nll"),
        "ece": values("test_ece", 100),
        "memorised": values("memorised", 100),
        "passes": [mean_passes(method, runs[0]["settings"])],  # the same for all seeds
        "cpu_seconds": values("cpu_seconds"),
    }


def entropy(noise: float, *, classes: int) -> float:
    """The training loss of a model that knows the true classes and how often labels are wrong, but not which ones.

    >>> round(entropy(0.2, classes=10), 2)
    0.94
    """
    if noise == 0:
        return 0.0
    return -(1 - noise) * math.log(1 - noise) - noise * math.log(noise / (classes - 1))


def _errors(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["test_error"] for run in runs]


def _nearly_equal(one: float, other: float) -> bool:
    """Equal up to rounding: |J − b| + b is not J to the last bit."""
    return math.isclose(one, other, rel_tol=1e-4)


def _losses(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [line["train_loss"] for run in runs for line in run["lines"]]


def summary_sentence(demo: Mapping[str, Any], runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What the numbers say, in a few sentences."""
    means = {method: mean(_errors(own)) for method, own in runs.items()}
    if demo["noise"] == 0:
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        return (
            f"With correct labels, the eight mean errors lie between {percent(means[low], 2)} ({NAMES[low]}) and "
            f"{percent(means[high], 2)} ({NAMES[high]}); one test digit is {percent(1 / demo['test'], 2)}."
        )
    sentence = (
        f"Ordinary training (ERM) gets {percent(means['erm'], 1)} of the test digits wrong, "
        f"AMP {percent(means['amp'], 1)}. "
        f"ERM has memorised {percent(mean(run['memorised'] for run in runs['erm']))} of the wrong labels, "
        f"AMP {percent(mean(run['memorised'] for run in runs['amp']))}."
    )
    near = [NAMES[method] for method in runs if method != "amp" and _within_the_spread(runs[method], runs["amp"])]
    return f"{sentence} Not clearly different from AMP over these seeds: {', '.join(near)}." if near else sentence


def _within_the_spread(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    """Do the means differ by less than the sum of the standard deviations? False with a single run each."""
    if len(one) < 2:
        return False
    return abs(mean(_errors(one)) - mean(_errors(other))) < stdev(_errors(one)) + stdev(_errors(other))


def _over_epochs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    def means(value: Callable[[Mapping[str, Any]], float]) -> dict[str, list[float]]:
        return {
            method: [mean(map(value, lines)) for lines in zip(*(run["lines"] for run in own), strict=True)]
            for method, own in runs.items()
        }

    return {
        "training loss": means(lambda line: line["train_loss"]),
        "test NLL": means(lambda line: math.nan if line["test_nll"] is None else line["test_nll"]),
        "test error, %": means(lambda line: 100 * line["test_error"]),
    }
