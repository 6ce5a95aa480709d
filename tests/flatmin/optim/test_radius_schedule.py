"""The radius over a training: where it is 0 a step is the base's own, where it is not it is AMP's, bit for bit."""

import copy
import json
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatmin
from flatmin.optim.radius import RadiusSchedule
from tests.support.cases import same

TOTAL = 12


class Training:
    """A loop with momentum, dropout, BatchNorm and a scheduler of the learning rate; it counts the passes."""

    def __init__(
        self, epsilon: float = 0.2, device: str = "cpu", base: Callable[..., Any] = torch.optim.SGD, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        self.model = nn.Sequential(*layers).to(device)
        wanted = {"momentum": 0.9} if base is torch.optim.SGD else {}
        self.optimizer = flatmin.AMP(
            base(self.model.parameters(), lr=0.1, **wanted), epsilon=epsilon, model=self.model, **settings
        )
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, TOTAL)
        self.scheduler: flatmin.RadiusScheduler | None = None
        self.x, self.y = torch.randn(TOTAL, 16, 4, device=device), torch.randn(TOTAL, 16, 1, device=device)
        self.passes: list[int] = []
        torch.manual_seed(1)

    def schedule(self, **settings: Any) -> "Training":
        self.scheduler = flatmin.RadiusScheduler(self.optimizer, TOTAL, **settings)
        return self

    def loss(self, n: int) -> Tensor:
        self.passes[-1] += 1
        loss: Tensor = (self.model(self.x[n]) - self.y[n]).square().mean()
        loss.backward()
        return loss

    def run(self, first: int = 0, last: int = TOTAL, *, blocks: bool = False) -> "Training":
        for n in range(first, last):
            self.passes.append(0)
            if blocks:
                self.optimizer.zero_grad()
                self.loss(n)
                if self.optimizer.perturbs:
                    with self.optimizer.perturbed():
                        self.loss(n)
                self.optimizer.step()
            else:
                self.optimizer.step(lambda n=n: (self.optimizer.zero_grad(), self.loss(n))[1])  # type: ignore[misc, func-returns-value]
            self.rate.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return self

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.rate

    def equals(self, other: "Training") -> bool:
        mine, theirs = self.model.state_dict().values(), other.model.state_dict().values()
        return same(mine, theirs)


def test_a_late_start_is_the_base_alone_and_then_amp_bit_for_bit() -> None:
    late = Training().schedule(start=0.5).run()
    by_hand = Training(epsilon=0).run(0, 6)
    for group in by_hand.optimizer.param_groups:
        group["epsilon"] = 0.2
    by_hand.run(6, TOTAL)
    assert late.equals(by_hand)
    assert late.passes == [1] * 6 + [2] * 6


@pytest.mark.parametrize("growth", ["constant", "linear", "cosine"])
def test_blocks_left_out_where_nothing_is_perturbed_equal_a_closure(growth: Any) -> None:
    settings = {"start": 0.25, "growth": growth, "every": 2}
    closures, blocks = Training().schedule(**settings).run(), Training().schedule(**settings).run(blocks=True)
    assert closures.equals(blocks)
    assert closures.passes == blocks.passes == [1, 1, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]


def test_two_ascent_steps_take_three_passes_in_every_third_step() -> None:
    training = Training(inner_iter=2).schedule(start=0, every=3).run()
    assert training.passes == [3, 1, 1] * 4


@pytest.mark.parametrize("growth", ["constant", "linear", "cosine"])
def test_the_radius_grows_to_that_of_the_group_and_stays_there(growth: Any) -> None:
    training = Training(epsilon=0.4)
    scheduler = flatmin.RadiusScheduler(training.optimizer, TOTAL, start=0.5, growth=growth)
    seen = []
    for _ in range(TOTAL + 3):
        seen += scheduler.get_last_radius()
        scheduler.step()
    assert seen[:6] == [0.0] * 6
    assert seen[11:] == [pytest.approx(0.4)] * 4
    assert all(0 < a <= b for a, b in pairwise(seen[6:12]))
    assert len(set(seen[6:12])) == (1 if growth == "constant" else 6)


