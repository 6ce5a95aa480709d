"""The result of a tuning in sentences, for the terminal and for the report."""

from collections.abc import Sequence

from flatmin_lab.runs.folder import VALIDATION
from flatmin_lab.tuning.erm_comparison import Comparison
from flatmin_lab.tuning.result import Trial, Tuning
from flatmin_lab.tuning.search_space import RECIPE_FIELDS, describe_settings

MEASURES = {"error": "validation error", "nll": "validation NLL"}


def format_measure(measure: str, value: float | None) -> str:
    """An error in per cent, an NLL with three decimals."""
    if value is None:
        return "–"
    return f"{100 * value:.2f} %" if measure == "error" else f"{value:.3f}"


def describe_choice(found: Tuning) -> str:
    """Which values were chosen, out of how many trials of the method, at which length and on which split."""
    own = [trial for trial in found.trials if not trial.is_erm]
    ended, wanted = sum(trial.state != "running" for trial in own), found.wanted - (found.erm is not None)
    of_all = f"{ended} of {wanted} trials so far" if ended < wanted else _trials(ended)
    where = f"{of_all} of {found.method}, each of {epochs(found.epochs)}, on a held-out tenth of the training set"
    best = found.chosen
    if best is None:
        return f"Nothing is chosen: no trial of {found.method} has finished. There are {where}.{_others(own)}"
    same = [trial for trial in own if trial.state == "finished" and trial.value == best.value]
    tie = f" ({_trials(len(same))} tie; this one has the lowest NLL)" if len(same) > 1 else ""
    return (
        f"Chosen: {describe_settings(found.method, best.settings)} (trial {best.number}), which has the lowest "
        f"{MEASURES[found.measure]}, {format_measure(found.measure, best.value)}{tie}, of {where}.{_others(own)}"
    )


def describe_gain(found: Tuning) -> str:
    """What the chosen values gain over ERM, or that they are no better; nothing for a tuning of ERM itself."""
    best, erm = found.chosen, found.erm
    if best is None or found.method == "erm":
        return ""
    if erm is None:
        return "This tuning has no trial of ERM to compare with; one more trial (--trials) would be ERM's."
    if erm.state != "finished" or erm.value is None or best.value is None:
        how = f"has failed ({erm.why})" if erm.state == "failed" else "has not finished"
        return f"ERM's trial {how}, so there is nothing to compare with."
    who, named = f"Trial {best.number}", f"ERM (trial {erm.number}, {format_measure(found.measure, erm.value)})"
    gain = format_gain(found.measure, erm.value - best.value)
    compared = found.against_erm
    if erm.value <= best.value:
        words = f"{who} is no better than {named}."
    elif compared is None:
        words = (
            f"{who} gains {gain} over {named}. Whether that is more than chance is not known: the scores of the "
            f"images, {VALIDATION} in the trials' folders, are missing."
        )
    elif compared.is_better:
        words = f"{who} is better than {named}: it gains {gain}, while {_by_chance(found.measure, compared)}."
        if compared.trials > 1:
            words += " Expect a smaller gain on other images, since it was chosen on these."
    else:
        words = (
            f"{who} is not significantly better than {named} on {compared.images} images: it gains {gain}, but "
            f"{_by_chance(found.measure, compared)}."
        )
    return f"{words}{_untuned(found)}"


def _by_chance(measure: str, compared: Comparison) -> str:
    who = f"the best of {compared.trials} trials" if compared.trials > 1 else "a trial"
    return f"by chance alone {who} would gain up to {format_gain(measure, compared.chance)}"


def format_gain(measure: str, value: float) -> str:
    """A difference of errors in percentage points, one of NLLs with three decimals."""
    return f"{100 * value:.2f} points" if measure == "error" else f"{value:.3f}"


def _untuned(found: Tuning) -> str:
    """Numbers of the recipe that were tuned for the method and not for ERM."""
    names = [parameter.name for parameter in RECIPE_FIELDS if parameter.name in found.space]
    what = "a tuned one" if len(names) == 1 else "tuned ones"
    return f" ERM was trained with the default {' and '.join(names)}, not {what}." if names else ""


def _others(trials: Sequence[Trial]) -> str:
    """How many were pruned or failed."""
    pruned, failed = (sum(trial.state == state for trial in trials) for state in ("pruned", "failed"))
    words = [f"{pruned} {_were(pruned)} pruned"] * bool(pruned) + [f"{failed} failed"] * bool(failed)
    return f" Of these, {' and '.join(words)}." if words else ""


def describe_end(trial: Trial, found: Tuning) -> str:
    """Whether a trial is ERM's or the chosen one, and how it ended, if not as usual."""
    if trial.state == "finished":
        return "ERM" if trial.is_erm else "chosen" if trial == found.chosen else ""
    how = {"pruned": "pruned", "failed": f"failed: {trial.why}", "running": "not finished"}[trial.state]
    return f"ERM, {how}" if trial.is_erm else how


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _trials(count: int) -> str:
    return f"{count} trial{'s' if count != 1 else ''}"


def epochs(count: int) -> str:
    return f"{count} epoch{'s' if count != 1 else ''}"
