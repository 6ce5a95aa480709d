"""MatchedRadius: ε goes where the loss at θ + Δ meets the held-out loss, and stays there."""

import copy
import gc
import json
import pickle
import weakref
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flatmin
from flatmin.optim.radius import RadiusSchedule
from flatmin.optim.radius.step_record import StepRecord

CURVATURE = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


class Bowl:
    """J = ½ θᵀHθ + c at a θ that hardly moves: the rise to θ + Δ is a known function of ε."""

    def __init__(self, epsilon: float | Literal["auto"] = 0.1, device: str = "cpu", **settings: Any) -> None:
        self.theta = nn.Parameter(torch.tensor([0.4, -0.3, 0.2, 0.1], dtype=torch.float64, device=device))
        base = torch.optim.SGD([self.theta], lr=1e-12)
        self.optimizer = flatmin.AMP(base, epsilon=epsilon, inner_lr=1e3, **settings)
        self.radius = self.optimizer.radius if epsilon == "auto" else flatmin.MatchedRadius(self.optimizer)

    def loss(self) -> Tensor:
        curvature = CURVATURE.to(self.theta.device)
        return (curvature * self.theta.square()).sum() / 2 + 0.5

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            self.optimizer.step(self.closure)

    @property
    def epsilon(self) -> float:
        return float(self.optimizer.param_groups[0]["epsilon"])


