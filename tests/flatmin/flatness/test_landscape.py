"""Lines and planes through the weights: the loss at each point, by brute force, and what scaling by filter is for."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatmin
from flatmin import flatness
from flatmin.flatness.risk import parts_of
from tests.support.flatness_cases import CASES, DEVICES, Case, flat


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_a_line_is_the_loss_at_each_point(case: Case) -> None:
    (direction,) = flatness.directions(case.model)
    found = flatness.line(case.model, case.loss, direction=direction)
    theta, d = case.theta(), flat(direction)
    for alpha, loss in zip(found.alphas, found.losses, strict=True):
        assert loss.item() == pytest.approx(case.at(theta + alpha * d).item(), rel=1e-12)
    assert (len(found.alphas), found.alphas[0].item(), found.alphas[-1].item()) == (41, -1, 1)


def test_a_plane_is_the_loss_at_each_point_and_its_axes_are_lines(case: Case) -> None:
    first, second = flatness.directions(case.model, number=2)
    xs, ys = torch.linspace(-1, 1, 5), torch.tensor([-0.3, 0.0, 0.7])
    found = flatness.plane(case.model, case.loss, xs=xs, ys=ys, along=(first, second))
    theta = case.theta()
    assert found.losses.shape == (3, 5)
    for i, y in enumerate(found.ys):
        for j, x in enumerate(found.xs):
            expected = case.at(theta + x * flat(first) + y * flat(second)).item()
            assert found.losses[i, j].item() == pytest.approx(expected, rel=1e-12)
    along = flatness.line(case.model, case.loss, alphas=xs, direction=first)
    assert torch.equal(found.losses[1], along.losses)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_the_centre_is_the_loss_itself_bit_for_bit(name: str, device: str) -> None:
    case = Case(name, dtype=torch.float32, device=device)
    with torch.no_grad(), flatmin.core.model_state.eval_mode(case.model):
        centre = sum(part(case.model) for part in parts_of(case.loss))
    plane = flatness.plane(case.model, case.loss, xs=torch.tensor([-1.0, 0.0]), ys=torch.tensor([0.0]))
    assert torch.equal(plane.losses[0, 1], torch.as_tensor(centre))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_points_together_are_the_points_alone(name: str, device: str) -> None:
    case = Case(name, device=device)
    points = torch.linspace(-1, 1, 5)
    alone = flatness.plane(case.model, case.loss, xs=points, ys=points)
    for at_once in (2, 7, 100):
        together = flatness.plane(case.model, case.loss, xs=points, ys=points, at_once=at_once)
        assert torch.allclose(alone.losses, together.losses, rtol=1e-12)


def test_where_memory_is_short_fewer_points_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("mlp")
    tried: list[int] = []
    real = flatness.landscape._together

    def short(weights: Any, parts: Any, chunk: list[Any], along: Any) -> Tensor:
        tried.append(len(chunk))
        if len(chunk) > 3:
            raise torch.OutOfMemoryError("no room")
        return real(weights, parts, chunk, along)

    monkeypatch.setattr(flatness.landscape, "_together", short)
    points = torch.linspace(-1, 1, 9)
    found = flatness.line(case.model, case.loss, alphas=points, at_once=8)
    assert tried[:3] == [8, 4, 2]
    assert torch.allclose(found.losses, flatness.line(case.model, case.loss, alphas=points).losses)


def test_each_filter_of_a_direction_is_as_long_as_the_models() -> None:
    model = Case("convolutional").model
    first, second = flatness.directions(model, number=2)
    for p, one, other in zip(model.parameters(), first, second, strict=True):
        if p.ndim == 1:
            assert not one.any()
            continue
        for i in range(len(p)):
            assert one[i].norm().item() == pytest.approx(p[i].norm().item(), rel=1e-6)
        assert not torch.allclose(one, other)
    (scaled,) = flatness.directions(model, vectors="scaled")
    for p, d in zip(model.parameters(), scaled, strict=True):
        if p.ndim == 1:
            assert torch.equal(d.abs(), p.detach().abs())


def test_a_network_that_computes_the_same_has_the_same_landscape() -> None:
    """The reason for scaling by filter: a filter doubled, and BatchNorm's statistics with it, changes nothing."""
    case = Case("convolutional")
    twin = copy.deepcopy(case.model)
    factors = torch.tensor([2.0, 0.25, 10.0], dtype=torch.float64)
    with torch.no_grad():
        twin[0].weight.mul_(factors.view(3, 1, 1, 1))
        twin[1].running_mean.mul_(factors)
        twin[1].running_var.copy_((twin[1].running_var + twin[1].eps) * factors**2 - twin[1].eps)
    one, other = (flatness.plane(model, case.loss).losses for model in (case.model, twin))
    assert torch.allclose(one, other, rtol=1e-9)


def test_the_same_seed_gives_the_same_directions_and_leaves_the_global_one_alone() -> None:
    case = Case("mlp")
    before = torch.get_rng_state()
    one, other = flatness.line(case.model, case.loss), flatness.line(case.model, case.loss)
    flatness.worst_case_loss(case.model, case.loss, epsilon=0.1)
    flatness.trace(case.model, case.loss)
    assert torch.equal(one.losses, other.losses)
    third = flatness.line(case.model, case.loss, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(one.losses, third.losses)
    assert torch.equal(before, torch.get_rng_state())


class Referring(nn.Module):
    """Keeps a second reference to its weight, and computes with that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0].T


def test_a_model_or_loss_that_goes_around_the_weights_it_is_given_is_looked_at_point_by_point() -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(8, 3), torch.randint(0, 3, (8,)), Referring()
    plain = nn.Linear(3, 3)
    cases: list[tuple[nn.Module, flatness.Loss]] = [
        (model, flatness.empirical_risk(x, y)),
        (plain, lambda _: cross_entropy(plain(x), y)),
        (plain, lambda given: cross_entropy(given(x), y) + sum(p.square().sum() for p in plain.parameters())),
        (plain, lambda given: cross_entropy(given(x), y) + given.weight.square().sum()),  # type: ignore[attr-defined]
    ]
    for here, loss in cases:
        for alphas in (None, torch.linspace(0, 1, 5)):  # the first point may be θ itself, where all agree
            alone, together = (flatness.line(here, loss, alphas=alphas, at_once=n).losses for n in (1, 8))
            assert torch.allclose(alone, together)
            assert alone.std() > 0.01


def test_half_precision_weights_move_alike_alone_and_together() -> None:
    case = Case("mlp", dtype=torch.bfloat16)
    alone, together = (flatness.line(case.model, case.loss, at_once=at_once).losses for at_once in (1, 8))
    assert torch.allclose(alone.float(), together.float(), rtol=0.03)
