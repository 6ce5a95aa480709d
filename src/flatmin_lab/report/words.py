"""Sentences that the numbers allow: what AMP did to error, calibration, robustness and flatness, and what it cost."""

from statistics import mean

from flatmin_lab.report.compared import Cell, Group, Row
from flatmin_lab.report.page import spread
from flatmin_lab.welch import LEVEL

SHOWN = {
    "error": ("{split} error", "{:.2f} %"),
    "nll": ("{split} NLL", "{:.3f}"),
    "ece": ("calibration error", "{:.2f} %"),
    "fgsm_error": ("error under FGSM", "{:.1f} %"),
    "pgd_error": ("error under PGD", "{:.1f} %"),
    "worst_case_loss": ("worst training loss nearby", "{:.3f}"),
    "rise": ("rise of the loss to there", "{:.3f}"),
    "eigenvalue": ("largest eigenvalue of the Hessian", "{:.3g}"),
}


def summary(group: Group) -> list[str]:
    """A few sentences about a group: AMP against ERM where both are there, else the best row."""
    erm = group.row("erm")
    amps = [row for row in group.rows if row.method == "amp"]
    if erm is None or not amps:
        return [_without_both(group)]
    amp = min(amps, key=lambda row: mean(row.cells["error"].values))
    chosen = ""
    if len(amps) > 1:
        chosen = f" Of {len(amps)} settings of AMP it has the lowest {group.split} error: chosen with the labels."
    sentences = [_against(name, erm, amp, group.split) for name in SHOWN if _both(erm, amp, name)]
    best = min(group.rows, key=lambda row: mean(row.cells["error"].values))
    if best.method != "amp" and best is not erm:
        sentences.append(
            f"The lowest mean {group.split} error of all has {best.name}: {mean(best.cells['error'].values):.2f} %."
        )
    slower = mean(amp.cells["seconds"].values) / max(mean(erm.cells["seconds"].values), 1e-9)
    hardware = {str(run.result.get("hardware")) for row in (erm, amp) for run in row.runs}
    if len(hardware) == 1:
        sentences.append(f"AMP took {slower:.2f} times the time of ERM.")
    return [f"{sentences[0]}{chosen}", *sentences[1:]]


def _both(erm: Row, amp: Row, name: str) -> bool:
    return bool(erm.cells[name].values and amp.cells[name].values)


def _against(name: str, erm: Row, amp: Row, split: str) -> str:
    label, form = SHOWN[name]
    label = label.format(split=split)
    one, other = erm.cells[name], amp.cells[name]
    ours, theirs = form.format(mean(other.values)), form.format(mean(one.values))
    return f"{amp.name}'s {label} is {ours}, ERM's {theirs}: {_verdict(one, other)}."


def _verdict(erm: Cell, amp: Cell) -> str:
    n = f"n\u00a0=\u00a0{len(amp.values)} and\u00a0{len(erm.values)}"
    if amp.p is None:
        return f"too few trainings to tell ({n})"
    if amp.p >= LEVEL:
        return f"no significant difference ({n}, p\u00a0=\u00a0{probability(amp.p)})"
    return f"significantly {'lower' if amp.better else 'higher'} ({n}, p\u00a0{_less(amp.p)})"


def _less(p: float) -> str:
    return f"=\u00a0{probability(p)}" if p >= 0.001 else "<\u00a00.001"


def probability(p: float) -> str:
    return f"{p:.2f}" if p >= 0.1 else f"{p:.3f}"


def _without_both(group: Group) -> str:
    best = min(group.rows, key=lambda row: mean(row.cells["error"].values))
    return (
        f"The lowest mean {group.split} error has {best.name}: {spread(best.cells['error'].values, 2)} %. "
        "For a comparison, train both erm and amp."
    )