def step_on_squares(optimizer: flatmin.AMP) -> None:
    """A step with J = ½ Σ θ², whose gradient is θ."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights = [w for group in optimizer.param_groups for w in group["params"]]
        loss = torch.stack([w.square().sum() for w in weights]).sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("first", [0.01, 0.1, 3.0])
@pytest.mark.parametrize("gap", [0.05, 0.5])
def test_the_loss_at_the_edge_comes_to_meet_the_held_out_loss(first: float, gap: float) -> None:
    bowl = Bowl(first)
    held_out = float(bowl.loss().detach()) + gap
    for _ in range(40):
        bowl.steps()
        bowl.radius.step(held_out)
    bowl.steps(1)
    last = bowl.optimizer.last
    assert last.loss_perturbed is not None
    assert float(last.loss_perturbed) == pytest.approx(held_out, rel=1e-3)
    assert bowl.radius.step(held_out) == pytest.approx(1, rel=1e-2)


def test_a_call_moves_it_by_a_factor_of_three_at_most_or_two_thirds_and_never_to_nothing() -> None:
    bowl = Bowl(0.1)
    bowl.steps()
    assert bowl.radius.step(1e6) == 3
    assert bowl.epsilon == pytest.approx(0.3)
    for _ in range(20):
        bowl.steps()
        assert bowl.radius.step(0.0) == pytest.approx(2 / 3)  # new data are better than the training data
    assert bowl.epsilon == pytest.approx(0.1 / 100)
    bowl.steps()
    assert bowl.radius.step(1e6) == 3
    assert bowl.epsilon == pytest.approx(3 * 0.1 / 100)


def test_without_a_perturbed_step_or_with_a_loss_that_is_not_finite_it_stays() -> None:
    bowl = Bowl(0.1)
    assert bowl.radius.step(1.0) == 1.0
    bowl.steps()
    assert bowl.radius.step(float("nan")) == 1.0
    bowl.steps()
    assert bowl.radius.step(torch.tensor(float("inf"))) == 1.0
    assert bowl.epsilon == 0.1


def test_a_step_that_was_skipped_does_not_count() -> None:
    bowl, other = Bowl(0.1), Bowl(0.1)
    bowl.steps()
    other.steps()

    def overflowing() -> Tensor:
        loss = bowl.closure()
        assert bowl.theta.grad is not None
        bowl.theta.grad.fill_(float("inf"))
        return loss * float("inf")

    bowl.optimizer.step(overflowing)
    assert bool(bowl.optimizer.last.skipped)
    assert bowl.radius.step(1.5) == other.radius.step(1.5)


def test_where_the_rate_of_the_ascent_bounds_the_way_a_larger_ball_is_not_asked_for() -> None:
    bowl = Bowl(5.0)
    bowl.optimizer.param_groups[0]["inner_lr"] = 1e-3
    bowl.steps()
    assert bowl.radius.step(1e6) == 1.0
    bowl.steps()
    assert bowl.radius.step(0.0) == pytest.approx(1 / 1.5)


def test_blocks_do_not_tell_their_losses_and_the_loop_does() -> None:
    bowl, other = Bowl(0.1), Bowl(0.1)
    sums = [0.0, 0.0]
    for _ in range(3):
        sums[0] += float(bowl.closure().detach())
        with bowl.optimizer.perturbed():
            loss = bowl.loss()
            loss.backward()
            sums[1] += float(loss.detach())
        bowl.optimizer.step()
    other.steps()
    again = Bowl(0.1).radius
    again.load_state_dict(bowl.radius.state_dict())
    for radius in (bowl.radius, again):
        with pytest.raises(ValueError, match=r"step\(held_out_loss, losses=\(loss, loss_perturbed\)\)"):
            radius.step(0.95)
    factor = bowl.radius.step(0.95, losses=(sums[0] / 3, sums[1] / 3))
    assert factor == pytest.approx(other.radius.step(0.95), rel=1e-5)
    assert 1 < factor < 3


def test_losses_that_a_block_loop_gives_to_the_step_are_as_good_as_a_closure() -> None:
    bowl, other = Bowl(0.1), Bowl(0.1)
    for _ in range(4):
        for _ in range(3):
            loss = bowl.closure()
            with bowl.optimizer.perturbed():
                perturbed = bowl.loss()
                perturbed.backward()
            bowl.optimizer.step(losses=(loss, perturbed))
        other.steps()
        assert bowl.radius.step(0.95) == pytest.approx(other.radius.step(0.95), rel=1e-12)
    assert bowl.epsilon != 0.1


def test_groups_keep_their_proportions() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    base = torch.optim.SGD(
        [{"params": [w], "epsilon": e} for w, e in zip(weights, (0.1, 0.3, 0.0), strict=True)], lr=0.1
    )
    optimizer = flatmin.AMP(base, epsilon=0.1, ball="group")
    radius = flatmin.MatchedRadius(optimizer)
    step_on_squares(optimizer)
    radius.step(1e6)
    assert [group["epsilon"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.9, 0.0])


def test_beside_a_scheduler_it_moves_what_the_radius_grows_to() -> None:
    bowl = Bowl(0.1)
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 10, start=0.5)
    radius = flatmin.MatchedRadius(bowl.optimizer, scheduler=scheduler)
    for _ in range(5):
        bowl.steps(1)
        scheduler.step()
    assert radius.step(1e6) == 1.0  # nothing was perturbed yet
    assert bowl.epsilon == pytest.approx(0.1)
    bowl.steps(1)
    assert radius.step(1e6) == 3
    assert bowl.epsilon == pytest.approx(0.3)
    scheduler.step()
    assert bowl.epsilon == pytest.approx(0.3)


def test_a_checkpoint_between_two_calls_goes_on_alike() -> None:
    whole, part, second = Bowl(0.1), Bowl(0.1), Bowl(0.7)
    for bowl in (whole, part):
        bowl.steps()
        bowl.radius.step(1e6)
        bowl.steps(2)
    with torch.no_grad():
        second.theta.copy_(part.theta)
    second.optimizer.load_state_dict(copy.deepcopy(part.optimizer.state_dict()))
    second.radius.load_state_dict(json.loads(json.dumps(part.radius.state_dict())))
    for bowl in (whole, second):
        bowl.steps(1)
    assert second.radius.step(0.95) == whole.radius.step(0.95) != 3
    assert second.epsilon == whole.epsilon


def test_an_ascent_on_less_gives_no_losses_to_compare() -> None:
    bowl = Bowl(0.1)
    bowl.optimizer.step(bowl.closure, ascent=bowl.closure)
    with pytest.raises(ValueError, match="with ascent=, or if the closure"):
        bowl.radius.step(1.0)
    assert bowl.radius.step(1e6, losses=(0.8, 0.9)) == 3


def test_a_loss_of_one_row_counts_and_one_of_several_does_not() -> None:
    for shape, expected in (((1,), 3), ((4,), None)):
        bowl = Bowl(0.1)
        bowl.optimizer.step(lambda bowl=bowl, shape=shape: bowl.closure().detach().expand(shape))  # type: ignore[misc]
        if expected is None:
            with pytest.raises(ValueError, match=r"has not seen all losses .*, each one number"):
                bowl.radius.step(1e6)
        else:
            assert bowl.radius.step(1e6) == expected


def test_a_group_that_is_added_later_moves_too() -> None:
    bowl = Bowl(0.1, ball="group")
    bowl.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))], "epsilon": 0.4})
    bowl.steps()
    assert bowl.radius.step(1e6) == 3
    assert bowl.radius.radii == pytest.approx([0.3, 1.2])


def new_group() -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]}


@pytest.mark.parametrize("how", ["alone", "scheduled", "resumed", "copied"])
def test_a_group_that_is_added_after_a_move_shares_the_ball(how: str) -> None:
    bowl = Bowl(0.1)
    if how == "scheduled":
        scheduler = flatmin.RadiusScheduler(bowl.optimizer, 1000, start=0.0)
        bowl.radius = flatmin.MatchedRadius(bowl.optimizer, scheduler=scheduler)
    bowl.steps()
    bowl.radius.step(1e6)
    if how == "resumed":
        saved, bowl = bowl, Bowl(0.1)
        bowl.optimizer.load_state_dict(saved.optimizer.state_dict())
        bowl.radius.load_state_dict(saved.radius.state_dict())
    elif how == "copied":
        bowl = copy.deepcopy(bowl)
    bowl.optimizer.add_param_group(new_group())
    assert bowl.radius.radii == pytest.approx([0.3, 0.3])
    bowl.steps()
    bowl.radius.step(1e6)
    assert bowl.radius.radii == pytest.approx([0.9, 0.9])
    for _ in range(40):
        bowl.steps()
        bowl.radius.step(0.0)
    assert bowl.radius.radii == pytest.approx([0.001, 0.001])  # the least is the same for both


def test_beside_a_scheduler_over_a_prepared_optimizer_a_new_group_shares_the_ball() -> None:
    bowl = Bowl("auto")
    prepared = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # stands for Accelerate's
    prepared.optimizer = bowl.optimizer  # type: ignore[attr-defined]
    prepared.param_groups = bowl.optimizer.param_groups
    scheduler = flatmin.RadiusScheduler(prepared, 10, start=0.0)
    radius = flatmin.MatchedRadius(bowl.optimizer, scheduler=scheduler)
    with pytest.raises(ValueError, match="belong to the same optimizer"):
        flatmin.MatchedRadius(Bowl("auto").optimizer, scheduler=scheduler)
    bowl.steps()
    radius.step(1e6)
    bowl.optimizer.add_param_group(new_group())
    assert scheduler.get_last_radius() == pytest.approx([0.3, 0.3])


def test_groups_with_balls_of_their_own_are_added_with_the_first_radius() -> None:
    bowl = Bowl(0.1, ball="group")
    bowl.steps()
    bowl.radius.step(1e6)
    bowl.optimizer.add_param_group(new_group())
    assert bowl.radius.radii == pytest.approx([0.3, 0.1])


def test_it_begins_above_0() -> None:
    base = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="must start above 0, got 0 in all groups; give one of them"):
        flatmin.MatchedRadius(flatmin.AMP(base, epsilon=0.0))
    groups = [{"params": [nn.Parameter(torch.ones(1))], "epsilon": 0.0}]
    with pytest.raises(ValueError, match="must start above 0, got 0 in all groups; give one of them"):
        flatmin.AMP(torch.optim.SGD(groups, lr=0.1), epsilon="auto")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bowl: pickle.loads(pickle.dumps(bowl))])
def test_a_copy_counts_the_steps_of_its_own_optimizer(copied: Any) -> None:
    bowl = Bowl(0.1)
    bowl.steps()
    other = copied(bowl)
    other.radius.step(1e6)
    other.steps()
    assert other.radius.step(1e6) == 3
    assert (bowl.epsilon, other.epsilon) == (0.1, pytest.approx(0.9))


def test_a_scheduler_that_grows_or_is_anothers_is_refused() -> None:
    optimizer = flatmin.AMP(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), epsilon=0.1)
    grows = flatmin.RadiusScheduler(optimizer, 10, start=0.0, growth="linear")
    with pytest.raises(ValueError, match='grows by itself, got a scheduler with growth="linear"'):
        flatmin.MatchedRadius(optimizer)
    assert grows.get_last_radius() == pytest.approx([0.01])
    bowl, others = Bowl(0.1), flatmin.RadiusScheduler(Bowl(0.1).optimizer, 10)
    with pytest.raises(ValueError, match="belong to the same optimizer"):
        flatmin.MatchedRadius(bowl.optimizer, scheduler=others)
    with pytest.raises(ValueError, match='adjusted to held-out data grows by itself, got growth="cosine"'):
        flatmin.RadiusScheduler(Bowl("auto").optimizer, 10, growth="cosine")
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 10)
    with pytest.raises(ValueError, match='adjusted to held-out data grows by itself, got growth="linear"'):
        scheduler.load_state_dict({**scheduler.state_dict(), "growth": "linear"})
    scheduler.schedule = RadiusSchedule(growth="linear")
    bowl.optimizer.add_param_group(new_group())  # refused when it is stepped, and not here
    with pytest.raises(ValueError, match='grows by itself, got a scheduler with growth="linear"'):
        bowl.radius.step(1.0)


def test_after_a_schedule_is_over_the_groups_have_the_radius() -> None:
    bowl = Bowl("auto")
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 4)
    scheduler.step(4)
    before = copy.deepcopy(bowl.optimizer.state_dict())
    for expected in (0.3, 0.9):
        bowl.steps()
        bowl.radius.step(1e6)
        assert bowl.epsilon == pytest.approx(expected)
    scheduler.step()
    assert bowl.epsilon == pytest.approx(0.9)
    bowl.optimizer.load_state_dict(before)
    assert bowl.epsilon == 0.1
    bowl.steps()
    assert bowl.radius.step(1e6) == 3
    assert bowl.epsilon == pytest.approx(0.3)


@pytest.mark.parametrize("order", ["scheduler first", "radius first", "automatic", "a copy"])
def test_the_scheduler_of_the_same_optimizer_applies_the_radius_that_is_found(order: str) -> None:
    bowl = Bowl("auto" if order == "automatic" else 0.1)
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 10, start=0.5)
    if order == "scheduler first":
        bowl.radius = flatmin.MatchedRadius(bowl.optimizer)
    if order == "a copy":
        bowl, scheduler = copy.deepcopy((bowl, scheduler))
    for _ in range(5):
        bowl.steps(1)
        assert (bowl.epsilon, bowl.radius.step(1e6)) == (0.0, 1.0)  # nothing is perturbed yet
        scheduler.step()
    bowl.steps(1)
    assert bowl.radius.step(1e6) == 3
    for _ in range(6):  # also when its training is over
        scheduler.step()
        assert bowl.epsilon == pytest.approx(0.3)


def test_only_amp_has_a_radius_to_match() -> None:
    base = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match=r"the epsilon of a flatmin.AMP, got"):
        flatmin.MatchedRadius(base)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got .*RMP"):
        flatmin.MatchedRadius(flatmin.RMP(base, epsilon=0.1))


def test_what_applies_the_radius_is_a_scheduler_of_radii() -> None:
    optimizer: Any = flatmin.AMP(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), epsilon=0.1)
    rate: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(TypeError, match=r"must have radii and set_radii\(\), .* got .*StepLR; give it a Rad"):
        flatmin.MatchedRadius(optimizer, scheduler=rate)


# ---- epsilon="auto"


def test_an_automatic_radius_starts_at_a_tenth_and_is_a_matched_one() -> None:
    auto, by_hand = Bowl("auto"), Bowl(0.1)
    assert auto.epsilon == auto.optimizer.defaults["epsilon"] == 0.1
    for gap in (1e6, 0.95, 0.9, 0.0):
        auto.steps()
        by_hand.steps()
        assert auto.optimizer.radius.step(gap) == by_hand.radius.step(gap)
        assert auto.epsilon == by_hand.epsilon != 0.1
        assert torch.equal(auto.theta, by_hand.theta)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("late", [False, True])
def test_a_copy_of_the_optimizer_has_its_own_radius_with_what_has_been_seen(copied: Any, late: bool) -> None:
    bowl = Bowl("auto")
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 10, start=0.2) if late else None
    if scheduler is not None:  # ε is 0 when it is copied
        before = copied(bowl.optimizer)
        assert before.radius.state_dict()["first"] == [0.1]
        scheduler.step(2)
    bowl.steps(2)
    other = copied(bowl.optimizer)
    assert other.radius.optimizer is other
    assert other.radius.step(0.95) == bowl.radius.step(0.95) != 3
    assert other.param_groups[0]["epsilon"] == bowl.epsilon
    with torch.no_grad():
        bowl.theta.copy_(other.param_groups[0]["params"][0])
    bowl.steps()
    assert other.radius.step(1e6) == 1.0  # the copy took no steps
    assert bowl.radius.step(1e6) == 3


def test_a_checkpoint_of_the_optimizer_has_the_radius() -> None:
    bowl, other = Bowl("auto"), Bowl("auto")
    bowl.steps()
    bowl.radius.step(1e6)
    with torch.no_grad():
        other.theta.copy_(bowl.theta)
    other.optimizer.load_state_dict(copy.deepcopy(bowl.optimizer.state_dict()))
    assert other.epsilon == pytest.approx(0.3)
    bowl.steps()
    other.steps()
    assert other.radius.step(0.95) == bowl.radius.step(0.95)
    assert other.epsilon == bowl.epsilon


def test_a_group_with_a_radius_of_its_own_keeps_its_share_of_an_automatic_one() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "epsilon": 0.4}]
    optimizer = flatmin.AMP(torch.optim.SGD(groups, lr=0.1), epsilon="auto", ball="group")
    step_on_squares(optimizer)
    optimizer.radius.step(1e6)
    assert [group["epsilon"] for group in optimizer.param_groups] == pytest.approx([0.3, 1.2])


def test_without_auto_there_is_no_radius_to_step() -> None:
    optimizer = flatmin.AMP(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), epsilon=0.1)
    assert not optimizer.has_automatic_radius
    assert not hasattr(optimizer, "radius")
    with pytest.raises(AttributeError, match=r'write AMP\(base, epsilon="auto"\), or make a flatmin\.MatchedRadius'):
        optimizer.radius.step(1.0)


def test_all_radii_of_an_optimizer_are_one() -> None:
    bowl = Bowl("auto")
    bowl.steps()
    pair = bowl, bowl.optimizer.radius
    both = [copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))]
    for one, radius in [(bowl, bowl.radius), *both, (bowl, flatmin.MatchedRadius(bowl.optimizer))]:
        before = one.epsilon
        one.steps()
        assert radius.optimizer is one.optimizer
        assert radius.step(1e6) == 3
        assert one.optimizer.radius.step(1e6) == 1  # nothing was perturbed since
        assert one.epsilon == pytest.approx(3 * before)
        assert len(one.optimizer._optimizer_step_post_hooks) == 1


def test_neither_the_optimizer_nor_its_radius_keeps_the_weights_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        bowl = Bowl("auto")
        bowl.steps()
        bowl.radius.step(1e6)
        weights = weakref.ref(bowl.theta)
        del bowl
        assert weights() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["meta", "empty group"])
def test_a_copy_without_a_device(where: str) -> None:
    params = [nn.Parameter(torch.ones(1, device="meta"))] if where == "meta" else []
    optimizer = flatmin.AMP(torch.optim.SGD([{"params": params}], lr=0.1), epsilon="auto")
    assert copy.deepcopy(optimizer).radius.radii == [0.1]


@pytest.mark.parametrize("ball", ["global", "tensor"])
def test_a_ball_that_only_the_long_gradients_reach_still_grows(ball: Any) -> None:
    """One ball a tensor: those of short gradients do not reach the edge, but nearly all of Δ does."""
    weights = [nn.Parameter(torch.full((2,), size, dtype=torch.float64)) for size in (1.0, 0.01, 0.01, 0.01)]
    optimizer = flatmin.AMP(torch.optim.SGD(weights, lr=1e-12), epsilon="auto", ball=ball)
    step_on_squares(optimizer)
    assert optimizer.last.on_ball is not None
    assert float(optimizer.last.on_ball) == (0.25 if ball == "tensor" else 1)
    assert optimizer.radius.step(1e6) == 3


@pytest.mark.parametrize("gone", ["before the start", "between perturbed steps"])
def test_the_radius_of_a_scheduler_that_is_gone_is_not_lost(gone: str) -> None:
    bowl = Bowl("auto")
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 10, start=0.5 if gone == "before the start" else 0.0, every=2)
    bowl.steps(1)
    scheduler.step()
    assert bowl.epsilon == 0
    del scheduler
    gc.collect()
    assert bowl.radius.radii == [0.1]
    seen = bowl.radius.step(1e6)
    assert (seen, bowl.epsilon) == ((1, 0) if gone == "before the start" else (3, pytest.approx(0.3)))


@pytest.mark.parametrize("epsilon", ["auto", 0.1])
def test_a_group_that_is_added_after_a_schedule_has_what_the_others_have(epsilon: Any) -> None:
    bowl = Bowl(epsilon)
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 2)
    scheduler.step(2)
    bowl.optimizer.param_groups[0]["epsilon"] = 0.7
    bowl.optimizer.add_param_group(new_group())
    assert [group["epsilon"] for group in bowl.optimizer.param_groups] == [0.7, 0.7]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda radius: radius.step(1.2, losses=(1.0,)), r"losses must be two numbers, .*, got \(1.0,\); write step\("),
        (lambda radius: radius.step(1.2, losses=1.0), r"losses must be two numbers, .*, got 1.0; write step\("),
        (lambda radius: radius.step(1.2, losses=(1.0, None)), r"the loss at θ \+ Δ must be a mean, one number"),
        (lambda radius: radius.step(None), "held_out_loss must be a mean, one number, got .*None.*; take the mean"),
        (
            lambda radius: radius.step(torch.ones(3)),
            r"held_out_loss must be a mean, one number, got a tensor of shape \(3,\)",
        ),
    ],
)
def test_what_is_not_a_number_says_so_and_nothing_is_lost(call: Any, message: str) -> None:
    bowl = Bowl("auto")
    bowl.steps()
    with pytest.raises((TypeError, ValueError), match=message):
        call(bowl.radius)
    assert bowl.radius.calls == 0
    assert bowl.radius.step(1e6) == 3
    assert bowl.radius.calls == 1


def test_a_call_that_cannot_change_the_radius_loses_nothing() -> None:
    bowl = Bowl("auto")
    bowl.steps()
    group = bowl.optimizer.param_groups[0]
    group["epsilon"] = torch.tensor(0.1)
    with pytest.raises(TypeError, match="a radius that changes must be a number"):
        bowl.radius.step(1e6)
    group["epsilon"] = 0.1
    assert bowl.radius.step(1e6) == 3


def test_a_ball_in_which_every_loss_is_infinite_shrinks() -> None:
    bowl = Bowl("auto")
    bowl.optimizer.param_groups[0]["epsilon"] = 0.9

    def steep() -> Tensor:
        """Infinite beyond a distance of 0.5 of where it is now."""
        bowl.optimizer.zero_grad()
        loss = bowl.loss()
        loss = loss + torch.where((bowl.theta - start).norm() > 0.5, torch.inf, 0.0) * bowl.theta.sum()
        loss.backward()
        return loss

    start = bowl.theta.detach().clone()
    for expected in (0.6, 0.4):
        bowl.optimizer.step(steep)
        assert bool(bowl.optimizer.last.skipped)
        bowl.radius.step(1e6)
        assert bowl.epsilon == pytest.approx(expected)
    bowl.optimizer.step(steep)
    assert not bool(bowl.optimizer.last.skipped)


@pytest.mark.parametrize("ball", ["global", "group"])
def test_a_group_whose_radius_is_0_is_left_alone(ball: Any) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = flatmin.AMP(torch.optim.SGD([{"params": [w]} for w in weights], lr=0.1), epsilon="auto", ball=ball)
    optimizer.param_groups[1]["epsilon"] = 0.0
    step_on_squares(optimizer)
    optimizer.radius.step(1e6)
    assert [group["epsilon"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.0])
    step_on_squares(optimizer)


def test_a_loaded_radius_of_0_is_an_error_and_not_silence() -> None:
    bowl, plain = Bowl("auto"), Bowl("auto")
    plain.optimizer.param_groups[0]["epsilon"] = 0.0
    bowl.optimizer.load_state_dict(plain.optimizer.state_dict())
    bowl.steps()
    with pytest.raises(ValueError, match=r"that is adjusted must be above 0, got 0 in all groups .*; give a group"):
        bowl.radius.step(1.0)


def test_what_was_measured_before_a_checkpoint_was_loaded_does_not_count() -> None:
    bowl, fresh = Bowl("auto"), Bowl("auto")
    saved = copy.deepcopy(bowl.optimizer.state_dict())
    bowl.theta.data.mul_(5)
    bowl.steps()
    bowl.optimizer.load_state_dict(saved)
    bowl.theta.data.copy_(fresh.theta)
    for one in (bowl, fresh):
        one.steps(1)
    assert bowl.radius.step(0.95) == fresh.radius.step(0.95)


def test_losses_that_were_missing_once_are_not_missed_later() -> None:
    bowl, other = Bowl("auto"), Bowl("auto")
    bowl.optimizer.step(bowl.closure, ascent=bowl.closure)
    bowl.radius.step(1e6, losses=(0.8, 0.9))
    other.optimizer.param_groups[0]["epsilon"] = bowl.epsilon
    for one in (bowl, other):
        one.steps()
    assert bowl.radius.step(0.95) == other.radius.step(0.95)


def test_sums_of_single_precision_losses_do_not_round() -> None:
    record = StepRecord([0.1], automatic=True)
    for loss in (2.0**24, 1.0, 1.0):
        numbers = [torch.tensor(value) for value in (loss, 0.0, 1.0)]
        record.add(
            flatmin.Last(
                **dict(zip(("loss", "loss_perturbed", "on_ball"), numbers, strict=True)), skipped=torch.tensor(False)
            )
        )
    assert record.sums is not None
    assert record.sums.tolist() == [2.0**24 + 2, 0.0, 3.0, 3.0, 3.0]


def test_balls_of_their_own_have_least_radii_of_their_own() -> None:
    bowl = Bowl("auto", ball="group")
    bowl.optimizer.add_param_group({**new_group(), "epsilon": 0.4})
    for _ in range(40):
        bowl.steps()
        bowl.radius.step(0.0)
    assert bowl.radius.radii == pytest.approx([0.001, 0.004])


def test_a_group_that_is_added_when_the_scheduler_is_gone_shares_the_ball() -> None:
    bowl = Bowl("auto")
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, 10, start=0.0, every=2)
    bowl.steps(1)
    scheduler.step()
    alone = copy.deepcopy(bowl.optimizer)
    assert alone.param_groups[0]["epsilon"] == 0
    alone.add_param_group(new_group())
    assert alone.radius.step(1e6) == 3
    assert [group["epsilon"] for group in alone.param_groups] == pytest.approx([0.3, 0.3])


def test_what_fails_inside_the_radius_is_not_called_a_missing_one() -> None:
    class Breaks(flatmin.RadiusScheduler):
        is_broken = False

        @property
        def is_over(self) -> bool:
            if self.is_broken:
                raise AttributeError("of the scheduler")
            return super().is_over

    bowl = Bowl("auto")
    scheduler = Breaks(bowl.optimizer, 10)
    scheduler.is_broken = True
    with pytest.raises(AttributeError, match="of the scheduler"):
        bowl.optimizer.radius.step(1.0)
    del scheduler


def test_what_is_loaded_in_inference_mode_goes_on() -> None:
    bowl, other = Bowl("auto"), Bowl("auto")
    bowl.steps()
    with torch.inference_mode():
        other.radius.load_state_dict(bowl.radius.state_dict())
    other.steps()
    assert other.radius.step(1e6) == 3


def test_auto_is_for_all_of_an_amp() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"got 'auto'; .* that of a whole flatmin\.AMP"):
        flatmin.AMP(torch.optim.SGD([{"params": [weight], "epsilon": "auto"}], lr=0.1), epsilon=0.1)
    with pytest.raises(ValueError, match=r"got 'auto'; .* that of a whole flatmin\.AMP"):
        flatmin.RMP(torch.optim.SGD([weight], lr=0.1), epsilon="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"""got 'automatic'; .* AMP\(base, epsilon="auto"\)$"""):
        flatmin.AMP(torch.optim.SGD([weight], lr=0.1), epsilon="automatic")  # type: ignore[arg-type]


class Operations(TorchDispatchMode):
    """The names of all operations, and where their inputs are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        self.devices |= {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def test_recording_a_step_takes_four_kernels_and_nothing_from_the_host() -> None:
    with FakeTensorMode():  # of a GPU that is not there
        loss, perturbed, at_edge = (torch.full((), value, device="cuda") for value in (1.0, 2.0, 0.25))
        skipped = torch.zeros((), dtype=torch.bool, device="cuda")
        last = flatmin.Last(loss=loss, loss_perturbed=perturbed, on_ball=at_edge, skipped=skipped)
        record = StepRecord([0.1], automatic=True)
        record.add(last)
        with Operations() as seen:
            record.add(last)
    assert seen.devices == {"cuda"}
    launched = [name for name in seen.names if not name.startswith(("device", "view", "unsqueeze"))]
    assert launched == ["ceil.default", "stack.default", "where.self", "add.Tensor"]


@pytest.mark.cuda
def test_captured_steps_are_counted_without_a_host_sync() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1).cuda(), torch.randn(32, 8, device="cuda")
    factors = []
    for capture in (True, False):
        twin = copy.deepcopy(model)
        optimizer = flatmin.AMP(torch.optim.SGD(twin.parameters(), lr=1e-9), epsilon=0.1, model=twin)
        radius = flatmin.MatchedRadius(optimizer)
        step = flatmin.captured_step(
            twin, lambda model, x: model(x).square().mean(), optimizer, compile=False, capture=capture
        )
        for _ in range(3):
            step(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        factors.append(radius.step(float(step(x)) + 0.01))
    assert factors[0] == pytest.approx(factors[1], rel=1e-3)


@pytest.mark.parametrize("first", ["the radius", "the optimizer"])
def test_a_radius_and_its_optimizer_are_loaded_in_any_order(first: str) -> None:
    straight, resumed = Bowl("auto"), Bowl("auto")
    straight.steps()
    saved = [copy.deepcopy(one.state_dict()) for one in (straight.radius, straight.optimizer)]
    resumed.steps(1)  # is forgotten
    pairs: list[Any] = list(zip((resumed.radius, resumed.optimizer), saved, strict=True))
    for one, state in pairs if first == "the radius" else pairs[::-1]:
        one.load_state_dict(state)
    resumed.theta.data.copy_(straight.theta)
    for bowl in (straight, resumed):
        bowl.steps(1)
    assert resumed.radius.state_dict() == straight.radius.state_dict()
    assert resumed.radius.step(0.95) == straight.radius.step(0.95)
    saved[1] = copy.deepcopy(straight.optimizer.state_dict())
    resumed.steps()
    resumed.optimizer.load_state_dict(saved[1])  # alone
    assert resumed.radius.state_dict()["sums"] is None


@pytest.mark.parametrize("held_out", [0.95, 0.55, 1.2])
def test_where_the_base_maximises_it_is_the_mirror_image(held_out: float) -> None:
    class Hill(Bowl):
        def loss(self) -> Tensor:
            return -super().loss()

    bowl, hill = Bowl("auto"), Hill("auto")
    hill.optimizer.param_groups[0]["maximize"] = True
    for _ in range(3):
        for one in (bowl, hill):
            one.steps()
        assert hill.radius.step(-held_out) == pytest.approx(bowl.radius.step(held_out), rel=1e-12)
    assert hill.epsilon == pytest.approx(bowl.epsilon, rel=1e-12)
    assert hill.epsilon != 0.1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "is not the state of a MatchedRadius"),
        ({"first": [0.1], "sums": [1.0, 2.0, 3.0, 4.0], "lacks_losses": False}, "or that of another version"),
        ({"first": None, "sums": None, "lacks_losses": False}, "is not the state of a MatchedRadius"),
        ({"first": [0.1], "sums": 5.0, "lacks_losses": False}, "is not the state of a MatchedRadius"),
        ({"first": [0.1], "lacks_losses": False}, "is not the state of a MatchedRadius"),
        (None, "not the state of a MatchedRadius, .* got an object of type NoneType; load the optimizer's alone"),
        ({"first": [0.1, 0.1], "sums": None, "lacks_losses": False}, "with 2 parameter groups, got an opt"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error_and_nothing_is_lost(state: Any, message: str) -> None:
    bowl = Bowl("auto")
    bowl.steps()
    before = bowl.radius.state_dict()
    with pytest.raises(ValueError, match=message):
        bowl.radius.load_state_dict(state)
    assert bowl.radius.state_dict() == before


def test_a_group_that_was_taken_away_is_an_error_and_nothing_is_lost() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = flatmin.AMP(torch.optim.SGD([{"params": [w]} for w in weights], lr=0.1), epsilon="auto")
    step_on_squares(optimizer)
    taken, before = optimizer.param_groups.pop(), optimizer.radius.state_dict()
    with pytest.raises(ValueError, match="started with 2 parameter groups, and the optimizer has 1; make a new"):
        optimizer.radius.step(1e6)
    optimizer.param_groups.append(taken)
    assert optimizer.radius.state_dict() == before
    assert optimizer.radius.step(1e6) == 3


@pytest.mark.parametrize("ball", ["global", "group"])
def test_a_group_that_joins_later_has_a_least_radius_too(ball: Any) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "epsilon": 0.0}]
    optimizer = flatmin.AMP(torch.optim.SGD(groups, lr=1e-9), epsilon="auto", ball=ball)
    step_on_squares(optimizer)
    optimizer.radius.step(0.0)
    optimizer.param_groups[1]["epsilon"] = optimizer.param_groups[0]["epsilon"]
    for _ in range(20):
        step_on_squares(optimizer)  # one ball has one radius: else this is an error
        optimizer.radius.step(0.0)
    least = [0.001, 0.001 if ball == "global" else 0.1 * 2 / 3 / 100]
    assert [group["epsilon"] for group in optimizer.param_groups] == pytest.approx(least)


def test_a_radius_below_the_least_one_does_not_grow_where_it_should_shrink() -> None:
    bowl = Bowl(0.5)
    bowl.optimizer.param_groups[0]["epsilon"] = 0.002
    bowl.steps()
    bowl.radius.step(0.0)
    assert bowl.epsilon == 0.002


def test_a_radius_that_is_switched_off_after_a_schedule_stays_off() -> None:
    bowl = Bowl("auto")
    scheduler = flatmin.RadiusScheduler(bowl.optimizer, total_steps=2)
    for _ in range(2):
        bowl.steps(1)
        scheduler.step()
    bowl.optimizer.param_groups[0]["epsilon"] = 0.0
    with pytest.raises(ValueError, match="that is adjusted must be above 0, got 0 in all groups"):
        bowl.radius.step(3.0)
    assert bowl.epsilon == 0.0
