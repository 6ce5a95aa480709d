"""AMP is Algorithm 1: against a twin in plain loops, against someone else's SAM, and against the paper's theory."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import flatmin
from flatmin.ball import BALLS, NORMS, Ball, Norm
from tests.support.cases import MakeBase, Params, Setup, same, setup
from tests.support.plain_algorithm import Twin

INDICES = {"global": [[0, 1, 2, 3]], "group": [[0, 1], [2, 3]], "tensor": [[0], [1], [2], [3]]}


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("inner_iter", [1, 2, 3])
@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_a_hundred_steps_equal_the_twins(ball: Ball, norm: Norm, inner_iter: int, form: str) -> None:
    case, plain = setup(dtype=torch.float64), setup(dtype=torch.float64)
    twin = Twin(list(plain.model.parameters()), plain.loss, INDICES[ball])
    outer = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
    base = SGD([{"params": layer} for layer in case.layers()], **outer)  # type: ignore[arg-type]
    epsilon = 0.03 if norm == "l2" else 0.01
    optimizer = flatmin.AMP(base, epsilon=epsilon, inner_lr=0.1, inner_iter=inner_iter, ball=ball, norm=norm)
    touched = list[float]()
    for _ in range(100):
        if form == "closure":
            optimizer.step(case.closure(optimizer))
        else:
            case.step_in_blocks(optimizer)
        twin.step(epsilon=epsilon, zeta=0.1, n=inner_iter, norm=norm, **outer)
        touched.append(float(optimizer.last.on_ball))  # type: ignore[arg-type]
        for weight, expected in zip(case.weights(), plain.weights(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
    assert 0 < sum(touched) < 100  # both sides of the projection were seen


@pytest.mark.parametrize("inner_iter", [1, 2, 3])
@pytest.mark.parametrize("ball", BALLS)
def test_float32_follows_the_float64_twin(inner_iter: int, ball: Ball) -> None:
    case, plain = setup(), setup(dtype=torch.float64)
    twin = Twin(list(plain.model.parameters()), plain.loss, INDICES[ball])
    base = SGD([{"params": layer} for layer in case.layers()], lr=0.05)
    optimizer = flatmin.AMP(base, epsilon=0.05, inner_iter=inner_iter, ball=ball)
    for _ in range(20):
        optimizer.step(case.closure(optimizer))
        twin.step(epsilon=0.05, zeta=1.0, n=inner_iter, norm="l2", lr=0.05, momentum=0.0, weight_decay=0.0)
    for weight, expected in zip(case.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("model", ["mlp", "conv-batchnorm", "tied"])
def test_with_a_huge_rate_amp_is_sam(kind: str, model: str) -> None:
    """Δ is then always on the sphere, ε∇J/‖∇J‖, as SAM's. The oracle: pytorch_optimizer's SAM."""
    oracle = pytest.importorskip("pytorch_optimizer", reason="the oracle is installed with flatmin[dev]")
    ours, theirs = setup(model), setup(model)
    make, settings = {"sgd": (SGD, {"lr": 0.1, "momentum": 0.9}), "adamw": (AdamW, {"lr": 1e-2})}[kind]
    amp = flatmin.AMP(make(ours.model.parameters(), **settings), epsilon=0.05, inner_lr=1e6)
    sam = oracle.SAM(theirs.model.parameters(), make, rho=0.05, **settings)
    for _ in range(30):
        amp.step(ours.closure(amp))
        closure = theirs.closure(sam)
        closure()
        sam.step(closure)
        assert amp.last.on_ball == 1
    for weight, expected in zip(ours.weights(), theirs.weights(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


def test_with_a_huge_rate_delta_is_sams() -> None:
    """Δ itself, where both have moved the weights: AMP inside its block, the oracle after its first step."""
    oracle = pytest.importorskip("pytorch_optimizer", reason="the oracle is installed with flatmin[dev]")
    ours, theirs = setup("mlp"), setup("mlp")
    amp = flatmin.AMP(SGD(ours.model.parameters(), lr=0.1), epsilon=0.05, inner_lr=1e6)
    sam = oracle.SAM(theirs.model.parameters(), SGD, rho=0.05, lr=0.1)
    start = [weight.clone() for weight in ours.weights()]
    ours.closure(amp)()
    theirs.closure(sam)()
    sam.first_step()
    with amp.perturbed():
        found = [
            (p.detach() - s, q.detach() - s) for p, q, s in zip(ours.weights(), theirs.weights(), start, strict=True)
        ]
        ours.closure(amp)()
    for delta, expected in found:
        torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-6)
    length = torch.cat([delta.flatten() for delta, _ in found]).norm()
    torch.testing.assert_close(length, torch.tensor(0.05).to(length), rtol=1e-4, atol=0)


def test_both_forms_are_the_same_to_the_last_bit(model_name: str) -> None:
    for inner_iter in (1, 2, 3):
        first, second = setup(model_name), setup(model_name)
        settings = {"epsilon": 0.1, "inner_iter": inner_iter}
        with_closure = flatmin.AMP(SGD(first.model.parameters(), lr=0.1), model=first.model, **settings)  # type: ignore[arg-type]
        in_blocks = flatmin.AMP(SGD(second.model.parameters(), lr=0.1), model=second.model, **settings)  # type: ignore[arg-type]
        torch.manual_seed(1)
        for _ in range(3):
            with_closure.step(first.closure(with_closure))
        torch.manual_seed(1)
        for _ in range(3):
            second.step_in_blocks(in_blocks)
        assert same(first.weights(), second.weights())
        assert same(first.buffers(), second.buffers())


# ---- Theorem 2: a step of AMP is a step on J plus a penalty of its gradient's norm


class Smooth:
    """A small smooth network in float64, its loss as a function of one flat weight vector."""

    def __init__(self) -> None:
        self.case = setup(dtype=torch.float64)
        self.params = list(self.case.model.parameters())

    def flat(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    def penalised_gradient(self, penalty: Callable[[Tensor], Tensor]) -> Tensor:
        """∇(J + penalty(∇J)), exactly, by differentiating twice."""
        loss = self.case.loss()
        gradient = self.flat(torch.autograd.grad(loss, self.params, create_graph=True))
        return self.flat(torch.autograd.grad(loss + penalty(gradient), self.params))

    def amp_gradient(self, *, epsilon: float, inner_lr: float) -> Tensor:
        """What AMP hands to its base: the step of plain SGD with learning rate 1."""
        optimizer = flatmin.AMP(SGD(self.params, lr=1.0), epsilon=epsilon, inner_lr=inner_lr)
        theta = [param.detach().clone() for param in self.params]
        optimizer.step(self.case.closure(optimizer))
        step = self.flat(theta) - self.flat([param.detach() for param in self.params])
        with torch.no_grad():
            for param, value in zip(self.params, theta, strict=True):
                param.copy_(value)
        return step


def slope(sizes: list[float], errors: list[float]) -> float:
    """The power with which the error falls: the least-squares slope of log error over log size."""
    x, y = torch.tensor(sizes).log(), torch.tensor(errors, dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


RATES = [2.0**-k for k in range(6, 12)]


@pytest.mark.parametrize(
    ("factor", "power"),
    [
        pytest.param(0.5, 2, id="half-of-what-is-printed"),
        pytest.param(1.0, 1, id="as-printed"),
    ],
)
def test_inside_the_ball_a_step_penalises_the_squared_gradient_norm(factor: float, power: int) -> None:
    """∇J(θ + ζ∇J) = ∇J + ζH∇J + O(ζ²), and H∇J = ∇(½‖∇J‖²): the paper's Theorem 2 lacks the ½ in its first case."""
    net = Smooth()
    errors = []
    for zeta in RATES:
        expected = net.penalised_gradient(lambda g, zeta=zeta: factor * zeta * g.square().sum())  # type: ignore[misc]
        errors.append(float((net.amp_gradient(epsilon=1e3, inner_lr=zeta) - expected).norm()))
    assert slope(RATES, errors) == pytest.approx(power, abs=0.1)