def test_a_resumed_training_goes_on_bit_for_bit() -> None:
    settings = {"start": 0.25, "growth": "linear", "every": 2}
    whole = Training().schedule(**settings).run()
    first = Training().schedule(**settings).run(0, 7)
    assert first.scheduler is not None
    of_parts = copy.deepcopy([part.state_dict() for part in first.parts()])
    of_scheduler = json.loads(json.dumps(first.scheduler.state_dict()))
    drawn = torch.get_rng_state()
    second = Training(epsilon=0.7).schedule(start=0.9)  # other settings: the checkpoint's count
    assert second.scheduler is not None
    for part, state in zip(second.parts(), of_parts, strict=True):
        part.load_state_dict(state)
    second.scheduler.load_state_dict(of_scheduler)
    torch.set_rng_state(drawn)
    assert second.run(7, TOTAL).equals(whole)
    assert second.scheduler.radii == [0.2]


def test_beside_a_scheduler_of_the_rate_each_moves_its_own() -> None:
    alone, both = Training(epsilon=0.2).run(), Training(epsilon=0.2).schedule(start=0.0).run()
    assert both.equals(alone)  # a constant radius from the start changes nothing
    assert both.scheduler is not None
    assert both.scheduler.get_last_lr() == both.rate.get_last_lr()


def test_in_a_chain_it_is_stepped_with_the_other() -> None:
    training = Training(epsilon=0.2).schedule(start=0.5)
    assert training.scheduler is not None
    chain = torch.optim.lr_scheduler.ChainedScheduler([training.rate, training.scheduler], training.optimizer)
    training.rate, training.scheduler = chain, None  # type: ignore[assignment]
    assert training.run().equals(Training(epsilon=0.2).schedule(start=0.5).run())


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_as_a_part_of_a_sequence_it_would_not_count_all_steps(is_first: bool, steps: int) -> None:
    training = Training().schedule().run(last=steps)
    assert training.scheduler is not None
    parts = [training.scheduler, training.rate] if is_first else [training.rate, training.scheduler]
    with pytest.raises(TypeError, match="cannot be one part of a SequentialLR"):
        torch.optim.lr_scheduler.SequentialLR(training.optimizer, parts, milestones=[1])
    assert training.scheduler.last_epoch == steps


def test_groups_keep_their_own_radii_and_a_new_one_gets_its_own() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    base = torch.optim.SGD([{"params": weights[:1], "epsilon": 0.3}, {"params": weights[1:2], "epsilon": 0.0}], lr=0.1)
    optimizer = flatmin.AMP(base, epsilon=0.1, ball="group")
    scheduler = flatmin.RadiusScheduler(optimizer, 4, start=0.5, growth="linear")
    optimizer.add_param_group({"params": weights[2:], "epsilon": 0.8})
    for expected in ([0, 0, 0], [0.15, 0, 0.4], [0.3, 0, 0.8], [0.3, 0, 0.8]):
        scheduler.step()
        assert scheduler.get_last_radius() == [pytest.approx(value) for value in expected]


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # torch's, of a copied optimizer
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("settings", [{"start": 0.5}, {"start": 0.0, "growth": "linear"}], ids=str)
@pytest.mark.parametrize("more", [{}, {"epsilon": 0.2}], ids=str)
def test_a_new_group_has_the_share_of_the_others_at_once(
    settings: dict[str, Any], more: dict[str, float], copied: bool
) -> None:
    training = Training().schedule(**settings)
    if copied:
        training = copy.deepcopy(training)
    assert training.scheduler is not None
    for added in range(1, 4):
        training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **more})
        (radius,) = set(training.scheduler.get_last_radius())
        assert training.optimizer.perturbs == (radius > 0)
        assert training.scheduler.radii == [0.2] * (added + 1)
        training.run(added - 1, added)


