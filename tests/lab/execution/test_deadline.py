"""Within a time limit only what will end is started, and what will not is left for later, or given up early."""

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab import methods
from flatmin_lab.execution import deadline as deadlines
from flatmin_lab.execution.cluster.file_sync import content
from flatmin_lab.execution.cluster.worker import FileChanges, Worker
from flatmin_lab.execution.deadline import Deadline, TimedRuns
from flatmin_lab.execution.local import ThisProcess
from flatmin_lab.execution.pace import (
    RESERVE,
    Costs,
    Pace,
    Stretch,
    ends_in_time,
    kind_of,
    passes_of,
    seconds_to_end,
    started_in_time,
    work_of,
)
from flatmin_lab.execution.run_queue import RunQueue, run_all
from flatmin_lab.execution.runner import Run, RunOptions, RunTask, run_task_on_data
from flatmin_lab.execution.task_queue import Slot
from flatmin_lab.recipes.recipe import Job, Recipe
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import Epoch, Event, Finished, Postponed, Progress, Started, Stopped, Timed
from flatmin_lab.runs.result_store import ResultStore
from flatmin_lab.training import train_state
from tests.support.small_runs import run, same, tiny_data, tiny_recipe, whole_state

BATCHES = 5  # in an epoch of the tiny data
ERM = tiny_recipe(name="erm", epochs=8)
AMP = tiny_recipe(name="amp", epochs=8, method="amp", settings={"epsilon": 0.1})
LATE = tiny_recipe(name="late", epochs=8, method="amp", settings={"epsilon": 0.1, "start": 0.75})
A_SECOND_EACH = Costs(lambda together: 1.0)


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results", tmp_path / "runs")


def limit(left: float, monkeypatch: pytest.MonkeyPatch, *, per_pass: float | None = 1.0) -> Deadline:
    """A deadline that stays so many seconds away; a pass takes a second, whatever is measured."""
    monkeypatch.setattr(Deadline, "seconds_left", lambda self: left)
    given = Deadline(left / 60, 0.0)
    for together in (1, 2) if per_pass is not None else ():
        given.pace.add(Timed(kind_of(ERM), together, 1e12, 1e12 * (per_pass or 0)))
    return given


def train_all(recipes: Sequence[Recipe], store: ResultStore, deadline: Deadline, **options: Any) -> dict[str, Event]:
    """How each of the runs ended, which may train at once."""
    runs = dict(enumerate(Run(Job(recipe, 0)) for recipe in recipes))
    task = RunTask(runs, "cpu", RunOptions(store, deadline=deadline, **options))
    events = run_task_on_data(task, tiny_data(), lambda: None)
    return {recipes[number].name: event for number, event in events if isinstance(event, Finished | Stopped)}


def trained(ends: dict[str, Event]) -> list[str]:
    return [name for name, event in ends.items() if isinstance(event, Finished)]


# ---- the decision


@pytest.mark.parametrize("step", [0, 30, 60, 75, 99, 100])
@pytest.mark.parametrize(
    "settings", [{}, {"start": 0.6}, {"every": 3}, {"start": 0.6, "every": 4, "inner_iter": 2}, {"epsilon": "auto"}]
)
def test_the_work_that_is_left_is_that_of_the_steps_that_are_left(settings: dict[str, Any], step: int) -> None:
    recipe = replace(AMP, settings=settings)
    schedule = methods.build("amp", **settings).schedule
    ascent = settings.get("inner_iter", 1)
    expected = sum(1 + ascent * (schedule.share(each, 100) > 0) for each in range(step, 100))
    within = ascent if "every" in settings else 0  # a part of a period counts as the mean of the whole
    assert abs(passes_of(work_of(recipe, step, 100)) - expected) <= within