def test_on_the_sphere_a_step_penalises_the_gradient_norm() -> None:
    """∇J(θ + ε∇J/‖∇J‖) = ∇(J + ε‖∇J‖) + O(ε²), with ζ‖∇J‖ > ε all the while."""
    net = Smooth()
    errors = []
    for epsilon in RATES:
        expected = net.penalised_gradient(lambda g, epsilon=epsilon: epsilon * g.norm())  # type: ignore[misc]
        errors.append(float((net.amp_gradient(epsilon=epsilon, inner_lr=1e3) - expected).norm()))
    assert slope(RATES, errors) == pytest.approx(2, abs=0.1)


# ---- Appendix C: the scalar example


def kink(z: Tensor) -> Tensor:
    return torch.where(z >= 0, z, -2 * z)


@pytest.mark.parametrize("epsilon", [0.03, 0.3, 3.0])
def test_the_exact_amp_loss_of_the_scalar_example_is_least_at_a_third_of_epsilon(epsilon: float) -> None:
    points = torch.linspace(-2 * epsilon, 2 * epsilon, 2401, dtype=torch.float64)
    delta = torch.linspace(-epsilon, epsilon, 1201, dtype=torch.float64)
    worst = kink(points[:, None] + delta).amax(dim=1)
    assert points[worst.argmin()] == pytest.approx(epsilon / 3, abs=0.01 * epsilon)


