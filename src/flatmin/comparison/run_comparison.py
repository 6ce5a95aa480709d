"""`flatmin.compare`: the user's own training, with and without AMP, seed by seed, and the answer."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flatmin.comparison.contenders import Contender, contenders_for
from flatmin.comparison.folder_lock import only_comparison_in
from flatmin.comparison.held_out import check_can_measure, measures_before_training
from flatmin.comparison.outcome import Outcome, read_outcome, write_whole
from flatmin.comparison.train_contender import (
    Start,
    can_match,
    fingerprint,
    has_automatic_radius,
    own_radius,
    train_contender,
)
from flatmin.comparison.verdict import (
    PERCENT,
    WORTH,
    Row,
    Verdict,
    check_measure,
    check_worth,
    judge,
    show,
    show_interval,
)
from flatmin.doctor import Finding, MakeTraining, examine, has_error
from flatmin.doctor.training import preserve_generators
from flatmin.doctor.user_training import UserTraining, batch_count, call
from flatmin.optim.radius import RadiusSchedule
from flatmin.optim.wrapper import whole_number

SETTINGS = "settings.json"
EVALUATIONS = 10  # per run, for its curve


class Progress(NamedTuple):
    """A run that starts, or has finished if there is an outcome; `was_there`: in an earlier call."""

    contender: Contender
    seed: int
    outcome: Outcome | None = None
    was_there: bool = False


@dataclass(frozen=True)
class Comparison:
    """The contenders, their outcomes and the verdict. As text: the table, and the sentence below it."""

    contenders: Sequence[Contender]
    outcomes: Sequence[Outcome]
    verdict: Verdict
    findings: Sequence[Finding] = ()  # the doctor's warnings
    stopped: str = ""  # why not all seeds were run
    device: torch.device | None = None  # of the first parameter

    def __str__(self) -> str:
        return "\n".join([*self._table(), *filter(None, (self.stopped, self.verdict.sentence))])

    def _table(self) -> Iterator[str]:
        rows = self.verdict.rows
        if not rows:
            return
        unit = ", points" if self.verdict.measure in PERCENT else ""
        titles = ["", "seeds", "passes", *rows, f"{self.verdict.measure} vs. plain (95 %{unit})"]
        lines = [titles]
        for number, contender in enumerate(self.contenders):
            of = {name: found[number] for name, found in rows.items()}
            main = of[self.verdict.measure]
            lines.append(
                [
                    contender.name,
                    f"{len(main.values)}" + (f" ({main.failed} diverged)" if main.failed else ""),
                    f"{contender.passes:g}",
                    *(show(name, row.mean) for name, row in of.items()),
                    _interval(main, self.verdict.measure),
                ]
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
        for line in lines:
            yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def _interval(row: Row, measure: str) -> str:
    gap = row.from_plain
    if gap is None or not gap.seeds:
        return ""
    return show_interval(measure, gap.mean, gap.low, gap.high)


def compare(
    make_training: MakeTraining,
    *,
    epochs: int | None = None,
    seeds: int = 3,
    minutes: float | None = None,
    radii: Sequence[float] | None = None,
    start: float = 0.0,
    measure: str | None = None,
    worth: float = WORTH,
    evaluations: int = EVALUATIONS,
    out: str | Path | None = None,
    examined: bool = True,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Comparison:
    """Does AMP help here? Compares plain training, plain training for as long as AMP takes, and AMP at three radii.

    make_training  a function that returns your training, ready to start, as for doctor.examine; here a mapping that
                   also has the batches, the held-out data and the number of epochs (doctor/user_training.py)
    epochs         of a plain run; by default as in the mapping
    seeds          how many seeds to run: 0, 1, …
    minutes        run only as many of the seeds as fit into this time
    radii          AMP's radii; by default 0.03, 0.1 and 0.3, or if make_training returns a flatmin.AMP, its own, a
                   third of it, and three times it
    start          AMP perturbs only from this share of a run on: 0.75 is its last quarter, at 1.25 times the cost
    measure        what decides; by default the error on held-out data, or the first number that `evaluate` returns
    worth          the smallest gain worth having, as a share of the plain optimizer's measure
    evaluations    how often each run is evaluated, for its curve; only the last epoch decides
    out            a folder for the results of finished runs: the same call resumes from there
    examined       whether the doctor examines the training first; an error that it finds ends the comparison

    Only `out` is written to, and the caller's random generators are restored.
    """
    whole_number("seeds", seeds, least=1)
    whole_number("evaluations", evaluations, least=1)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be above 0, got {minutes!r}; leave it out to train all seeds")
    check_worth(worth)
    with ExitStack() as held:
        with preserve_generators():
            training = call(make_training, 0)
            check_can_measure(training)
            plan = _Plan(training, epochs, radii, evaluations, start)
            device = next((p.device for p in training.model.parameters()), None)
            settings = plan.settings(training)
            store = _check_store(out, settings)
            names = measures_before_training(training)
            if names is not None and measure is not None:
                check_measure(measure, names)
            findings = _examine(make_training) if examined else []
            if store is not None:
                store.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_comparison_in(store))
                _check_store(out, settings)  # again: another process may have begun one since
                write_whole(store / SETTINGS, json.dumps(settings, indent=1))
            del training  # a model may fill half of a device
        run = _Run(make_training, plan, store, progress, measure, None if minutes is None else 60 * minutes)
        run.seeds(range(seeds))
    verdict = judge(plan.contenders, run.outcomes, measure=measure, worth=worth)
    return Comparison(plan.contenders, run.outcomes, verdict, findings, run.stopped, device)


class _Plan:
    def __init__(
        self,
        training: UserTraining,
        epochs: int | None,
        radii: Sequence[float] | None,
        evaluations: int,
        start: float,
    ) -> None:
        if (epochs := training.epochs if epochs is None else epochs) is None:
            raise ValueError(
                "a comparison must know how long to train: give epochs=, or return it from make_training as 'epochs'"
                + (" (without batches an epoch is one step)" if training.batches is None else "")
            )
        self.epochs, self.evaluations = whole_number("epochs", epochs, least=1), evaluations
        self.start = RadiusSchedule(start=start).start
        own, passes = own_radius(training)
        auto = training.radius_data is not None and can_match(self.epochs, start)
        if has_automatic_radius(training) and not auto and radii is None:
            raise ValueError(_unmatched(training, self.epochs))
        self.contenders = contenders_for(radii, own=own, auto=auto, passes=1 + (passes - 1) * (1 - start))

    def settings(self, training: UserTraining) -> dict[str, Any]:
        """What must be the same for outcomes to be compared, as far as it is known before training."""
        return {
            "passes": max(contender.passes for contender in self.contenders),
            "start": self.start,
            "batches": batch_count(training.batches),
            "epochs": self.epochs,
            "contenders": [contender.key for contender in self.contenders],
            "evaluations": self.evaluations,
            "weights and optimizer": fingerprint(training),
        }


def _unmatched(training: UserTraining, epochs: int) -> str:
    what = 'make_training returned an AMP with epsilon="auto", which is adjusted to a loss on data of its own'
    if training.radius_data is None:
        return f"{what}, but no such data: return them as 'radius_data', or name the radii to compare (radii=, --radii)"
    return f"{what} between epochs, but {epochs} are too few for that: give more, or name the radii (radii=, --radii)"


def _check_store(out: str | Path | None, settings: dict[str, Any]) -> Path | None:
    """The folder for the outcomes, if they are to be kept; raises if it holds others."""
    if out is None:
        return None
    folder = Path(out)
    if folder.is_file():
        raise ValueError(f"out must be a folder, got the file {folder}; choose another name")
    path = folder / SETTINGS
    if path.exists():
        try:
            before = {"start": 0.0, **json.loads(path.read_text())}  # which an earlier version did not write
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); choose another folder, or delete this one") from error
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{folder} holds another comparison: its {name} was {before.get(name)} and is now {settings[name]}; "
                "choose another folder, or the earlier settings"
            )
        return folder
    if folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no comparison; choose another folder")
    return folder


def _examine(make_training: MakeTraining) -> list[Finding]:
    found = examine(make_training)
    if has_error(found):
        first = next(finding for finding in found if finding.verdict == "error")
        raise ValueError(
            f"the doctor found a mistake in this training, so a comparison would show nothing: {first.name}: "
            f"{first.seen}. {first.change}"
        )
    return [finding for finding in found if finding.verdict == "warning"]


class _Run:
    def __init__(
        self,
        make_training: MakeTraining,
        plan: _Plan,
        store: Path | None,
        progress: Callable[[Progress], None],
        measure: str | None,
        limit: float | None,
    ) -> None:
        self.make_training, self.plan, self.store = make_training, plan, store
        self.progress, self.measure, self.limit = progress, measure, limit
        self.outcomes: list[Outcome] = []
        self.stopped = ""
        self._start = Start()
        self._began = time.perf_counter()

    def seeds(self, seeds: range) -> None:
        for seed in seeds:
            todo = []
            for contender in self.plan.contenders:
                there = None if self.store is None else read_outcome(self.store, contender.key, seed)
                if there is None:
                    todo.append(contender)
                else:
                    self._add(contender, there, was_there=True)
            for number, contender in enumerate(todo):
                if not self._fits(todo[number:] if seed > 0 and number == 0 else [contender]):
                    self.stopped = (
                        f"Stopped at seed {seed}: the rest of it would not finish within {(self.limit or 0) / 60:g} "
                        "minutes; the same call with more time resumes it (minutes=, --minutes)."
                    )
                    return
                self.progress(Progress(contender, seed))
                plan = self.plan
                outcome = train_contender(
                    self.make_training,
                    contender,
                    seed,
                    epochs=plan.epochs,
                    evaluations=plan.evaluations,
                    perturbed_from=plan.start,
                    start=self._start,
                )
                if self.store is not None:
                    outcome.write(self.store)
                self._add(contender, outcome)

    def _add(self, contender: Contender, outcome: Outcome, *, was_there: bool = False) -> None:
        self.outcomes.append(outcome)
        if outcome.measures and self.measure is not None:  # now, not after the last run
            check_measure(self.measure, list(outcome.measures))
        self.progress(Progress(contender, outcome.seed, outcome, was_there))

    def _fits(self, contenders: Sequence[Contender]) -> bool:
        """Will these runs finish in time, at the pace so far?"""
        if self.limit is None or not self.outcomes:
            return True
        passes = {contender.key: contender.passes for contender in self.plan.contenders}
        ended = [one for one in self.outcomes if one.failed is None] or self.outcomes
        pace = sum(one.seconds for one in ended) / sum(passes[one.contender] for one in ended)
        needed = pace * sum(contender.passes for contender in contenders)
        return time.perf_counter() - self._began + needed <= self.limit