def test_runs_in_turns_end_when_a_round_by_round_count_says() -> None:
    choose = random.Random(0)
    for _ in range(50):
        runs = [
            [Stretch(choose.randint(1, 9), choose.choice([1.0, 2.0, 1.5])) for _ in range(choose.randint(0, 3))]
            for _ in range(choose.randint(1, 4))
        ]
        costs = Costs(lambda together: 0.5 + 1 / together, end=choose.choice([0.0, 3.0]))
        left = [[passes for steps, passes in work for _ in range(steps)] for work in runs]
        now, ends = 0.0, [0.0] * len(runs)
        active = set(range(len(runs)))
        while active:
            for number in sorted(active):
                if not left[number]:
                    active.discard(number)
                    now += costs.end
                    ends[number] = now
            now += sum(left[number].pop(0) for number in active) * costs.per_pass(len(active) or 1)
        assert seconds_to_end(runs, costs) == pytest.approx(ends)


def test_a_run_is_started_if_it_and_all_beside_it_will_end() -> None:
    new = [Stretch(100, 1.0)]
    assert ends_in_time(new, [], A_SECOND_EACH, 100 * RESERVE)
    assert not ends_in_time(new, [], A_SECOND_EACH, 100 * RESERVE - 1)
    assert not ends_in_time(new, [], A_SECOND_EACH._replace(start=10.0), 100 * RESERVE)
    assert not ends_in_time(new, [], A_SECOND_EACH._replace(end=10.0), 100 * RESERVE)
    beside = [Stretch(300, 2.0)]  # it ends after 600 seconds alone, and after 700 beside the new one
    assert ends_in_time(new, [beside], A_SECOND_EACH, 700 * RESERVE)
    assert not ends_in_time(new, [beside], A_SECOND_EACH, 650 * RESERVE)


def test_what_was_not_measured_with_so_many_at_once_is_bounded_by_what_was() -> None:
    pace = Pace()
    assert pace.costs("kind") is None
    pace.add(Timed("kind", "start", 1, 7.0))
    assert pace.costs("kind") is None
    pace.add(Timed("kind", 2, 1.0, 0.1, whole=False))
    assert not pace.knows("kind")
    bounds = pace.costs("kind")
    assert bounds is not None
    assert bounds.most.per_pass(2) == 0.1
    pace.add(Timed("kind", 2, 50.0, 60.0))
    assert pace.knows("kind")
    pace.add(Timed("kind", 2, 150.0, 140.0))
    pace.add(Timed("other", 2, 1.0, 9.0))
    bounds = pace.costs("kind")
    assert bounds is not None
    assert [bounds.least.per_pass(n) for n in (1, 2, 4)] == [1.0, 1.0, 0.5]
    assert [bounds.most.per_pass(n) for n in (1, 2, 4)] == [2.0, 1.0, 1.0]
    assert (bounds.least.start, bounds.most.start) == (0.0, 7.0)
    pace.add(Timed("kind", 4, 10.0, 8.0))
    bounds = pace.costs("kind")
    assert bounds is not None
    assert [bounds.least.per_pass(n) for n in (1, 2, 3, 4)] == [1.0, 1.0, 0.8, 0.8]
    assert [bounds.most.per_pass(n) for n in (1, 2, 3, 4)] == [2.0, 1.0, 1.0, 0.8]


def test_on_workers_of_their_own_runs_start_where_there_is_time() -> None:
    assert started_in_time([60.0, 60.0, 60.0, 30.0], 2, 100.0) == [True, True, False, True]
    assert started_in_time([60.0, 60.0, 60.0, 30.0], 3, 100.0) == [True, True, True, True]
    assert started_in_time([], 1, 100.0) == []


def test_a_kind_is_what_changes_the_time_of_a_pass() -> None:
    assert kind_of(ERM) == kind_of(AMP) == kind_of(replace(LATE, epochs=3, lr=0.2, milestones=(0.9,)))
    for change in ({"batch_size": 20}, {"model_settings": {"width": 4}}, {"precision": "bf16"}, {"data": "other"}):
        assert kind_of(ERM) != kind_of(replace(ERM, **change))


