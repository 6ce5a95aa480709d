"""The worst and the mean loss in a ball around the weights, against what is known of quadratic functions and of AMP."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatmin
from flatmin import flatness
from flatmin.flatness.risk import parts_of
from tests.support.flatness_cases import CASES, Case, Quadratic, flat, itself, symmetric


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.mark.parametrize("seed", range(20))
def test_the_worst_case_of_a_quadratic_is_found(seed: int) -> None:
    """Against a fine circle in two dimensions: the maximum of a convex function lies on the edge."""
    generator = torch.Generator().manual_seed(seed)
    h = symmetric([float(4 * torch.rand((), generator=generator)), 1.0], seed)
    g = torch.randn(2, generator=generator, dtype=torch.float64) * (seed % 3)
    model = Quadratic(h, g)
    turn = torch.linspace(0, 2 * torch.pi, 20001, dtype=torch.float64)
    edge = 0.7 * torch.stack([turn.cos(), turn.sin()], dim=1)
    best = ((edge @ h) * edge).sum(dim=1) / 2 + edge @ g
    found = flatness.worst_case_loss(model, itself, epsilon=0.7, steps=60)
    assert found.loss.item() == pytest.approx(best.max().item(), rel=1e-3)
    assert found.loss.item() <= best.max().item() * (1 + 1e-6) + 1e-9
    assert flat(found.delta).norm().item() <= 0.7 * (1 + 1e-6)


def test_at_a_minimum_the_gradient_finds_nothing_and_the_restarts_do() -> None:
    model = Quadratic(symmetric([8.0, 1.0, 0.5]))
    found = flatness.worst_case_loss(model, itself, epsilon=0.5, steps=60)
    assert found.starts[0].item() == found.centre.item() == 0
    assert found.loss.item() == pytest.approx(8 * 0.25 / 2, rel=1e-3)
    assert len(found.starts) == 5
    assert found.loss.item() == found.starts.max().item()
    alone = flatness.worst_case_loss(model, itself, epsilon=0.5, restarts=0)
    assert alone.loss.item() == 0


@pytest.mark.parametrize("norm", flatmin.ball.NORMS)
@pytest.mark.parametrize("ball", flatmin.ball.BALLS)
def test_the_worst_case_is_in_its_ball_and_at_least_the_mean(case: Case, ball: Any, norm: Any) -> None:
    settings: dict[str, Any] = {"epsilon": 0.3, "ball": ball, "norm": norm}
    found = flatness.worst_case_loss(case.model, case.loss, steps=10, restarts=2, **settings)
    lengths = flatmin.ball.norms(found.delta, norm=norm)
    radius = lengths.max() if ball == "tensor" else flatmin.ball.combine(lengths, norm=norm)
    assert radius.item() <= 0.3 * (1 + 1e-6)
    assert found.loss.item() == pytest.approx(case.at(case.theta() + flat(found.delta)).item(), rel=1e-9)
    assert found.rise > 0
    assert found.loss >= found.starts.max()
    assert found.loss > flatness.mean_loss(case.model, case.loss, **settings).losses.max()


def test_more_restarts_never_find_less(case: Case) -> None:
    found = [flatness.worst_case_loss(case.model, case.loss, epsilon=0.5, restarts=n, steps=5) for n in (0, 1, 3)]
    assert found[0].loss <= found[1].loss <= found[2].loss
    assert torch.equal(found[2].starts[:2], found[1].starts)


def test_the_mean_loss_of_a_quadratic_is_its_trace() -> None:
    """Over the ball of radius ε in d dimensions, E ½ΔᵀHΔ = ε²·tr H / (2(d + 2))."""
    model = Quadratic(symmetric([5.0, 1.0, 0.0, 2.0]))
    found = flatness.mean_loss(model, itself, epsilon=2.0, samples=4000)
    assert found.mean.item() == pytest.approx(4 * 8 / (2 * 6), abs=4 * found.deviation.item() / 4000**0.5)
    assert len(found.losses) == 4000


def test_sharpness_is_what_amp_sees_at_the_edge_of_its_ball(case: Case) -> None:
    case.model.eval()
    optimizer = flatmin.AMP(torch.optim.SGD(case.model.parameters(), lr=0.0), epsilon=0.2, inner_lr=1e9)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(case.model(case.x), case.y)
        loss.backward()
        return loss

    optimizer.step(closure)
    last = optimizer.last
    assert last.loss is not None
    assert last.loss_perturbed is not None
    assert last.grad_norm is not None
    rise = flatness.sharpness(case.model, case.loss, epsilon=0.2)
    assert rise.item() == pytest.approx((last.loss_perturbed - last.loss).item(), rel=1e-6)
    assert flatness.gradient_norm(case.model, case.loss).item() == pytest.approx(last.grad_norm.item(), rel=1e-9)


def test_radius_zero_is_the_centre(case: Case) -> None:
    found = flatness.worst_case_loss(case.model, case.loss, epsilon=0.0, restarts=1)
    assert torch.equal(found.loss, found.centre)
    assert flatness.sharpness(case.model, case.loss, epsilon=0.0).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("norm", flatmin.ball.NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_worst_case_is_a_lower_bound_in_every_precision(dtype: torch.dtype, norm: Any) -> None:
    """Of a linear loss the maximum is known, and the loss may not be higher: not by rounding of the weights either."""
    torch.manual_seed(0)
    slope = torch.randn(1000, dtype=torch.float64)
    model = nn.Linear(1000, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)

    def loss(_: Any) -> Tensor:
        return (model.weight.double() * slope).sum()

    found = flatness.worst_case_loss(model, loss, epsilon=0.25, norm=norm, steps=3, restarts=1)
    highest = 0.25 * (slope.norm() if norm == "l2" else slope.abs().sum())
    assert 0 <= found.rise.item() <= highest.item() * (1 + 1e-9)
    moved = (model.weight + found.delta[0].to(dtype)).double()
    assert (moved * slope).sum().item() == pytest.approx(found.loss.item(), rel=1e-6)


@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_the_worst_case_of_a_gaussian_surface_is_its_amp_loss(dimensions: int) -> None:
    generator = torch.Generator().manual_seed(0)
    kappa = symmetric((0.5 + torch.rand(dimensions, generator=generator)).tolist(), dimensions)
    surface = flatmin.theory.GaussianSurface(torch.zeros(dimensions), (kappa + kappa.T) / 2, 1.0, 1.0)
    model = nn.Linear(dimensions, 1, bias=False).double()
    theta = model.weight.detach().reshape(-1).clone()
    found = flatness.worst_case_loss(model, lambda _: surface.value(model.weight.reshape(-1)), epsilon=0.4, steps=200)
    assert found.loss.item() == pytest.approx(surface.amp_loss(theta, 0.4).item(), rel=1e-4)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + torch.randn(len(x), 3)
        return found


def test_a_model_that_draws_in_eval_mode_draws_the_same_at_every_point() -> None:
    torch.manual_seed(0)
    model = Noisy()
    loss = flatness.empirical_risk(torch.randn(6, 3), torch.randint(0, 3, (6,)), batch_size=2)
    before = torch.get_rng_state()
    assert flatness.worst_case_loss(model, loss, epsilon=0.0).rise.item() == 0
    assert torch.equal(*(flatness.top_eigenvalues(model, loss).values for _ in range(2)))
    assert torch.equal(before, torch.get_rng_state())


def test_hooks_on_parameters_have_no_part_in_the_gradient(case: Case) -> None:
    norm, curved = flatness.gradient_norm(case.model, case.loss), flatness.trace(case.model, case.loss).value
    handles = [p.register_hook(lambda g: g * 0.1) for p in case.model.parameters()]
    assert flatness.gradient_norm(case.model, case.loss).item() == pytest.approx(norm.item())
    assert flatness.trace(case.model, case.loss).value.item() == pytest.approx(curved.item())
    cross_entropy(case.model.eval()(case.x), case.y).backward()
    grads = [p.grad for p in case.model.parameters() if p.grad is not None]
    assert flatmin.ball.combine(flatmin.ball.norms(grads)).item() == pytest.approx(0.1 * norm.item())  # they are back
    for handle in handles:
        handle.remove()


def test_everything_can_be_called_in_inference_mode(case: Case) -> None:
    outside = flatness.mean_loss(case.model, case.loss, epsilon=0.1).mean.item()
    with torch.inference_mode():
        assert flatness.mean_loss(case.model, case.loss, epsilon=0.1).mean.item() == outside
        flatness.worst_case_loss(case.model, case.loss, epsilon=0.1, steps=2, restarts=1)
        flatness.top_eigenvalue(case.model, case.loss)


def test_points_differ_also_where_the_generator_given_is_the_one_the_model_draws_from(case: Case) -> None:
    torch.manual_seed(0)
    found = flatness.mean_loss(case.model, case.loss, epsilon=1.0, samples=4, generator=torch.default_generator)
    assert len(set(found.losses.tolist())) == 4
    again = flatness.mean_loss(case.model, case.loss, epsilon=1.0, samples=4, generator=torch.default_generator)
    assert not torch.equal(found.losses, again.losses)  # it has moved on


def test_a_part_of_the_loss_may_be_independent_of_the_weights_but_not_all_of_it(case: Case) -> None:
    def constant(_: Any) -> Tensor:
        return torch.ones((), dtype=torch.float64)

    parts = [*parts_of(case.loss), constant]
    for measure in (flatness.gradient_norm, flatness.top_eigenvalue):
        assert measure(case.model, parts).item() == pytest.approx(measure(case.model, case.loss).item(), rel=1e-9)
        with pytest.raises(ValueError, match="must depend on"):
            measure(case.model, [constant, constant])


def test_an_autocast_around_the_call_does_not_reach_the_algebra() -> None:
    case = Case("mlp", dtype=torch.float32)
    plain = flatness.top_eigenvalue(case.model, case.loss), flatness.trace(case.model, case.loss).value
    with torch.autocast("cpu", torch.bfloat16):
        inside = flatness.top_eigenvalue(case.model, case.loss), flatness.trace(case.model, case.loss).value
    assert torch.equal(torch.stack(plain), torch.stack(inside))


def test_a_loss_that_is_not_a_number_somewhere_does_not_hide_the_rest() -> None:
    model = Quadratic(symmetric([3.0, 1.0]))

    def loss(given: Any) -> Tensor:
        found = itself(given)
        return torch.where(found.detach() == 0, torch.nan, found)  # at the centre alone

    found = flatness.worst_case_loss(model, loss, epsilon=0.5)
    assert found.centre.isnan()
    assert found.loss.item() == pytest.approx(3 * 0.25 / 2, rel=1e-2)
