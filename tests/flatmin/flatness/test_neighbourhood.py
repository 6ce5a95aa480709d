"""The adaptive ball: rescaled layers change nothing in it, and what is known of quadratic functions is found in it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatmin
from flatmin import flatness
from flatmin.flatness.neighbourhood import Neighbourhood
from flatmin.flatness.weights import Weights
from tests.support.flatness_cases import CASES, Case, Quadratic, flat, itself, symmetric

MEASURES: dict[str, Any] = {
    "worst": lambda model, loss, **kind: flatness.worst_case_loss(model, loss, steps=6, restarts=2, **kind).loss,
    "mean": lambda model, loss, **kind: flatness.mean_loss(model, loss, samples=6, **kind).mean,
    "sharpness": flatness.sharpness,
}
every_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def relu_network(c: float = 1.0, *, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same function for every c: the first layer times c, the second one's weights over c."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    first, second = model[0], model[2]
    with torch.no_grad():
        first.weight.mul_(c)  # type: ignore[operator]
        first.bias.mul_(c)  # type: ignore[operator]
        second.weight.div_(c)  # type: ignore[operator]
    return model


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (20,), generator=generator)


@every_measure
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("c", [1 / 64, 64.0])
def test_rescaled_layers_change_no_bit_of_it(measure: Any, c: float, dtype: torch.dtype) -> None:
    """A power of two, which rounds nothing; the plain ball holds other functions."""
    loss = flatness.empirical_risk(*data(dtype))
    one, other = relu_network(dtype=dtype), relu_network(c, dtype=dtype)
    assert torch.equal(one(data(dtype)[0]), other(data(dtype)[0]))
    found = [measure(model, loss, epsilon=0.7, adaptive=True) for model in (one, other)]
    assert torch.equal(*found)
    plain = [measure(model, loss, epsilon=0.7).item() for model in (one, other)]
    assert plain[0] != pytest.approx(plain[1], rel=0.02)


@pytest.mark.parametrize("norm", flatmin.ball.NORMS)
@pytest.mark.parametrize("ball", flatmin.ball.BALLS)
def test_rescaled_layers_change_nothing_in_any_kind_of_ball(ball: Any, norm: Any) -> None:
    loss = flatness.empirical_risk(*data())
    kind: dict[str, Any] = {"epsilon": 0.3, "ball": ball, "norm": norm, "adaptive": True}
    for measure in (MEASURES["worst"], MEASURES["mean"]):
        found = [measure(relu_network(c), loss, **kind).item() for c in (1.0, 3.0, 0.1)]
        assert found == pytest.approx([found[0]] * 3, rel=1e-9)


def quadratic(seed: int, dimensions: int = 4) -> tuple[Quadratic, Tensor]:
    """A minimum at weights of various sizes, and T H T, whose largest eigenvalue is that of H v = λ T⁻² v."""
    generator = torch.Generator().manual_seed(seed)
    h = symmetric((5 * torch.rand(dimensions, generator=generator)).tolist(), seed)
    theta = 3 * torch.randn(dimensions, generator=generator, dtype=torch.float64)
    return Quadratic(h, -(h @ theta), theta), theta.abs()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_the_worst_case_of_a_quadratic_is_a_generalised_eigenvalue(seed: int, eta: float) -> None:
    linalg = pytest.importorskip("scipy.linalg", reason="an oracle, installed with flatmin[dev]")
    model, size = quadratic(seed)
    scale = size + eta
    found = flatness.worst_case_loss(model, itself, epsilon=0.4, steps=100, adaptive=True, eta=eta)
    top = linalg.eigh(model.h.numpy(), torch.diag(scale**-2).numpy(), eigvals_only=True)[-1]
    assert found.rise.item() == pytest.approx(top * 0.16 / 2, rel=1e-4)
    assert found.rise.item() <= top * 0.16 / 2 * (1 + 1e-9)
    assert (flat(found.delta) / scale).norm().item() <= 0.4 * (1 + 1e-9)


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_the_mean_of_a_quadratic_is_a_trace(eta: float) -> None:
    """E ½ΔᵀHΔ = ε² tr(T H T) / (2(d + 2))."""
    model, size = quadratic(0)
    scale = size + eta
    found = flatness.mean_loss(model, itself, epsilon=0.4, samples=1500, adaptive=True, eta=eta)
    expected = 0.16 * (model.h.diagonal() * scale**2).sum().item() / (2 * 6)
    deviation = found.deviation.item() / 1500**0.5
    assert found.mean.item() - itself(model).item() == pytest.approx(expected, abs=4 * deviation)


def test_the_step_along_the_gradient_is_that_of_asam(case: Case) -> None:
    """Δ = ε T² ∇L / ‖T ∇L‖ (Kwon et al. 2021, equation 4), from the flat weights."""
    theta = case.theta().requires_grad_()
    (gradient,) = torch.autograd.grad(case.at(theta), theta)
    scale = theta.detach().abs() + 0.01
    delta = 0.3 * scale**2 * gradient / (scale * gradient).norm()
    expected = case.at(theta.detach() + delta) - case.at(theta.detach())
    found = flatness.sharpness(case.model, case.loss, epsilon=0.3, adaptive=True, eta=0.01)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)


@every_measure
def test_around_weights_of_size_one_it_is_the_plain_ball(case: Case, measure: Any) -> None:
    with torch.no_grad():
        for p in case.model.parameters():
            p.copy_(torch.where(p < 0, -1.0, 1.0))
    plain, adaptive = (measure(case.model, case.loss, epsilon=0.2, adaptive=flag) for flag in (False, True))
    assert torch.equal(plain, adaptive)


@every_measure
def test_a_large_eta_makes_it_a_plain_ball(case: Case, measure: Any) -> None:
    plain = measure(case.model, case.loss, epsilon=0.2)
    found = measure(case.model, case.loss, epsilon=0.2e-8, adaptive=True, eta=1e8)
    assert found.item() == pytest.approx(plain.item(), rel=1e-5)


def test_a_weight_of_zero_does_not_move_and_does_not_count() -> None:
    """As if it were not among the parameters, to the last bit; with η it moves."""
    model, loss = relu_network(), flatness.empirical_risk(*data())
    with torch.no_grad():
        model[2].bias.zero_()  # type: ignore[operator]
        model[0].weight[1].zero_()  # type: ignore[index]
    zero = [p.detach() == 0 for p in model.parameters()]
    found = flatness.worst_case_loss(model, loss, epsilon=0.5, adaptive=True)
    assert not any(bool(d[where].any()) for d, where in zip(found.delta, zero, strict=True))
    others = [p for p in model.parameters() if p is not model[2].bias]
    for measure in MEASURES.values():
        whole, part = (measure(model, loss, epsilon=0.5, adaptive=True, parameters=own) for own in (None, others))
        assert torch.equal(whole, part)
    moved = flatness.worst_case_loss(model, loss, epsilon=0.5, adaptive=True, eta=0.1)
    assert all(bool(d[where].any()) for d, where in zip(moved.delta, zero, strict=True) if where.any())


def test_points_are_uniform_where_some_weights_cannot_move() -> None:
    """Three weights, one of them 0: in the plane of the others, the mean squared radius is ε² · 2/(2 + 2)."""
    model = Quadratic(torch.eye(3, dtype=torch.float64), theta=torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64))
    weights = Weights(model)
    around = Neighbourhood.around(weights, 0.6, adaptive=True)
    generator, squares = torch.Generator().manual_seed(0), []
    for _ in range(1000):
        point = weights.zeros()
        around.draw_(point, generator)
        assert point[0][1] == 0
        squares.append(point[0].square().sum())
    assert torch.stack(squares).mean().item() == pytest.approx(0.36 / 2, rel=0.05)
    assert torch.stack(squares).max() <= 0.36


def test_where_all_weights_are_zero_nothing_moves() -> None:
    layer, (x, y) = nn.Linear(3, 3).double(), data()
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    loss = flatness.empirical_risk(x, y)
    assert flatness.worst_case_loss(layer, loss, epsilon=1.0, adaptive=True).rise.item() == 0
    assert flatness.mean_loss(layer, loss, epsilon=1.0, adaptive=True).deviation.item() == 0
    assert flatness.sharpness(layer, loss, epsilon=1.0, adaptive=True).item() == 0


def test_the_worst_case_grows_with_the_radius_and_is_never_below_the_centre(case: Case) -> None:
    found = [
        flatness.worst_case_loss(case.model, case.loss, epsilon=epsilon, restarts=1, adaptive=True)
        for epsilon in (0.0, 0.1, 0.3, 1.0, 2.0)
    ]
    assert all(one.loss >= one.centre for one in found)
    losses = [one.loss.item() for one in found]
    assert losses == sorted(losses)
    assert losses[0] == found[0].centre.item()


@pytest.mark.parametrize("norm", flatmin.ball.NORMS)
@pytest.mark.parametrize("ball", flatmin.ball.BALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_worst_case_is_in_its_ball_in_every_precision(ball: Any, norm: Any, dtype: torch.dtype) -> None:
    case = Case("convolutional", dtype=dtype)
    sizes = [p.detach().float().abs() for p in case.model.parameters()]
    kind: dict[str, Any] = {"epsilon": 0.4, "ball": ball, "norm": norm, "adaptive": True}
    found = flatness.worst_case_loss(case.model, case.loss, steps=4, restarts=1, **kind)
    relative = [torch.where(t > 0, d / t, 0.0) for d, t in zip(found.delta, sizes, strict=True)]
    lengths = flatmin.ball.norms(relative, norm=norm)
    radius = lengths.max() if ball == "tensor" else flatmin.ball.combine(lengths, norm=norm)
    assert 0 < radius.item() <= 0.4 * (1 + 1e-6)
    named = dict(case.model.named_parameters())
    moved = {name: (p + d.to(dtype)) for (name, p), d in zip(named.items(), found.delta, strict=True)}
    again = torch.func.functional_call(case.model.eval(), moved, (case.x,))
    assert found.loss.item() == pytest.approx(cross_entropy(again, case.y).item(), rel=0.02)


def test_it_can_be_measured_in_inference_mode(case: Case) -> None:
    outside = flatness.worst_case_loss(case.model, case.loss, epsilon=0.3, steps=2, adaptive=True).loss.item()
    with torch.inference_mode():
        inside = flatness.worst_case_loss(case.model, case.loss, epsilon=0.3, steps=2, adaptive=True).loss.item()
    assert inside == outside


@pytest.mark.cuda
def test_a_gpu_finds_the_same() -> None:
    here, there = Case("convolutional"), Case("convolutional", device="cuda")
    for measure in MEASURES.values():
        found = [measure(one.model, one.loss, epsilon=0.5, adaptive=True, eta=0.01).item() for one in (here, there)]
        assert found[1] == pytest.approx(found[0], rel=1e-6)
