"""Progress and results in the terminal: a bar and a line per epoch during training, then tables of what was measured.

Progress goes to standard error, results to standard output, so that results can be piped. If standard error is not a
terminal there are only the lines, no bar.
"""

import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flatmin_lab.cli.progress_columns import COMPILING, WARMUP_STEPS, columns, time_left
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs.events import Epoch, Event, Finished, Note, Started, Stopped
from flatmin_lab.runs.events import Progress as Done
from flatmin_lab.runs.result import AVERAGE, split_of

LABELS = {"loss": "loss", "error": "error", "sharpness": "sharpness", "delta_norm": "‖Δ‖"}
MEASURES = {"error": "error", "nll": "NLL", "ece": "ECE, 15 bins"}
PROTOCOLS = {
    "paper": "; the paper's protocol",
    "paper-v2": "; the paper's protocol, as in the second version of its code",
    "short": "; the paper's protocol, as in the second version of its code, shortened",
}
MORE_MEASURES = {"adaptive_ece": "ECE, bins of equal size", "brier": "Brier score"}
FLATNESS_LABELS = {
    "loss": "training loss",
    "gradient_norm": "norm of its gradient",
    "sharpness": "its rise along the gradient, at radius {epsilon:g}",
    "mean_loss": "mean loss in the ball of radius {epsilon:g}",
    "worst_case_loss": "worst loss found there",
    "adaptive_mean_loss": "mean loss in the adaptive ball ‖Δ ⊘ |θ|‖ ≤ {adaptive_epsilon:g}",
    "adaptive_worst_case_loss": "worst loss found in the adaptive ball",
}
SCORES = {
    "max_probability": "largest probability",
    "negative_energy": "energy",
    "negative_entropy": "entropy",
}
SHOWN_COVERAGES = (0.5, 0.8, 0.9)
IN_PERCENT = ("error", "ece", "memorised")
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode's control characters, direction marks, surrogates and line ends
UNDETERMINED = 100.0  # an interval whose ends have this ratio or more does not determine a temperature
KINDS = {"pictures": "images", "points": "points"}  # what evaluation.json calls the data


class ClosableStream:
    """A stream that goes silent when its reader is gone (a closed pipe, a closed terminal), so that work continues."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._try(lambda: self.stream.write(text)) or 0

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Callable[[], Any]) -> Any:
        if self.lost:
            return None
        try:
            return act()
        except OSError:
            self.lost = True
            return None


def terminal() -> Console:
    return Console(file=cast(TextIO, ClosableStream(sys.stderr)), highlight=False, soft_wrap=True)


def silent() -> Console:
    """A console that prints nothing, for all ranks but the first."""
    return Console(quiet=True)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: brackets in file and package names are not markup."""
    console.print(Text(escape_controls(text), style=style))


def escape_controls(text: str) -> str:
    r"""Text that may come from a file, with what would move the cursor or colour the terminal spelled out.

    >>> escape_controls("a\x1b[2Jname")
    'a\\x1b[2Jname'
    """
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in HIDDEN else char.encode("unicode_escape").decode()
        for char in text
    )


def number(name: str, value: float | None) -> str:
    """Errors and other fractions in per cent, everything else with three decimals."""
    if value is None:
        return "not finite"
    return f"{value:.2%}".replace("%", " %") if name.endswith(IN_PERCENT) else f"{value:.3f}"


def epochs_text(count: int) -> str:
    return f"{count} epoch{'s' if count != 1 else ''}"


def headline(recipe: Recipe, seed: int | str, hardware: str) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in recipe.settings.items())
    seeds = f"seed {seed}" if isinstance(seed, int) else f"seeds {seed}"
    protocol = "" if recipe.protocol.exceptions else PROTOCOLS.get(recipe.protocol.name, "")
    return (
        f"{recipe.method}{f' ({settings})' if settings else ''}: {recipe.model} on {recipe.data}, "
        f"{epochs_text(recipe.epochs)}, batches of {recipe.batch_size}, "
        f"{recipe.optimizer} with lr {recipe.lr:g} and weight decay {recipe.weight_decay:g}, {seeds}, "
        f"{recipe.precision} on {hardware}{protocol}"
    )