def test_of_two_schedulers_the_last_one_sets_the_radius_of_a_new_group() -> None:
    first = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = flatmin.AMP(first, epsilon=0.1, ball="group")
    earlier, last = (flatmin.RadiusScheduler(optimizer, 4, start=0.0, every=every) for every in (2, 1))
    earlier.step()  # to a step without a perturbation
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "epsilon": 0.05})
    assert last.get_last_radius() == [0.1, 0.05]


def test_an_optimizer_that_holds_its_scheduler_can_be_copied() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = flatmin.AMP(torch.optim.SGD([weight], lr=0.1), epsilon=0.2)
    optimizer.scheduler = flatmin.RadiusScheduler(optimizer, 4, start=0.0, growth="linear")  # type: ignore[attr-defined]
    scheduler = copy.deepcopy(optimizer).scheduler  # type: ignore[attr-defined]
    scheduler.step()
    scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert scheduler.get_last_radius() == [0.1, 0.1]
    assert optimizer.param_groups[0]["epsilon"] == 0.05


def test_after_a_checkpoint_without_a_radius_it_is_refused() -> None:
    """Made after loading, it would take the 0 before the start for the radius to grow to."""
    saved = Training().schedule(start=0.5).optimizer.state_dict()
    training = Training()
    training.optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"got 0 in all groups.*create it before loading a checkpoint"):
        training.schedule(start=0.5)
    assert Training(epsilon=0.0).schedule(start=0.5).run().passes == [1] * TOTAL  # a radius of 0 is one, if chosen


def test_a_tensor_as_radius_is_refused_and_nothing_is_read_from_a_device() -> None:
    optimizer = flatmin.AMP(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), epsilon=0.1)
    scheduler = flatmin.RadiusScheduler(optimizer, 2)
    optimizer.param_groups[0]["epsilon"] = torch.tensor(0.5)
    for move in (
        scheduler.step,
        lambda: flatmin.RadiusScheduler(optimizer, 2),
        lambda: flatmin.MatchedRadius(optimizer),
    ):
        with pytest.raises(TypeError, match=r"got a tensor as epsilon.*write epsilon=0.1"):
            move()


def test_a_training_that_is_over_leaves_the_radius_for_the_next() -> None:
    training = Training().schedule(start=0.0, every=5).run()
    assert training.optimizer.param_groups[0]["epsilon"] == 0.2
    assert flatmin.RadiusScheduler(training.optimizer, TOTAL).radii == [0.2]


def test_a_state_keeps_its_own_list_and_a_wrong_one_is_named() -> None:
    scheduler = flatmin.RadiusScheduler(Training().optimizer, 4)
    saved = scheduler.state_dict()
    scheduler.load_state_dict(saved)
    scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    scheduler.step()
    assert saved["radii"] == [0.2]
    assert len(scheduler.radii) == 2
    with pytest.raises(ValueError, match="not the state of a RadiusScheduler: it has no every, growth, radii"):
        scheduler.load_state_dict({"last_epoch": 3})
    for wrong in ([0.1], [0.1, -1.0]):
        with pytest.raises(ValueError, match="2 numbers of at least 0, one per group"):
            scheduler.set_radii(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"growth": "cubic"}, "unknown growth 'cubic'; choose from constant, linear, cosine"),
        ({"growth": "linear"}, 'adjusted to held-out data grows by itself, got growth="linear"; use "constant"'),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"pause": 3}, "not the state of a RadiusScheduler: it also has pause; load what its state_dict"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(wrong: dict[str, Any], message: str) -> None:
    optimizer = flatmin.AMP(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), epsilon="auto")
    scheduler = flatmin.RadiusScheduler(optimizer, 4, start=0.0, every=2)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=message):
        scheduler.load_state_dict({**before, "steps": 3, "total_steps": 9, "radii": [0.7], **wrong})
    assert scheduler.state_dict() == before