# ---- one device, with made-up runs and a made-up clock


@dataclass
class MadeUp:
    number: int
    step: int | None = None
    steps_taken: int = 0


class Device:
    """Runs of an epoch of ten steps, on which a pass takes `per_pass` seconds, and an evaluation one."""

    def __init__(self, recipes: Sequence[Recipe], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.recipes = 0.0, recipes
        monkeypatch.setattr(Deadline, "seconds_left", lambda _: seconds - self.now)
        jobs = [Job(recipe, number) for number, recipe in enumerate(recipes)]
        self.deadline = Deadline(seconds / 60, 0.0)
        self.timed = TimedRuns(jobs, 100, self.deadline, starts_at=lambda number: 0, warmup=2, clock=lambda: self.now)
        self.active: list[MadeUp] = []

    def turn(self, made: MadeUp, event: Event | None, seconds: float) -> list[Timed]:
        self.now += seconds
        return list(self.timed.after_turn(made, event, seconds, self.active))

    def start(self, number: int) -> None:
        made = MadeUp(number)
        self.active.append(made)
        made.step = 0
        self.turn(made, Started(step=0, steps=80, epochs=8, parameters=1), 30.0)

    def epoch(self, per_pass: float) -> list[Timed]:
        found = []
        for step in range(10):
            for made in list(self.active):
                made.step, made.steps_taken = (made.step or 0) + 1, made.steps_taken + 1
                work = work_of(self.recipes[made.number], made.step - 1, 80)
                found += self.turn(made, None, per_pass * work[0].passes)
                if step == 9:
                    found += self.turn(made, Epoch(epoch=made.step // 10, step=made.step, numbers={}), 1.0)
        return found


def test_a_run_on_trial_is_given_up_when_its_own_steps_show_that_it_is_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device([replace(recipe, batch_size=10) for recipe in (AMP, ERM, ERM)], 200.0, monkeypatch)
    for _ in range(2):
        number = device.timed.first_in_time([n for n in range(3) if n not in {r.number for r in device.active}], [])
        assert number is not None
        device.start(number)
    assert device.timed.on_trial == {0, 1}
    (steps,) = (timed for timed in device.epoch(1.0) if timed.part == 2)
    assert steps.seconds / steps.amount == pytest.approx(1.0, rel=0.1)
    assert not steps.whole
    # with 140 and 70 passes left both would end after about 210 seconds, and there are 108
    assert set(device.timed.given_up) == {0}
    assert "too late" in device.timed.given_up[0]
    device.active = [made for made in device.active if made.number == 1]
    assert not device.timed.has_refused(device.active)
    assert device.timed.first_in_time([2], device.active) is None  # 80 more passes
    assert device.timed.has_refused(device.active)
    assert device.timed.on_trial == {1}  # how fast it is alone, with its evaluations, was not measured
    (passes,) = (timed for _ in range(2) for timed in device.epoch(0.5))
    assert (passes.part, passes.seconds / passes.amount, passes.whole) == (1, 0.6, True)
    for _ in range(4):
        device.epoch(0.5)
    assert device.timed.on_trial == set()
    assert set(device.timed.given_up) == {0}


def test_a_run_with_a_known_pace_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device([replace(ERM, batch_size=10)], 200.0, monkeypatch)
    device.deadline.pace.add(Timed(device.timed.kind, 1, 100.0, 100.0))
    assert device.timed.first_in_time([0], []) == 0
    device.start(0)
    device.epoch(30.0)  # another program has come
    assert not device.timed.given_up


def test_an_epoch_that_takes_longer_than_all_the_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device([replace(ERM, batch_size=10)], 100.0, monkeypatch)
    assert device.timed.first_in_time([0], []) == 0
    device.start(0)
    (made,) = device.active
    for step in range(1, 7):
        made.step = made.steps_taken = step
        device.turn(made, None, 2.0)
        device.turn(made, Progress(epoch=1, step=step, numbers={}), 0.0)
    assert set(device.timed.given_up) == {0}


def test_a_step_that_compiles_does_not_make_a_run_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch may be smaller: its step is captured anew."""
    device = Device([replace(ERM, batch_size=10)], 300.0, monkeypatch)
    assert device.timed.first_in_time([0], []) == 0
    device.start(0)
    (made,) = device.active
    for step in range(1, 31):
        made.step = made.steps_taken = step
        device.turn(made, None, 60.0 if step == 10 else 1.0)
        device.turn(made, Progress(epoch=step // 10, step=step, numbers={}), 0.0)
        if step % 10 == 0:
            device.turn(made, Epoch(epoch=step // 10, step=step, numbers={}), 1.0)
    assert not device.timed.given_up
    assert device.timed.on_trial == set()


def test_steps_that_a_gpu_has_not_done_yet_are_not_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of it until the end of an epoch: what is measured goes from one such end to another."""
    device = Device([replace(ERM, batch_size=10)], 1e6, monkeypatch)
    assert device.timed.first_in_time([0], []) == 0
    device.start(0)
    (made,) = device.active
    found = []
    for step in range(1, 41):
        made.step = made.steps_taken = step
        found += device.turn(made, None, 0.01)
        if step % 10 == 0:
            found += device.turn(made, Epoch(epoch=step // 10, step=step, numbers={}), 20.0)
    assert [timed.seconds / timed.amount for timed in found if timed.part == 1] == [pytest.approx(2.01)] * 3


def test_what_could_not_be_started_is_asked_again_the_step_after_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then another run can begin with its checkpoint."""
    device = Device([replace(ERM, batch_size=10), replace(LATE, batch_size=10)], 200.0, monkeypatch)
    assert device.timed.first_in_time([0], []) == 0
    device.start(0)
    assert device.timed.first_in_time([], device.active) is None
    device.epoch(0.1)
    assert device.timed.has_refused(device.active)
    device.active[0].step = device.active[0].steps_taken = 11
    device.turn(device.active[0], None, 0.1)
    assert not device.timed.has_refused(device.active)


# ---- real runs


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_next_run_that_fits_is_taken_instead(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """40 passes of ERM and 120 of AMP, one second each: two ERM end within 85 seconds, also in turns."""
    again, amp = replace(ERM, name="again"), replace(AMP, settings={"epsilon": 0.1, "inner_iter": 2})
    ends = train_all([amp, ERM, again], store, limit(85.0, monkeypatch), at_once=at_once)
    assert trained(ends) == ["erm", "again"]
    assert isinstance(ends["amp"], Postponed)
    assert not ends["amp"].given_up
    assert not store.folder(Job(amp, 0)).exists()


def test_what_is_left_of_a_run_counts_and_not_what_it_has_behind_it(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = RunTask({0: Run(Job(AMP, 0))}, "cpu", RunOptions(store, checkpoint_epochs=1))
    with closing(run_task_on_data(task, tiny_data(), lambda: None)) as events:  # type: ignore[type-var]
        next(event for _, event in events if isinstance(event, Epoch) and event.epoch == 6)
    assert trained(train_all([replace(AMP, name="new"), AMP], store, limit(40.0, monkeypatch))) == ["amp"]


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("first", [ERM, LATE])
def test_a_common_beginning_that_another_run_trains_is_not_part_of_a_run(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch, first: Recipe, at_once: int
) -> None:
    """Whole, the late start has 30 + 20 passes; after the beginning that it shares with ERM 20 are left."""
    both = [first, ERM if first is LATE else LATE]
    jobs = tuple(Job(recipe, 0) for recipe in both)
    ends = train_all(both, store, limit(45.0, monkeypatch), sharing=jobs, at_once=at_once)
    assert trained(ends) == ["erm", "late"]


def test_without_a_common_beginning_the_same_run_does_not_fit(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained(train_all([ERM, LATE], store, limit(45.0, monkeypatch))) == ["erm"]


def test_a_beginning_that_another_machine_has_left_is_not_counted_on(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, real = (Job(ERM, 0), Job(LATE, 0)), train_state.run_facts
    with monkeypatch.context() as patched:
        patched.setattr(train_state, "run_facts", lambda *given: {**real(*given), "commit": "another"})
        train_all([ERM], store, limit(45.0, monkeypatch), sharing=jobs)
    assert trained(train_all([LATE], store, limit(45.0, monkeypatch), sharing=jobs)) == []
    assert trained(train_all([LATE], store, limit(55.0, monkeypatch), sharing=jobs)) == ["late"]


def test_a_run_that_was_given_up_is_kept_and_ends_with_the_same_bits(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deadlines, "MEASURED_SECONDS", 0.0)
    ends = train_all([ERM, AMP], store, limit(1e-6, monkeypatch, per_pass=None))
    assert isinstance(ends["erm"], Postponed)
    assert ends["erm"].given_up
    assert 0 < ends["erm"].step < 3 * BATCHES
    newest, *_ = checkpoint.listed(store.folder(Job(ERM, 0)))
    assert checkpoint.step_of(newest) == ends["erm"].step
    assert isinstance(ends["amp"], Postponed)
    assert not ends["amp"].given_up
    assert trained(train_all([ERM], store, limit(1e9, monkeypatch))) == ["erm"]
    run(ERM, tmp_path / "whole")
    assert same(whole_state(store.folder(Job(ERM, 0))), whole_state(tmp_path / "whole"))


def test_when_the_time_is_over_nothing_is_started(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = train_all([ERM], store, limit(0.0, monkeypatch, per_pass=None))
    assert isinstance(ends["erm"], Postponed)


# ---- what one task measures, the next one knows


def test_what_a_task_measured_decides_about_the_next_one(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    given = limit(1e9, monkeypatch, per_pass=None)
    options = RunOptions(store, deadline=given)
    runs = [Run(Job(recipe, 0)) for recipe in (ERM, AMP)]
    events = list(run_all(runs, options, ThisProcess(["cpu"]), {"tiny": tiny_data()}))
    assert [number for number, event in events if isinstance(event, Finished)] == [0, 1]
    assert not any(isinstance(event, Timed) for _, event in events)
    kind = kind_of(ERM)
    assert {part for _, part, _ in given.pace.sums} == {1, "start", "end"}
    assert given.pace.sums[kind, "end", True][0] == 2
    passes, seconds = given.pace.sums[kind, 1, True]
    assert passes == 35 + 70  # of 40 and 80, without the first epochs
    assert seconds > 0


def test_on_a_gpu_only_runs_of_one_kind_train_together(store: ResultStore) -> None:
    wide = replace(ERM, name="wide", model_settings={"width": 4})
    runs = [Run(Job(recipe, 0)) for recipe in (ERM, wide, AMP)]

    def taken(options: RunOptions) -> list[list[int]]:
        queue, found = RunQueue(runs, options, dict, {}, lambda: None), []
        while (task := queue.take(Slot("cuda:0"))) is not None:
            found.append(list(task.numbers))
        return found

    assert taken(RunOptions(store)) == [[0, 1, 2]]
    assert taken(RunOptions(store, deadline=Deadline(1.0, 0.0))) == [[0, 2], [1]]


def test_a_worker_of_a_cluster_decides_like_this_process(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = dict(enumerate(Run(Job(recipe, 0)) for recipe in (AMP, ERM)))
    task = RunTask(runs, "cpu", RunOptions(store, deadline=limit(45.0, monkeypatch), at_once=1))
    contents = [content(place) for place in task.paths()]
    sent: list[Any] = list(Worker(None).run(0, run_task_on_data, task, contents, tiny_data()))
    said = [each for each in sent if not isinstance(each, FileChanges)]
    ends = {number: type(event) for number, event in said if isinstance(event, Finished | Stopped)}
    assert ends == {0: Postponed, 1: Finished}
