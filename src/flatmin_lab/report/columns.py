"""The columns of the report's tables: each a measure, and how it is read from a run."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from flatmin_lab.data.sources.synthetic import CLASSES, original_name
from flatmin_lab.methods import mean_passes
from flatmin_lab.report.loader import Run
from flatmin_lab.report.schema import is_number


@dataclass(frozen=True)
class Column:
    """A measure: its label, its digits, and how it is read from a run. In every column lower is better."""

    name: str
    label: str
    digits: int
    value: Callable[[Run], float | None]
    command: str = ""  # the flag of `flatmin evaluate` that measures it
    compared: bool = True
    paper: str = ""  # its name among the paper's numbers, if the paper has it
    optional: bool = False  # shown only if some run has it
    last_weights: bool = False  # measured of these alone, also where a row has the numbers of averaged ones

    @property
    def part(self) -> str:
        """The part of evaluation.json that has it."""
        return self.command.removeprefix("--")

    @property
    def is_of_last_weights(self) -> bool:
        """Whether averaged weights have no such number: evaluations and what is measured once after training."""
        return self.last_weights or bool(self.command)


def _result(name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.result.get(f"{run.split}_{name}")
        return None if value is None else scale * float(value)

    return read


def _evaluated(part: str, name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.evaluation.get(part, {}).get(name)
        return None if value is None else scale * float(value)

    return read


def _result_as_named(name: str, scale: float = 1.0) -> Callable[[Run], float | None]:
    """What a result has under exactly that name, whatever the split."""

    def read(run: Run) -> float | None:
        value = run.result.get(name)
        return None if value is None else scale * float(value)

    return read


def _rise(worst: str) -> Callable[[Run], float | None]:
    """From the loss at the weights to this one."""

    def read(run: Run) -> float | None:
        flat = run.evaluation.get("flatness", {})
        highest, loss = flat.get(worst), flat.get("loss")
        return None if highest is None or loss is None else float(highest) - float(loss)

    return read


def _worst_at_half(run: Run) -> float | None:
    """At the paper's radius."""
    value = run.evaluation.get("flatness", {}).get("worst_by_radius", {}).get("0.5")
    return None if value is None else float(value)


def _eigenvalue(run: Run) -> float | None:
    values = run.evaluation.get("flatness", {}).get("eigenvalues")
    return float(values[0]) if values and values[0] is not None else None


def _temperature(run: Run) -> float | None:
    """The mean of both halves', where they are determined."""
    found = run.evaluation.get("scaled", {})
    return None if found.get("nll") is None else mean(found["temperatures"])


def _batch_rise(split: str) -> Callable[[Run], float | None]:
    """Where every filter has moved by a twentieth of its length, along the gradients of mini-batches."""

    def read(run: Run) -> float | None:
        value = run.evaluation.get("batch_rise", {}).get(split, {}).get("filter", {}).get("0.05")
        return None if value is None else float(value)

    return read


def _fpr95(*names: str) -> Callable[[Run], float | None]:
    """Against the one of these data sets that it was compared with, by the largest probability."""

    def read(run: Run) -> float | None:
        known = run.evaluation.get("outside", {}).items()
        value = next((one["max_probability"].get("fpr95") for name, one in known if original_name(name) in names), None)
        return None if value is None else 100 * float(value)

    return read