def test_radii_are_set_to_plain_numbers() -> None:
    """So that a checkpoint is loaded with weights_only=True, and no step asks a device whether ε is 0."""
    training = Training().schedule(start=0.0)
    assert training.scheduler is not None
    training.scheduler.set_radii([torch.tensor([0.3], dtype=torch.float64).numpy()[0]])
    assert type(training.scheduler.state_dict()["radii"][0]) is float
    assert type(training.optimizer.param_groups[0]["epsilon"]) is float
    wrong: Any
    for wrong in ([torch.tensor(0.3)], ["0.3"]):
        with pytest.raises(ValueError, match="radii must be 1 numbers of at least 0, one per group, got"):
            training.scheduler.set_radii(wrong)


def test_steps_of_an_epoch_between_two_calls_are_named_unless_it_counts_epochs() -> None:
    """With total_steps = epochs · len(loader), and called once per epoch, it would never get to its start."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = flatmin.AMP(torch.optim.SGD([weight], lr=0.0), epsilon=0.1)
    right = [
        (optimizer, 100, [10] * 4),  # epochs, of which their length is a divisor
        (optimizer, 1000, [2] * 4),  # every second step
        (optimizer, 1000, [10, 1, 1, 4]),  # after steps that fp16 has skipped
    ]
    for made, total_steps, counts in right:
        scheduler = flatmin.RadiusScheduler(made, total_steps, start=0.0)
        for count in counts:
            for _ in range(count):
                made.step(lambda: _backward(weight))
            scheduler.step()
    del scheduler
    assert not optimizer._optimizer_step_post_hooks
    wrong = flatmin.RadiusScheduler(optimizer, 1000)
    for epoch in range(4):
        for _ in range(10):
            optimizer.step(lambda: _backward(weight))
        if epoch != 1:  # in the second it is told, and never again
            wrong.step()
            continue
        with pytest.warns(RuntimeWarning, match=r"once for 10 steps.* only after 10000 steps; call it after every"):
            wrong.step()
    again = pickle.loads(pickle.dumps(wrong))
    again.step()


@pytest.mark.parametrize("why_not", ["", "seldom called", "too few steps", "nothing changes", "replaced"])
def test_a_schedule_that_is_never_stepped_is_told_at_its_end(why_not: str) -> None:
    """Fewer than 1000 steps may be the first of as many epochs."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = flatmin.AMP(torch.optim.SGD([weight], lr=0.0), epsilon=0.1)
    total_steps = 999 if why_not == "too few steps" else 1000
    every = 1 if why_not == "nothing changes" else 2
    scheduler = flatmin.RadiusScheduler(optimizer, total_steps, start=0.0, every=every)
    later = flatmin.RadiusScheduler(optimizer, 2000) if why_not == "replaced" else None
    for n in range(total_steps - 1):
        optimizer.step(lambda: _backward(weight))
        if n == 500 and why_not == "seldom called":
            scheduler.step()
    with nullcontext() if why_not else pytest.warns(RuntimeWarning, match=r"1000 steps.*step\(\) was never called"):
        optimizer.step(lambda: _backward(weight))
    optimizer.step(lambda: _backward(weight))  # it is told once
    assert later is None or later.last_epoch == 0


def _backward(weight: Tensor) -> Tensor:
    weight.grad = None
    loss = weight.square().sum()
    loss.backward()
    return loss


