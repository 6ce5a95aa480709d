"""Landscapes, the loss in a ball, curvature: by brute force in float64, against the dense Hessian, and all put back."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss

import flatmin
from flatmin import flatness
from flatmin.flatness.hessian import hessian_products
from flatmin.flatness.risk import parts_of
from flatmin.flatness.weights import Weights

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 3)
    )


class Tied(nn.Module):
    """One weight in two places, dropout, and a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.drop(torch.sigmoid(self.inner(x))))
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "convolutional": (convolutional, (1, 3, 3)),
    "tied": (Tied, (3,)),
}


class Case:
    """A model in float64 (in train mode, so that it is seen to be evaluated in eval mode) and its data."""

    def __init__(self, name: str, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(seed)
        make, shape = CASES[name]
        self.model: Any = make().to(device, dtype)
        self.x = torch.randn(12, *shape, dtype=dtype).to(device)
        self.y = torch.randint(0, 3, (12,)).to(device)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                nn.init.uniform_(module.running_mean, -1, 1)
                nn.init.uniform_(module.running_var, 0.5, 2)
        self.loss = flatness.empirical_risk(self.x, self.y, batch_size=5)

    def at(self, theta: Tensor) -> Tensor:
        """L as a function of the flat weights, written down plainly."""
        named = dict(self.model.named_parameters())
        pieces = theta.split([p.numel() for p in named.values()])
        weights = {name: piece.view(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        twin = copy.deepcopy(self.model).eval()
        return cross_entropy(functional_call(twin, weights, (self.x,)), self.y)

    def theta(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def dense_hessian(self) -> Tensor:
        dense = hessian(self.at, self.theta())
        assert isinstance(dense, Tensor)
        return dense


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def flat(direction: list[Tensor]) -> Tensor:
    return torch.cat([d.reshape(-1) for d in direction])


# ---- curvature


def test_products_are_those_of_the_dense_hessian(case: Case) -> None:
    dense = case.dense_hessian()
    weights = Weights(case.model)
    v = torch.randn(len(dense), dtype=torch.float64)
    for loss in (case.loss, lambda model: cross_entropy(model(case.x), case.y)):
        with weights.movable(), hessian_products(weights, parts_of(loss)) as product:
            for _ in range(2):  # a kept graph serves again
                assert torch.allclose(product(v), dense @ v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_eigenvalues_are_those_of_the_dense_hessian(case: Case, seed: int) -> None:
    dense = torch.linalg.eigvalsh(case.dense_hessian()).flip(0)
    generator = torch.Generator().manual_seed(seed)
    for most in (len(dense) - 1, 1000):
        found = flatness.top_eigenvalues(
            case.model, case.loss, k=5, max_products=most, tolerance=1e-10, generator=generator
        )
        assert torch.allclose(found.values, dense[:5], rtol=1e-8, atol=1e-9)
    assert flatness.top_eigenvalue(case.model, case.loss).item() == pytest.approx(dense[0].item(), rel=1e-3)


def test_an_eigenvalue_lies_within_the_error_that_is_given(case: Case) -> None:
    dense = torch.linalg.eigvalsh(case.dense_hessian())
    for most in range(3, 12):
        found = flatness.top_eigenvalues(case.model, case.loss, k=3, max_products=most, tolerance=0.0)
        assert found.products == most
        for value, error in zip(found.values, found.errors, strict=True):
            assert (dense - value).abs().min() <= error + 1e-12


def test_the_vectors_are_eigenvectors(case: Case) -> None:
    dense = case.dense_hessian()
    found = flatness.top_eigenvalues(case.model, case.loss, k=2, max_products=1000)
    for value, vector in zip(found.values, found.vectors, strict=True):
        assert [d.shape for d in vector] == [p.shape for p in case.model.parameters()]
        v = flat(vector)
        assert v.norm().item() == pytest.approx(1, rel=1e-9)
        assert torch.allclose(dense @ v, value * v, atol=1e-8)


class Quadratic(nn.Module):
    """½ θᵀHθ + gᵀθ, whatever the input."""

    def __init__(self, h: Tensor, g: Tensor | None = None, theta: Tensor | None = None) -> None:
        super().__init__()
        self.h, self.g = h, torch.zeros(len(h), dtype=h.dtype) if g is None else g
        self.theta = nn.Parameter(torch.zeros(len(h), dtype=h.dtype) if theta is None else theta)

    def forward(self) -> Tensor:
        return self.theta @ self.h @ self.theta / 2 + self.g @ self.theta


def itself(model: Any) -> Tensor:
    found: Tensor = model()
    return found


def symmetric(eigenvalues: list[float], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    matrix: Tensor = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
    return matrix


@pytest.mark.parametrize(
    "eigenvalues",
    [[3, 3, 3, 1], [0, 0, 0], [-1, -2, -7, -7], [1e6, 1, 1e-6, -1e6], [5, 0, 0, 0, 0, 0]],
    ids=str,
)
def test_repeated_zero_and_negative_eigenvalues_are_found_as_often_as_they_occur(eigenvalues: list[float]) -> None:
    model = Quadratic(symmetric(eigenvalues))
    found = flatness.top_eigenvalues(model, itself, k=3)
    expected = torch.tensor(sorted(eigenvalues, reverse=True)[:3], dtype=torch.float64)
    assert torch.allclose(found.values, expected, rtol=1e-9, atol=1e-9)


def test_a_spectrum_of_few_values_ends_early() -> None:
    model = Quadratic(symmetric([9.0, 4.0, *[0.0] * 298]))
    found = flatness.top_eigenvalues(model, itself, k=2)
    assert found.products <= 4
    assert torch.allclose(found.values, torch.tensor([9.0, 4.0], dtype=torch.float64))


def test_a_loss_that_is_linear_has_no_curvature() -> None:
    layer = nn.Linear(4, 1)
    loss: flatness.Loss = lambda model: model(torch.ones(1, 4)).sum()  # noqa: E731
    assert flatness.top_eigenvalue(layer, loss).item() == 0
    assert flatness.trace(layer, loss).value.item() == 0


def test_the_trace_is_exact_where_the_products_reach(case: Case) -> None:
    dense = case.dense_hessian()
    found = flatness.trace(case.model, case.loss, products=1000)
    assert found.value.item() == pytest.approx(dense.trace().item(), rel=1e-10)
    assert (found.error.item(), found.products) == (0.0, len(dense))


def test_hutchpp_is_unbiased_and_its_error_honest(case: Case) -> None:
    true = case.dense_hessian().trace().item()
    drawn = [
        flatness.trace(case.model, case.loss, products=18, generator=torch.Generator().manual_seed(seed))
        for seed in range(60)
    ]
    values = torch.stack([found.value for found in drawn])
    off = [abs(found.value.item() - true) / max(found.error.item(), 1e-12) for found in drawn]
    assert abs(values.mean().item() - true) <= 4 * values.std().item() / 60**0.5 + 1e-12
    assert sum(ratio <= 3 for ratio in off) >= 50  # six samples: a t-distribution's tails


def test_hutchpp_is_exact_where_few_eigenvalues_are_not_zero() -> None:
    model = Quadratic(symmetric([5.0, 3.0, -1.0, *[0.0] * 97]))
    found = flatness.trace(model, itself, products=30)
    assert found.value.item() == pytest.approx(7, rel=1e-9)
    assert found.error.item() < 1e-9


@pytest.mark.parametrize("device", DEVICES)
def test_float32_comes_within_its_rounding(device: str) -> None:
    exact, rough = Case("convolutional"), Case("convolutional", dtype=torch.float32, device=device)
    rough.model.load_state_dict(exact.model.state_dict())
    rough.loss = flatness.empirical_risk(exact.x.float().to(device), exact.y.to(device))
    dense = torch.linalg.eigvalsh(exact.dense_hessian()).flip(0)
    found = flatness.top_eigenvalues(rough.model, rough.loss, k=3)
    assert torch.allclose(found.values.double().cpu(), dense[:3], rtol=1e-3, atol=1e-4)
    assert flatness.trace(rough.model, rough.loss).value.item() == pytest.approx(dense.sum().item(), rel=1e-3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.inside(x, x, x)
        out, _ = self.lstm(found)
        answer: Tensor = out[:, -1]
        return answer


def test_attention_and_recurrent_networks_have_a_hessian_too() -> None:
    torch.manual_seed(0)
    model, x, y = Attention().double(), torch.randn(5, 6, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    loss = flatness.empirical_risk(x, y)
    found = flatness.top_eigenvalue(model, loss, max_products=300, tolerance=1e-8)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    (vector,) = flatness.top_eigenvalues(model, loss, max_products=300, tolerance=1e-8).vectors
    h = 1e-4
    weights = Weights(model)
    with weights.movable():  # the second difference along the eigenvector, by hand
        losses = []
        for step in (-h, 0.0, h):
            weights.move([step * d for d in vector])
            losses.append(cross_entropy(model(x), y).item())
    assert (losses[0] - 2 * losses[1] + losses[2]) / h**2 == pytest.approx(found.item(), rel=1e-4)
    assert torch.equal(theta, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


# ---- landscapes


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
    with torch.no_grad(), flatmin.attacks.evaluating(case.model):
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


# ---- in the ball


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
    knobs: dict[str, Any] = {"epsilon": 0.3, "ball": ball, "norm": norm}
    found = flatness.worst_case_loss(case.model, case.loss, steps=10, restarts=2, **knobs)
    lengths = flatmin.ball.norms(found.delta, norm=norm)
    radius = lengths.max() if ball == "tensor" else flatmin.ball.combine(lengths, norm=norm)
    assert radius.item() <= 0.3 * (1 + 1e-6)
    assert found.loss.item() == pytest.approx(case.at(case.theta() + flat(found.delta)).item(), rel=1e-9)
    assert found.rise > 0
    assert found.loss >= found.starts.max()
    assert found.loss > flatness.mean_loss(case.model, case.loss, **knobs).losses.max()


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


# ---- left as it was

LOOKS: dict[str, Callable[[nn.Module, flatness.Loss], object]] = {
    "line": flatness.line,
    "plane": lambda model, loss: flatness.plane(model, loss, xs=torch.ones(3), ys=torch.ones(2)),
    "together": lambda model, loss: flatness.line(model, loss, at_once=4),
    "worst_case_loss": lambda model, loss: flatness.worst_case_loss(model, loss, epsilon=0.1, steps=2),
    "mean_loss": lambda model, loss: flatness.mean_loss(model, loss, epsilon=0.1),
    "sharpness": lambda model, loss: flatness.sharpness(model, loss, epsilon=0.1),
    "gradient_norm": flatness.gradient_norm,
    "top_eigenvalues": lambda model, loss: flatness.top_eigenvalues(model, loss, k=2, max_products=5),
    "trace": lambda model, loss: flatness.trace(model, loss, products=6),
}


def everything(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        found[f"{name}: grad"] = None if p.grad is None else p.grad.clone()
        found[f"{name}: place"] = (p.data_ptr(), p.requires_grad)
    for name, module in model.named_modules():
        found[f"{name}: mode"] = module.training
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


class Broken(BaseException):
    """Not an Exception: as Ctrl-C is not."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("breaks", [None, 0, 1, 4])
@pytest.mark.parametrize("look", LOOKS)
def test_the_model_is_left_bit_for_bit_as_it_was(
    look: str, breaks: int | None, dtype: torch.dtype, device: str
) -> None:
    case = Case("convolutional", dtype=dtype, device=device)
    model = case.model
    model[1].eval()  # modes that differ
    cross_entropy(model(case.x), case.y).backward()
    before = everything(model)
    calls = [0]

    def loss(model: Any) -> Tensor:
        calls[0] += 1
        if breaks is not None and calls[0] > breaks:
            raise Broken
        return cross_entropy(model(case.x), case.y)

    try:
        LOOKS[look](model, loss)
    except Broken:
        assert breaks is not None
    assert_same(before, everything(model))


class Counting(nn.Module):
    """Changes a buffer in eval mode as well."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize("look", [name for name in LOOKS if name != "together"])
def test_buffers_are_put_back_too(look: str) -> None:
    model = Counting()
    LOOKS[look](model, flatness.empirical_risk(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])))
    assert model.calls.item() == 0


def test_a_compiled_model_is_looked_at_as_the_plain_one() -> None:
    case = Case("mlp", dtype=torch.float32)
    compiled: Any = torch.compile(case.model, backend="eager")
    one = flatness.line(case.model, case.loss)
    other = flatness.line(compiled, case.loss)
    assert torch.allclose(one.losses, other.losses)


def test_only_the_parameters_given_move() -> None:
    case = Case("mlp")
    last = list(case.model.parameters())[-2:]
    norm = flatness.gradient_norm(case.model, case.loss, parameters=last)
    assert norm < flatness.gradient_norm(case.model, case.loss)
    case.model[0].requires_grad_(False)
    assert len(flatness.directions(case.model)[0]) == 4


def test_a_regression_can_be_looked_at_as_well() -> None:
    layer = nn.Linear(2, 1)
    loss = flatness.empirical_risk(torch.randn(8, 2), torch.randn(8, 1), criterion=mse_loss)
    assert flatness.top_eigenvalue(layer, loss) > 0


# ---- bad input


look: Any = flatness  # what it is given here is of the wrong type


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda model, loss: look.line(model, 3), TypeError, "function of the model"),
        (lambda model, loss: look.line(model, []), TypeError, "function of the model"),
        (lambda model, loss: look.line(model, lambda _: 3.0), TypeError, "got float"),
        (lambda model, loss: look.line(model, lambda _: torch.zeros(2)), TypeError, r"shape \(2,\)"),
        (lambda model, loss: look.line(model, loss, alphas=torch.tensor([torch.nan])), ValueError, "finite"),
        (lambda model, loss: look.line(model, loss, alphas=torch.zeros(0)), ValueError, "finite"),
        (lambda model, loss: look.line(model, loss, direction=[torch.zeros(1)]), ValueError, "each parameter"),
        (lambda model, loss: look.line(model, loss, at_once=0), ValueError, "got 0"),
        (lambda model, loss: look.directions(model, vectors="none"), ValueError, "'none'"),
        (lambda model, loss: look.directions(model, number=0), ValueError, "got 0"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=-1.0), ValueError, r"got -1\.0"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=torch.nan), ValueError, "got nan"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=1.0, steps=0), ValueError, "got 0"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=1.0, ball="all"), ValueError, "all"),
        (lambda model, loss: look.mean_loss(model, loss, epsilon=1.0, samples=1), ValueError, "got 1"),
        (lambda model, loss: look.top_eigenvalues(model, loss, k=0), ValueError, "got 0"),
        (lambda model, loss: look.top_eigenvalues(model, loss, k=9, max_products=3), ValueError, "got 9 and 3"),
        (lambda model, loss: look.trace(model, loss, products=5), ValueError, "got 5"),
        (lambda model, loss: look.line(torch.sin, loss), TypeError, "nn.Module"),
        (lambda model, loss: look.line(nn.Identity(), loss), ValueError, "got none"),
        (lambda model, loss: look.directions(nn.BatchNorm1d(3)), ValueError, "scaled"),
        (lambda model, loss: look.empirical_risk(torch.zeros(0, 3), torch.zeros(0)), ValueError, "one at least"),
        (lambda model, loss: look.empirical_risk(torch.zeros(2, 3), torch.zeros(3)), ValueError, "2 and 3"),
        (lambda model, loss: look.top_eigenvalue(model, lambda m: loss[0](m) / 0), ValueError, "finite"),
    ],
)
def test_bad_input_is_named(call: Callable[[Any, Any], object], error: type[Exception], text: str) -> None:
    case = Case("mlp")
    before = everything(case.model)
    with pytest.raises(error, match=text):
        call(case.model, case.loss)
    assert_same(before, everything(case.model))