def _landscape_rise(run: Run) -> float | None:
    """From the weights to where every filter has moved by its own length; the mean of both ways along the line."""
    line = (run.landscape or {}).get("splits", {}).get("training", {}).get("line")
    if not line or None in (line[0], line[-1], line[len(line) // 2]):
        return None
    return float(line[0] + line[-1]) / 2 - float(line[len(line) // 2])


def _seconds(run: Run) -> float | None:
    """The time of a run that had its device to itself: with several at once, it says nothing about the method.

    Where another run trained its beginning, how many there were at once then is not known.
    """
    was_alone = run.result.get("at_once", 1) == 1 and not run.result.get("shared")
    return float(run.result["seconds"]) if was_alone else None


def _shared_cores(run: Run) -> bool:
    """Was it trained on a CPU beside others? Then its CPU time counts, not how long it took."""
    return run.result.get("at_once", 1) != 1 and run.result.get("cpu_seconds") is not None


def _cpu_seconds(run: Run) -> float | None:
    return float(run.result["cpu_seconds"]) if _shared_cores(run) else None


def _training_time(run: Run) -> float | None:
    """What a run on a CPU computed, whoever else used the cores; elsewhere the time of a run that was alone."""
    cpu_seconds = run.result.get("cpu_seconds")
    return _seconds(run) if cpu_seconds is None else float(cpu_seconds)


def _passes(run: Run) -> float | None:
    """Passes of a mean step, where they stand for the time."""
    if not _shared_cores(run):
        return None
    try:
        return mean_passes(run.method, run.result["settings"])
    except (TypeError, ValueError):  # a file's settings may be anything
        return None


COLUMNS = (
    Column("error", "error, %", 2, _result("error", 100), paper="error"),
    Column(
        "error_without_repeated",
        "without repeated images,\u00a0%",
        2,
        _result("error_without_repeated", 100),
        optional=True,
        last_weights=True,
    ),
    Column("nll", "NLL", 3, _result("nll"), paper="nll"),
    Column("ece", "ECE, %", 2, _result("ece", 100), paper="ece"),
    Column(
        "memorised",
        "wrong labels memorised,\u00a0%",
        1,
        _result_as_named("memorised", 100),
        compared=False,
        optional=True,
    ),
    Column("nll_scaled", "NLL, scaled", 3, _evaluated("scaled", "nll"), optional=True, last_weights=True),
    Column("ece_scaled", "ECE, scaled,\u00a0%", 2, _evaluated("scaled", "ece", 100), optional=True, last_weights=True),
    Column("aurc", "AURC,\u00a0%", 3, _evaluated("selective", "aurc", 100), optional=True, last_weights=True),
    # the paper's radius, 4, read as 4/255 of the normalised inputs: that reproduces its numbers
    Column(
        "fgsm_normalised",
        "FGSM, small radius,\u00a0%",
        1,
        _evaluated("attack_normalised", "fgsm_error", 100),
        "--attack",
        paper="fgsm_error",
        optional=True,
    ),
    Column(
        "pgd_normalised",
        "PGD, small radius,\u00a0%",
        1,
        _evaluated("attack_normalised", "pgd_error", 100),
        "--attack",
        paper="pgd_error",
        optional=True,
    ),
    Column("fgsm_error", "error under FGSM,\u00a0%", 1, _evaluated("attack", "fgsm_error", 100), "--attack"),
    Column("pgd_error", "error under PGD,\u00a0%", 1, _evaluated("attack", "pgd_error", 100), "--attack"),
    Column("worst_case_loss", "worst loss nearby", 3, _evaluated("flatness", "worst_case_loss"), "--flatness"),
    Column("rise", "its rise", 3, _rise("worst_case_loss"), "--flatness"),
    Column("adaptive_rise", "rise, adaptive", 3, _rise("adaptive_worst_case_loss"), "--flatness", optional=True),
    Column("eigenvalue", "top eigenvalue", 1, _eigenvalue, "--flatness"),
    Column("trace", "trace of the Hessian", 0, _evaluated("flatness", "trace"), "--flatness"),
    Column("seconds", "seconds", 1, _seconds, compared=False, optional=True),
    Column("cpu_seconds", "CPU\u00a0seconds", 1, _cpu_seconds, compared=False, optional=True),
    Column("passes", "passes a\u00a0step", 2, _passes, compared=False, optional=True),
)
# further columns of the paper's tables
PAPER_COLUMNS = (
    Column("clean_train_nll", "risk on the training set", 3, _result_as_named("clean_train_nll")),
    Column("train_loss", "training loss", 3, _result_as_named("train_loss")),
    Column("temperature", "temperature", 2, _temperature, compared=False),
    Column("worst_at_half", "worst loss, radius 0.5", 1, _worst_at_half),
    Column("batch_rise", "rise on training batches", 3, _batch_rise("training")),
    Column("batch_rise_test", "on test batches", 3, _batch_rise("test")),
    Column("fpr95_svhn", "FPR95 against SVHN,\u00a0%", 1, _fpr95("svhn")),
    Column("fpr95_cifar", "against the other CIFAR,\u00a0%", 1, _fpr95("cifar10", "cifar100")),
    Column("spectrum_largest", "largest eigenvalue", 1, _evaluated("spectrum", "largest")),
    Column("spectrum_trace", "trace", 0, _evaluated("spectrum", "trace")),
    Column("negative_curvature", "negative curvature,\u00a0%", 2, _evaluated("spectrum", "negative_curvature", 100)),
    Column("training_time", "time,\u00a0s", 1, _training_time, compared=False),
    Column("landscape_rise", "rise of the training loss", 3, _landscape_rise),
)


def column_named(name: str) -> Column:
    return next(column for column in (*COLUMNS, *PAPER_COLUMNS) if column.name == name)


BEST_EPOCH_MEASURES = ("error", "nll", "ece")  # that curves have, and the paper reports at that epoch


def at_best_epoch(run: Run, column: Column) -> float | None:
    """The value at the epoch with the lowest test error, among equals the one with the lowest NLL.

    This is how the published code reads its numbers. The epoch is chosen using the test labels: only for a comparison
    with the paper's. None if a run has no curves, or no curve of this measure.
    """
    known = [
        line for line in run.lines if all(line.get(f"{run.split}_{name}") is not None for name in ("error", "nll"))
    ]
    if column.name not in BEST_EPOCH_MEASURES or is_smoothed(column, run.method) or not known:
        return None
    best = min(known, key=lambda line: (line[f"{run.split}_error"], line[f"{run.split}_nll"]))
    value = best.get(f"{run.split}_{column.name}")
    return None if value is None else float(value) * (1.0 if column.name == "nll" else 100.0)


def as_in_paper(run: Run, column: Column) -> float | None:
    """The value to compare with the paper's: for the NLL of label smoothing, the smoothed loss.

    The paper has 0.998, 1.038 and 2.099 there: far above an NLL at such errors, but in line with the smoothed loss.
    """
    return _smoothed_over_others(run) if is_smoothed(column, run.method) else column.value(run)


def is_smoothed(column: Column, method: str) -> bool:
    """Whether the paper's number is a smoothed loss, not this column's measure."""
    return column.name == "nll" and method == "label_smoothing"


def _smoothed_over_others(run: Run) -> float | None:
    """The smoothed loss with s spread over the other classes, as in the published code, from one with s over all K.

    With N = −log p of the label, R the sum over the others and S = (1 − s) N + (s/K) (N + R), it is
    (1 − s) N + s/(K − 1) R. All terms are linear, so means over the images suffice.
    """
    smoothed, nll = _result("smoothed_loss")(run), _result("nll")(run)
    share, classes = run.result["settings"].get("smoothing"), CLASSES.get(original_name(str(run.result["data"])))
    if smoothed is None or run.result["settings"].get("over") == "others":
        return smoothed
    if nll is None or not is_number(share) or classes is None:
        return None
    label = (1 - float(share)) * nll
    return label + (classes * (smoothed - label) - float(share) * nll) / (classes - 1)
