"""Sentences that the numbers support: AMP's effect on error, calibration, robustness and flatness, and its cost."""

import math
from statistics import mean

from flatmin_lab.report.comparison import Cell, Group, Row
from flatmin_lab.report.html import format_p, mean_and_std
from flatmin_lab.report.stats import LEVEL, MIN_RUNS

SENTENCE_MEASURES = {
    "error": ("{split} error", "{:.2f}\u00a0%"),
    "nll": ("{split} NLL", "{:.3f}"),
    "ece": ("calibration error", "{:.2f}\u00a0%"),
    "fgsm_error": ("error under FGSM", "{:.1f}\u00a0%"),
    "pgd_error": ("error under PGD", "{:.1f}\u00a0%"),
    "worst_case_loss": ("worst training loss nearby", "{:.3f}"),
    "rise": ("rise to the worst loss", "{:.3f}"),
    "eigenvalue": ("largest eigenvalue of the Hessian", "{:.3g}"),
}

TIMES = {"seconds": "time", "cpu_seconds": "CPU time"}


def summary(group: Group) -> list[str]:
    """A few sentences about a group: AMP against ERM if it has both, else the best rows."""
    erm = group.row("erm")
    amps = [row for row in group.rows if row.method == "amp"]
    if erm is None or not amps:
        return [_without_both(group)]
    amp = min(amps, key=error_of)
    erm = group.rows[amp.base]
    chosen = ""
    if len(amps) > 1:
        chosen = f" Of AMP's {len(amps)} settings, it has the lowest {group.split} error, and was chosen for that."
    sentences = _comparisons(erm, amp, group.split)
    best = _best(group)
    if all(row.method not in ("amp", "erm") for row in best):
        sentences.append(_lowest(group, best))
    sentences += [
        f"{erm.name} and {row.name} have exactly the same numbers: the setting of {row.name} never took effect."
        for row in group.rows
        if row is not erm and _same_numbers(row, erm)
    ]
    sentences += [_cost(erm, amp, name, what) for name, what in TIMES.items() if _are_timed_alike(erm, amp, name)]
    return [f"{sentences[0]}{chosen}", *sentences[1:]]


def _comparisons(erm: Row, amp: Row, split: str) -> list[str]:
    """A sentence per measure with its verdict; why several were not tested is said once."""
    names = [name for name in SENTENCE_MEASURES if _both(erm, amp, name)]
    if all(_too_few(erm, amp, name) for name in names):
        first, *rest = names
        return [_against(first, erm, amp, split), *(f"{_means(name, erm, amp, split)}." for name in rest)]
    unplanned = [name for name in names if not amp.cells[name].planned and not _too_few(erm, amp, name)]
    found = [_against(name, erm, amp, split) for name in names if name not in unplanned]
    if unplanned:
        listed = "; ".join(_means(name, erm, amp, split) for name in unplanned)
        found.append(f"Not among the planned comparisons, so not tested: {listed[0].lower()}{listed[1:]}.")
    return found


def error_of(row: Row) -> float:
    """The mean over its runs, in percent."""
    return mean(row.cells["error"].values)


def _best(group: Group) -> list[Row]:
    """The rows with the lowest mean error: several where they tie."""
    lowest = min(map(error_of, group.rows))
    return [row for row in group.rows if math.isclose(error_of(row), lowest, rel_tol=1e-9, abs_tol=1e-12)]


def _lowest(group: Group, best: list[Row]) -> str:
    names = " and ".join(row.name for row in best)
    return (
        f"{names} {'has' if len(best) == 1 else 'have'} the lowest mean {group.split} error: {error_of(best[0]):.2f} %."
    )


def _same_numbers(row: Row, erm: Row) -> bool:
    """Do both rows have the same seeds and numbers? Errors can tie by chance, so NLL and ECE must be there too."""
    seeds, own = ([run.result["seed"] for run in each.runs] for each in (erm, row))
    pairs = [(row.cells[name].values, erm.cells[name].values) for name in ("error", "nll", "ece")]
    return seeds == own and all(one and one == other for one, other in pairs)


def _both(erm: Row, amp: Row, name: str) -> bool:
    return bool(erm.cells[name].values and amp.cells[name].values)


def _are_timed_alike(erm: Row, amp: Row, name: str) -> bool:
    """Can their times be compared? Enough runs of each, on one kind of machine, none of them in several parts.

    The seconds of a run that was resumed may be of another machine, or of one that had more to do, and so may those of
    a beginning that another run trained.
    """
    runs = [*erm.runs, *amp.runs]
    hardware = {run.result.get("hardware") for run in runs}
    enough = not _too_few(erm, amp, name)
    in_parts = any(run.result.get("resumed") or run.result.get("shared") for run in runs)
    return enough and len(hardware) == 1 and None not in hardware and not in_parts


def _cost(erm: Row, amp: Row, name: str, what: str) -> str:
    slower = mean(amp.cells[name].values) / max(mean(erm.cells[name].values), 1e-9)
    return f"AMP took {slower:.2f} times as much {what} as ERM."


def _too_few(erm: Row, amp: Row, name: str) -> bool:
    return min(len(row.cells[name].values) for row in (erm, amp)) < MIN_RUNS


def _against(name: str, erm: Row, amp: Row, split: str) -> str:
    return f"{_means(name, erm, amp, split)}; {_verdict(erm.cells[name], amp.cells[name])}."


def _means(name: str, erm: Row, amp: Row, split: str) -> str:
    label, form = SENTENCE_MEASURES[name]
    ours, theirs = (form.format(mean(row.cells[name].values)) for row in (amp, erm))
    label = label.format(split=split)
    if erm.cells[name].of_last_weights or amp.cells[name].of_last_weights:
        label = f"{label}, last weights"
    return f"{label[0].upper()}{label[1:]}: {amp.name} {ours}, {erm.name} {theirs}"


def _verdict(erm: Cell, amp: Cell) -> str:
    n = f"n\u00a0=\u00a0{len(amp.values)} and\u00a0{len(erm.values)}"
    if min(len(amp.values), len(erm.values)) < MIN_RUNS:
        return f"too few runs to tell ({n})"
    if not amp.planned:
        return f"not among the planned comparisons, so not tested ({n})"
    if amp.p is None:
        return f"the seeds do not differ, so there is no test ({n})"
    if amp.p >= LEVEL:
        return f"no significant difference ({n}, p\u00a0{format_p(amp.p)})"
    return f"significantly {'lower' if amp.better else 'higher'} ({n}, p\u00a0{format_p(amp.p)})"


def _without_both(group: Group) -> str:
    if len(group.rows) == 1:
        found = f"{group.rows[0].name} alone, with {_errors(group.rows[0], group.split)} %."
    else:
        found = _lowest(group, _best(group))
    return f"{found} For a comparison, train both erm and amp."


def _errors(row: Row, split: str) -> str:
    """A mean where there are enough runs for one, else each of them."""
    values = row.cells["error"].values
    if len(values) >= MIN_RUNS:
        return f"a mean {split} error of {mean_and_std(values, 2)}"
    listed = " and ".join(f"{value:.2f}" for value in values)
    return f"{split} errors of {listed}" if len(values) > 1 else f"a {split} error of {listed}"