def threads_text(event: Started) -> str:
    """How many threads a run on the CPU computes with."""
    return "" if event.threads is None else f"; {event.threads} thread{'s' if event.threads > 1 else ''}"


@contextmanager
def bars(console: Console, *, speed_seconds: float = 120.0) -> Iterator[Progress]:
    """Progress bars with a description, the time left, and a few numbers; the speed is that of the last seconds."""
    how: dict[str, Any] = {"disable": not console.is_terminal, "speed_estimate_period": speed_seconds}
    with Progress(*columns(console.width), console=console, **how) as progress:
        yield progress


def follow(events: Iterable[Event], console: Console, headline: str, *, first_steps: str = "") -> Finished | Stopped:
    """Show a run until it ends, and return how it ended; the headline appears once it has started.

    `first_steps` says what happens before there are numbers. Where there is no bar, lines say how long is left.
    """
    with bars(console) as progress:
        task = progress.add_task("starting", total=None, numbers="preparing data and model")
        epochs = warm = 0
        for event in events:
            match event:
                case Started():
                    epochs, warm = event.epochs, event.step + WARMUP_STEPS
                    steps = event.steps // epochs
                    say(console, f"{headline}{threads_text(event)}")
                    epoch = f"epoch {min(event.step // steps + 1, epochs)}/{epochs}"
                    progress.reset(
                        task, total=event.steps, completed=event.step, description=epoch, numbers=first_steps
                    )  # earlier steps do not count for the speed
                    compiling = f"; {COMPILING}" if first_steps == COMPILING else ""
                    say(console, f"{event.parameters:,} parameters, {steps:,} steps per epoch{compiling}")
                    if event.step:
                        say(console, f"resumed after step {event.step} of {event.steps}")
                case Done() if event.step > warm:
                    shown = "  ".join(
                        f"{label} {number(name, event.numbers[name])}"
                        for name, label in LABELS.items()
                        if name in event.numbers
                    )
                    progress.update(
                        task,
                        completed=event.step,
                        description=f"epoch {event.epoch}/{epochs}",
                        numbers=shown,
                    )
                case Epoch():
                    progress.update(task, completed=event.step, description=f"epoch {event.epoch}/{epochs}")
                    left = "" if console.is_terminal else time_left(progress.tasks[0].time_remaining)
                    say(console, epoch_line(event.numbers, epochs) + (f", about {left}" if left else ""))
                case Note():
                    say(console, f"note: {event.text}", style="yellow")
                case Finished() | Stopped():
                    return event
    raise AssertionError("a run ends with Finished or Stopped")


def epoch_line(numbers: Mapping[str, Any], epochs: int) -> str:
    width = len(str(epochs))
    parts = [f"epoch {numbers['epoch']:{width}}/{epochs}"]
    for name, label in LABELS.items():
        key = f"train_{name}" if f"train_{name}" in numbers else name
        if key in numbers:
            parts.append(f"{label} {number(name, numbers[key])}")
    which = split_of(numbers)
    parts.append(f"{which} error {number('error', numbers[f'{which}_error'])}")
    parts.append(f"NLL {number('nll', numbers[f'{which}_nll'])}")
    return "  ".join([*parts, f"{numbers['seconds']:.0f} s"])