def test_rmp_has_a_radius_over_time_too() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = flatmin.RMP(torch.optim.SGD([weight], lr=0.1), epsilon=0.1)
    scheduler = flatmin.RadiusScheduler(optimizer, 2, start=0.5)
    assert not optimizer.perturbs
    scheduler.step(1)
    assert optimizer.perturbs


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"start": 1.0}, ValueError, "at least 0 and below 1, got 1.0"),
        ({"start": True}, ValueError, "got True"),
        ({"start": "0.5"}, ValueError, "got '0.5'"),
        ({"growth": "quadratic"}, ValueError, "choose from constant, linear, cosine"),
        ({"every": 0}, ValueError, "at least 1, got 0"),
        ({"every": 1.5}, ValueError, "got 1.5"),
        ({"total_steps": 0}, ValueError, "total_steps"),
        ({"total_steps": 2.5}, ValueError, "total_steps"),
    ],
)
def test_wrong_settings_name_the_rule(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        flatmin.RadiusScheduler(Training().optimizer, **{"total_steps": 4, **settings})


def test_a_plain_optimizer_has_no_radius() -> None:
    with pytest.raises(TypeError, match=r"got .*SGD.*write\n? ?RadiusScheduler\(flatmin.AMP"):
        flatmin.RadiusScheduler(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 4)


def test_the_base_of_a_wrapper_is_refused_though_it_has_the_radius_in_its_groups() -> None:
    optimizer = flatmin.AMP(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), epsilon=0.1)
    with pytest.raises(TypeError, match=r"got .*SGD.*with the AMP itself and not its base"):
        flatmin.RadiusScheduler(optimizer.base, 4)


def test_a_share_is_that_of_the_step_alone() -> None:
    schedule = RadiusSchedule(start=1 / 3, growth="cosine", every=2)
    assert [schedule.share(step, 3) > 0 for step in range(5)] == [False, True, False, True, True]
    assert schedule.share(1, 3) == pytest.approx(0.5)


@pytest.mark.parametrize("growth", ["constant", "linear", "cosine"])
def test_whatever_the_start_and_the_length_some_step_is_perturbed_and_in_the_end_all_of_epsilon_is_there(
    growth: Any,
) -> None:
    for total in range(1, 40):
        for start in (0.0, 0.1, 0.5, 0.75, 0.96, 0.999):
            for every in (1, 2, 7):
                schedule = RadiusSchedule(start=start, growth=growth, every=every)
                shares = [schedule.share(step, total) for step in range(total)]
                assert any(shares)
                assert all(0 <= share <= 1 for share in shares)
                assert sum(share > 0 for share in shares) <= max(1, round((1 - start) * total / every) + 1)
                assert schedule.share(total, total) == schedule.share(total + 5, total) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_a_captured_step_has_one_graph_with_and_one_without_a_perturbation(base: Callable[..., Any]) -> None:
    """However often ε changes; and it trains as a step without a graph."""
    trainings = [Training(device="cuda", base=base).schedule(start=0.25, growth="linear", every=2) for _ in range(2)]
    for training, capture in zip(trainings, (True, False), strict=True):
        assert training.scheduler is not None
        step = flatmin.captured_step(
            training.model,
            lambda model, x, y: (model(x) - y).square().mean(),
            training.optimizer,
            compile=False,
            capture=capture,
        )
        torch.manual_seed(1)
        for n in range(TOTAL):
            step(training.x[n], training.y[n])
            assert step.captured == (capture and n > 0)
            training.scheduler.step()
        assert step._captures == (2 if capture else 0)
    for mine, theirs in zip(*(t.model.state_dict().values() for t in trainings), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["closure", "blocks", "captured"])
@pytest.mark.parametrize("method", [flatmin.AMP, flatmin.RMP])
def test_last_has_the_radius_that_the_step_used(form: str, method: Any) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.2)
    scheduler = flatmin.RadiusScheduler(optimizer, 4, start=0.5, growth="linear")
    step = flatmin.captured_step(model, lambda model, x: model(x).square().mean(), optimizer)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        if form == "captured":
            step(x)
        elif form == "closure":
            optimizer.step(closure)
        else:
            closure()
            if optimizer.perturbs:
                with optimizer.perturbed():
                    closure()
            optimizer.step()
        scheduler.step()  # sets that of the next step
        seen.append(optimizer.last.epsilon)
    assert seen == [0.0, 0.0, 0.1, 0.2]