@pytest.mark.parametrize("start", [-1.0, -0.01, 0.013, 1.0])
@pytest.mark.parametrize("inner_iter", [1, 3])
def test_algorithm_1_never_crosses_the_kink_and_ends_within_a_step_of_zero(start: float, inner_iter: int) -> None:
    """Ascent walks away from the kink, so it never meets the worse slope beyond it: not ε/3 but 0 is where it ends."""
    theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = flatmin.AMP(SGD([theta], lr=0.01), epsilon=0.3, inner_iter=inner_iter)
    signs = list[tuple[float, float]]()
    for _ in range(150):  # a hundred to come there from 1, and some to stay
        centre = float(theta.detach())

        def closure(centre: float = centre) -> Tensor:
            optimizer.zero_grad()
            signs.append((math.copysign(1, centre), math.copysign(1, float(theta.detach()))))
            loss = kink(theta)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert all(at_theta == at_perturbed for at_theta, at_perturbed in signs)
    assert -0.01 <= float(theta.detach()) <= 0.02  # a step is 0.01 from the right, 0.02 from the left


class Upwards(Optimizer):
    """As pytorch_optimizer's with maximize=True: it says so in an attribute, not in its groups."""

    maximize = True

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=group["lr"])


MAXIMISING: dict[str, tuple[MakeBase, MakeBase]] = {
    "in its groups": (
        lambda params: SGD(params, lr=0.1, momentum=0.9),
        lambda params: SGD(params, lr=0.1, momentum=0.9, maximize=True),
    ),
    "in an attribute": (lambda params: SGD(params, lr=0.1), Upwards),
}


@pytest.mark.parametrize("where", MAXIMISING)
@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_a_base_that_maximises_is_one_that_minimises_the_negative(inner_iter: int, norm: Norm, where: str) -> None:
    weights = []
    for sign, make in zip((1, -1), MAXIMISING[where], strict=True):
        case = setup()
        base = make(case.model.parameters())
        optimizer = flatmin.AMP(base, epsilon=0.1, inner_iter=inner_iter, norm=norm)

        def closure(case: Setup = case, optimizer: flatmin.AMP = optimizer, sign: int = sign) -> Tensor:
            optimizer.zero_grad()
            loss = sign * case.loss()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        weights.append(case.weights())
    assert same(*weights)