@contextmanager
def busy(console: Console) -> Iterator[Callable[[str], None]]:
    """Show what is under way: call what this yields with a text."""
    with Progress(
        TextColumn("{task.description}"), TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("")
        yield lambda text: progress.update(task, description=text)


def measurements(found: Mapping[str, Any]) -> None:
    """Tables of what `flatmin evaluate` measured."""
    console = Console(highlight=False, soft_wrap=True)
    kind = KINDS[found["kind"]]
    table = _table("", f"{found['split']}, {found['pictures']} {kind}", "95 % interval")
    for name, label in {**MEASURES, **MORE_MEASURES}.items():
        ends = found["intervals"].get(name)
        table.add_row(label, number(name, found[name]), interval_text(name, *ends) if ends else "")
    area = found["selective"]
    table.add_row("AURC", share(area["aurc"]), interval_text("error", *area["aurc_interval"]))
    console.print(table)
    if found["error"] == 0:
        count = found["pictures"]
        likely = 1 - 0.05 ** (1 / count)  # (1 − likely)ⁿ = 0.05
        say(console, f"no error among {count} {kind}: at a true error of {share(likely)}, 1 in 20 such sets has none")
    if found["scaled"]:
        keys = ("temperatures", "temperature_intervals", "temperature_pictures")
        fitted = zip(*(found["scaled"][key] for key in keys), strict=True)
        shown = " and ".join(temperature_text(t, low, high, f"{count} {kind}") for t, (low, high), count in fitted)
        scores = {MEASURES[name].partition(",")[0]: number(name, found["scaled"][name]) for name in ("nll", "ece")}
        after = ", ".join(f"{label} {text}" for label, text in scores.items())
        if found["scaled"]["nll"] is None:
            after = "not measured, as a half without an error has no temperature"
        say(console, f"after temperature scaling: {after}; each half has the other half's temperature, {shown}")
    say(console, _risks_text(found["selective"]))
    if "outside" in found:
        _show_outside(console, found["outside"], kind, found["split"])
    if "attack" in found:
        _show_attack(console, found["attack"], kind)
    if "flatness" in found:
        _show_flatness(console, found["flatness"], kind)
    if "spectrum" in found:
        _show_spectrum(console, found["spectrum"], kind)
    if "epoch" in found:
        further = f" and {found['batches']} steps" if found["batches"] else ""
        say(console, f"after epoch {found['epoch']} of {found['epochs']}{further}: {found['checkpoint']}")
    else:
        weights = (
            f"with the weights of {found['weights']}"
            if found["weights"]
            else "as built by its function, without a file of weights"
        )
        say(console, f"{found['model']} on {found['data']}, {weights}")


def interval_text(name: str, low: float | None, high: float | None) -> str:
    """Both ends of a bootstrap interval; none where every resample gives the same number, which is no certainty.

    >>> interval_text("nll", 0.25, 0.75), interval_text("error", 0.0, 0.0)
    ('0.250 to 0.750', 'none: no spread')
    """
    return "none: no spread" if low == high else f"{number(name, low)} to {number(name, high)}"


def temperature_text(value: float, low: float, high: float, source: str) -> str:
    """A temperature with the digits that its interval supports.

    >>> temperature_text(1.5234, 0.912, 2.41, "48 images"), temperature_text(1.5234, 1.502, 1.545, "5000 images")
    ('1.5 (0.9 to 2.4, from 48 images)', '1.52 (1.50 to 1.54, from 5000 images)')
    >>> temperature_text(0.001, 0.001, 1000.0, "8 images")
    'not determined by 8 images'
    """
    if high / low >= UNDETERMINED:
        return f"not determined by {source}"
    decimals = min(max(-math.floor(math.log10((high - low) / 2)), 0), 3)
    return f"{value:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f}, from {source})"


def share(value: float | None) -> str:
    """A fraction in per cent."""
    return number("error", value)


def _risks_text(found: Mapping[str, Any]) -> str:
    """The error among the most confident, at a few coverages: the nearest that the curve has."""
    points = list(zip(found["coverage"], found["risk"], strict=True))
    nearest = dict(min(points, key=lambda point: abs(point[0] - wanted)) for wanted in SHOWN_COVERAGES)
    parts = (f"{100 * coverage:.0f} %: {share(risk)}" for coverage, risk in nearest.items())
    return f"error among the most confident {', '.join(parts)}; AURC is its mean over all shares"


def _show_outside(console: Console, found: Mapping[str, Mapping[str, Any]], kind: str, split: str) -> None:
    for name, detected in found.items():
        table = _table(escape(escape_controls(name)), "AUROC", "95 % interval", "FPR95", "95 % interval")
        for score, label in SCORES.items():
            row = [label]
            for part in ("auroc", "fpr95"):
                interval = interval_text("error", *detected[score][f"{part}_interval"])
                row += [share(detected[score][part]), interval.replace(" % to", " to")]
            table.add_row(*row)
        console.print(table)
        say(console, f"the {split} set against {detected['pictures']} {kind} of {name}")
    say(console, f"AUROC: 50 % is chance. FPR95: the share of the others accepted where 95 % of the {split} set is.")


def _show_attack(console: Console, found: Mapping[str, Any], kind: str) -> None:
    table = _table("", f"attacked, {found['pictures']} {kind}")
    for name, label in {
        "clean": "error without attack",
        "fgsm": "error, FGSM",
        "pgd": f"error, PGD, {found['steps']} steps",
    }.items():
        table.add_row(label, number("error", found[f"{name}_error"]))
    console.print(table)
    units = " of the pixel range" if kind == "images" else ""
    lengths = (f"{255 * found[name]:.4g}/255" if units else f"{found[name]:.4g}" for name in ("radius", "step_size"))
    say(console, "{}, radius {}, step {}{}".format(found["norm"], *lengths, units))


def _show_flatness(console: Console, found: Mapping[str, Any], kind: str) -> None:
    table = _table("", f"flatness, {found['pictures']} training {kind}")
    for name, label in FLATNESS_LABELS.items():
        table.add_row(label.format(**found), _figure(found[name]))
    table.add_row("largest eigenvalues of the Hessian", ", ".join(map(_figure, found["eigenvalues"])))
    table.add_row("trace of the Hessian", f"{_figure(found['trace'])} ± {_figure(found['trace_error'])}")
    console.print(table)
    starts = ", ".join(map(_figure, found["worst_case_starts"]))
    say(console, f"worst loss by ascent from the centre, then from random points of the ball: {starts}")


def _show_spectrum(console: Console, found: Mapping[str, Any], kind: str) -> None:
    table = _table("", f"spectrum, {found['pictures']} training {kind}")
    table.add_row(
        "smallest and largest eigenvalue of the Hessian", f"{_figure(found['smallest'])}, {_figure(found['largest'])}"
    )
    table.add_row("its trace", f"{_figure(found['trace'])} ± {_figure(found['trace_error'])}")
    table.add_row("negative curvature, as a share of Σ λ²", f"{100 * found['negative_curvature']:.2f} %")
    console.print(table)
    probes, products = len(found["values"]), found["products"]
    say(console, f"{probes} random vectors, {products} products with the Hessian, {found['parameters']:,} parameters")


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def shown_measures(result: Mapping[str, Any], weights: str = "") -> dict[str, str]:
    """The keys of a result that are shown when a run has ended, with their labels; of the last weights, or AVERAGE."""
    which = split_of(result)
    names = {f"{which}_{name}": label for name, label in MEASURES.items()} | {"memorised": "wrong labels memorised"}
    return {f"{weights}{name}": label for name, label in names.items() if f"{weights}{name}" in result}


def outcome(result: Mapping[str, Any], folder: Path) -> None:
    """The last epoch's numbers; then, for comparison, the best test epoch's, which the published code reports."""
    console = Console(highlight=False, soft_wrap=True)
    which = split_of(result)
    table = _table("", f"{which}, last epoch")
    for key, label in shown_measures(result).items():
        table.add_row(label, number(key, result[key]))
        if f"{AVERAGE}{key}" in result:
            table.add_row(f"{label}, averaged weights", number(key, result[f"{AVERAGE}{key}"]))
    console.print(table)
    if "best_test_epoch" in result and result["epochs"] > 1:
        say(
            console,
            f"for comparison only: the best test epoch ({result['best_test_epoch']}) had "
            f"{number('error', result['best_test_epoch_error'])}, but was chosen using the test labels",
        )
    took = f"{epochs_text(result['epochs'])} in {result['seconds']:.0f} s on {result['hardware']}"
    say(console, f"{took}; everything is in {folder}")
