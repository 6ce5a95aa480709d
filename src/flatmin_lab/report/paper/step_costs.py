"""What a step of ERM and one of AMP take, each with the setting in which they were timed.

The same step takes several times as long in plain PyTorch as in a compiled CUDA graph, and the ratio of AMP's time to
ERM's differs too. So a time is never shown without its form, network, batches, precision, machine and commit. The times
come from two kinds of files: cost-MACHINE.json has steps of whole training runs and what they add up to
(bench/amp_cost.py), bench-MACHINE.json steps in several forms (`flatmin bench`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flatmin_lab.bench.mode_cost import CAPTURED, EAGER, GRAPH, StepTimes
from flatmin_lab.report.labels import TITLES

METHODS = ("erm", "amp")
FORMS = {
    CAPTURED: "one CUDA graph, compiled",
    GRAPH: "one CUDA graph, not compiled",
    EAGER: "plain PyTorch (eager)",
}


class TimedPair(NamedTuple):
    """Both methods' times in one form; hours only of whole training runs."""

    form: str
    ms: Sequence[float]
    hours: Sequence[float] = ()

    @property
    def ratio(self) -> float:
        erm, amp = self.ms
        return amp / erm

    @property
    def ratio_of_hours(self) -> float:
        erm, amp = self.hours
        return amp / erm


class TimedSetting(NamedTuple):
    """What was timed, and on what, in words; its rows share it."""

    words: str
    pairs: list[TimedPair]


def timed_settings(costs: Sequence[Mapping[str, Any]], times: Sequence[StepTimes]) -> list[TimedSetting]:
    """Training runs first; benchmarks without both methods are left out."""
    found = [_of_training(cost) for cost in costs]
    return [*found, *(one for one in map(_of_benchmark, times) if one.pairs)]


def _of_training(cost: Mapping[str, Any]) -> TimedSetting:
    network = f"{TITLES.get(cost['model'], cost['model'])}, " if "model" in cost else ""
    batches = f"batches of {cost['batch_size']}, " if "batch_size" in cost else ""
    versions = [f"{name} {cost[name]}" for name in ("torch", "commit") if cost.get(name)]
    data = TITLES.get(cost["data"], cost["data"])
    run = f"training for {cost['epochs']} epochs of {data}, protocol “{cost['protocol']}”"
    words = f"{', '.join([cost['hardware'], *versions])}: {run}, {network}{batches}{cost['precision']}"
    ms, hours = ([cost["methods"][method][name] for method in METHODS] for name in ("ms", "hours"))
    return TimedSetting(words, [TimedPair(FORMS.get(cost.get("form", ""), "form not recorded"), ms, hours)])


def _of_benchmark(times: StepTimes) -> TimedSetting:
    network = TITLES.get(times.model, times.model)
    words = f"{times.source}: flatmin bench, {network}, batches of {times.batch_size}, {times.precision}"
    pairs = [
        TimedPair(said, [times.ms[form][method] for method in METHODS])
        for form, said in FORMS.items()
        if times.ms.get(form, {}).keys() >= set(METHODS)
    ]
    return TimedSetting(words, pairs)
