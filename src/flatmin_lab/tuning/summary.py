"""The result of a tuning in sentences, for the terminal and for the report."""

from flatmin_lab.tuning.result import Trial, Tuning
from flatmin_lab.tuning.search_space import describe_settings

MEASURES = {"error": "validation error", "nll": "validation NLL"}


def format_measure(measure: str, value: float | None) -> str:
    """An error in per cent, an NLL with three decimals."""
    if value is None:
        return "–"
    return f"{100 * value:.2f} %" if measure == "error" else f"{value:.3f}"


def describe_choice(found: Tuning) -> str:
    """Which values were chosen, out of how many trials, at which length and on which split."""
    of_all = f"{found.ended} of {found.wanted} trials so far" if found.ended < found.wanted else _trials(found.ended)
    where = f"{of_all}, each of {epochs(found.epochs)}, on a held-out tenth of the training set"
    best = found.chosen
    if best is None:
        return f"Nothing is chosen: no trial has finished. There are {where}.{_others(found)}"
    same = [trial for trial in found.trials if trial.state == "finished" and trial.value == best.value]
    tie = f" ({_trials(len(same))} have it; this one has the lowest NLL of them)" if len(same) > 1 else ""
    return (
        f"Chosen: {describe_settings(found.method, best.settings)} (trial {best.number}), which has the lowest "
        f"{MEASURES[found.measure]}, {format_measure(found.measure, best.value)}{tie}, of {where}.{_others(found)}"
    )


def _others(found: Tuning) -> str:
    """How many were pruned or failed."""
    pruned, failed = found.count("pruned"), found.count("failed")
    words = [f"{pruned} {_were(pruned)} pruned"] * bool(pruned) + [f"{failed} failed"] * bool(failed)
    return f" Of them {' and '.join(words)}." if words else ""


def describe_end(trial: Trial, found: Tuning) -> str:
    """How a trial ended, if not as usual."""
    if trial.state == "finished":
        return "chosen" if trial == found.chosen else ""
    return {"pruned": "pruned", "failed": f"failed: {trial.why}", "running": "not finished"}[trial.state]


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _trials(count: int) -> str:
    return f"{count} trial{'s' if count != 1 else ''}"


def epochs(count: int) -> str:
    return f"{count} epoch{'s' if count != 1 else ''}"
