"""What is computed: Algorithm 1, its ball, and nothing at all for ε = 0."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import flatmin
from flatmin.ball import BALLS, NORMS, Ball, Norm
from tests.support.cases import MakeBase, Setup, run, same, setup


@pytest.mark.parametrize("off", [{"epsilon": 0.0}, {"epsilon": 0.1, "inner_iter": 0}])
def test_epsilon_zero_and_no_pass_are_the_base_optimizer(
    make_base: MakeBase, model_name: str, off: dict[str, Any]
) -> None:
    plain, wrapped = setup(model_name), setup(model_name)
    torch.manual_seed(1)
    expected = run(plain, make_base(plain.model.parameters()), 4)
    torch.manual_seed(1)
    weights = run(wrapped, flatmin.AMP(make_base(wrapped.model.parameters()), **off), 4)
    assert same(weights, expected)
    assert same(wrapped.buffers(), plain.buffers())


def test_epsilon_zero_is_the_base_optimizer_in_blocks_too(make_base: MakeBase, model_name: str) -> None:
    plain, wrapped = setup(model_name), setup(model_name)
    torch.manual_seed(1)
    expected = run(plain, make_base(plain.model.parameters()), 4)
    torch.manual_seed(1)
    optimizer = flatmin.AMP(make_base(wrapped.model.parameters()), epsilon=0.0, inner_iter=2, model=wrapped.model)
    for _ in range(4):
        wrapped.step_in_blocks(optimizer)
    assert same(wrapped.weights(), expected)
    assert same(wrapped.buffers(), plain.buffers())


def test_rmp_with_epsilon_zero_is_the_base_optimizer(make_base: MakeBase) -> None:
    plain, wrapped = setup(), setup()
    expected = run(plain, make_base(plain.model.parameters()), 3)
    assert same(run(wrapped, flatmin.RMP(make_base(wrapped.model.parameters()), epsilon=0), 3), expected)


def test_a_group_with_epsilon_zero_is_left_alone_and_does_not_count(make_base: MakeBase) -> None:
    case = setup(dtype=torch.float64)
    first, second = case.layers()
    optimizer = flatmin.AMP(
        make_base([{"params": first, "epsilon": 0.0}, {"params": second}]), epsilon=0.1, inner_lr=1e3
    )
    theta, seen = case.weights(), list[list[Tensor]]()
    optimizer.step(case.watched(optimizer, seen))
    assert same(seen[1][:2], theta[:2])
    assert length(seen[1][2:], theta[2:]) == pytest.approx(0.1, rel=1e-12)


def length(weights: list[Tensor], theta: list[Tensor], norm: str = "l2") -> float:
    """‖Δ‖ of some of the weights, in float64."""
    delta = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(weights, theta, strict=True)])
    return float(torch.linalg.vector_norm(delta, 2 if norm == "l2" else float("inf")))


WHERE = {"global": [slice(0, 4)], "group": [slice(0, 2), slice(2, 4)], "tensor": [slice(i, i + 1) for i in range(4)]}


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("inner_iter", [1, 2, 3])
@pytest.mark.parametrize("epsilon", [1e-3, 0.05, 10.0])
def test_delta_is_inside_the_ball_after_every_inner_step(
    ball: Ball, norm: Norm, inner_iter: int, epsilon: float
) -> None:
    case = setup(dtype=torch.float64)
    base = SGD([{"params": layer} for layer in case.layers()], lr=0.1)
    optimizer = flatmin.AMP(base, epsilon=epsilon, inner_iter=inner_iter, ball=ball, norm=norm)
    for _ in range(3):
        theta, seen = case.weights(), list[list[Tensor]]()
        optimizer.step(case.watched(optimizer, seen))
        assert len(seen) == inner_iter + 1
        for weights in seen[1:]:
            for part in WHERE[ball]:
                assert length(weights[part], theta[part], norm) <= epsilon * (1 + 1e-6)
        assert optimizer.last.delta_norm == pytest.approx(length(seen[-1], theta, norm), rel=1e-6)


def test_the_global_ball_is_global_and_the_others_are_not() -> None:
    for ball, reached in (("global", 0.1), ("group", 0.1 * 2**0.5), ("tensor", 0.1 * 4**0.5)):
        case = setup(dtype=torch.float64)
        base = SGD([{"params": layer} for layer in case.layers()], lr=0.1)
        optimizer = flatmin.AMP(base, epsilon=0.1, inner_lr=1e6, ball=ball)  # type: ignore[arg-type]
        theta, seen = case.weights(), list[list[Tensor]]()
        optimizer.step(case.watched(optimizer, seen))
        assert length(seen[1], theta) == pytest.approx(reached)
        assert optimizer.last.on_ball == 1


def test_delta_stays_inside_the_ball_for_millions_of_float32_weights() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(6_000_000))
    direction = torch.randn(6_000_000)
    optimizer = flatmin.AMP(SGD([weight], lr=1.0), epsilon=0.5, inner_lr=1e3)
    lengths = list[Tensor]()

    def closure() -> Tensor:
        lengths.append(weight.detach().double().norm())
        optimizer.zero_grad()
        loss = weight @ direction
        loss.backward()
        return loss

    optimizer.step(closure)
    assert lengths[1] == pytest.approx(0.5, rel=1e-6)


def test_groups_may_have_their_own_radius_and_rate() -> None:
    case = setup(dtype=torch.float64)
    first, second = case.layers()
    groups = [{"params": first, "epsilon": 0.2, "inner_lr": 1e6}, {"params": second, "inner_lr": 1e-4}]
    optimizer = flatmin.AMP(SGD(groups, lr=0.1), epsilon=0.1, ball="group")
    theta, seen = case.weights(), list[list[Tensor]]()
    optimizer.step(case.watched(optimizer, seen))
    assert length(seen[1][:2], theta[:2]) == pytest.approx(0.2)
    assert 0 < length(seen[1][2:], theta[2:]) < 1e-3
    assert optimizer.last.on_ball == pytest.approx(0.5)


def test_memory_beyond_the_base_is_one_copy_and_two_for_more_passes() -> None:
    for inner_iter, copies in ((1, 1), (2, 2), (3, 2)):
        case = setup()
        size = sum(param.nbytes for param in case.model.parameters())
        optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=inner_iter)
        run(case, optimizer, 3)
        assert optimizer._theta.nbytes() + optimizer._delta.nbytes() == copies * size


@pytest.mark.parametrize("form", ["closure", "blocks", "list"])
@pytest.mark.parametrize("choice", [{}, {"inner_iter": 2}, {"norm": "linf"}], ids=str)
def test_a_gradient_that_is_a_lazy_conjugate_is_the_gradient(form: str, choice: dict[str, Any]) -> None:
    """torch.conj() sets a bit, and computes nothing; so do gradients of what was conjugated."""
    ended = []
    for lazy in (True, False):
        weight = nn.Parameter(torch.tensor([3 + 4j, 1 - 2j]))
        optimizer = flatmin.AMP(SGD([weight], lr=0.1), **{"epsilon": 0.5, **choice})

        def closure(lazy: bool = lazy, weight: nn.Parameter = weight, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = weight.abs().square().sum() / 2
            loss.backward()
            assert weight.grad is not None
            weight.grad = weight.grad.conj().resolve_conj().conj() if lazy else weight.grad
            assert weight.grad.is_conj() == lazy
            return loss

        for _ in range(3):
            if form == "blocks":
                closure()
                for _ in range(optimizer.inner_iter):
                    with optimizer.perturbed():
                        closure()
                optimizer.step()
            else:
                optimizer.step([closure, closure] if form == "list" else closure)
        ended.append(weight)
    assert torch.equal(*(weight.detach() for weight in ended))


def test_complex_parameters_are_perturbed_as_pairs_of_reals() -> None:
    weight = nn.Parameter(torch.tensor([3 + 4j, 0j]))
    for choice in ({"inner_iter": 1}, {"inner_iter": 3}, {"norm": "linf"}):
        optimizer = flatmin.AMP(SGD([weight], lr=0.0), epsilon=0.5, inner_lr=1e3, **choice)
        seen = list[Tensor]()

        def closure(optimizer: flatmin.AMP = optimizer, seen: list[Tensor] = seen) -> Tensor:
            optimizer.zero_grad()
            seen.append(weight.detach().clone())
            loss = weight.abs().square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        expected = [3.3 + 4.4j, 0j] if "norm" not in choice else [3.5 + 4.5j, 0j]
        assert seen[-1].tolist() == pytest.approx(expected)
        assert weight.tolist() == [3 + 4j, 0j]


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "float16", "channels-last", "gradient laid out otherwise", "with gaps"]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_perturbed_weights_are_theta_plus_delta_rounded_once(kind: str, ball: Ball, device: str) -> None:
    """However weights and gradients lie in memory, and whichever kernel moves them."""
    torch.manual_seed(0)
    dtype = getattr(torch, kind, torch.float32)
    weights = [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in ((4, 3, 5, 5), (7,))]
    if kind == "channels-last":
        weights[0].data = weights[0].data.to(memory_format=torch.channels_last)
    gradients = [torch.randn_like(weight) for weight in weights]
    if kind == "gradient laid out otherwise":
        gradients[0] = gradients[0].to(memory_format=torch.channels_last)
    if kind == "with gaps":  # as in a padded flat buffer
        for tensors in (weights, gradients):
            tensors[0].data = torch.randn(4, 3, 5, 8, device=device)[..., :5]
    rest = weights[0].data.untyped_storage().clone()
    theta = [weight.detach().clone() for weight in weights]
    optimizer = flatmin.AMP(SGD(weights, lr=0.0), epsilon=0.5, inner_lr=1e3, ball=ball)
    seen = list[list[Tensor]]()

    def closure() -> None:
        seen.append([weight.detach().clone() for weight in weights])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.as_strided(gradient.shape, gradient.stride())

    optimizer.step(closure)
    exact = [gradient.double() for gradient in gradients]
    total = torch.cat([gradient.flatten() for gradient in exact]).norm()
    for value, weight, gradient in zip(seen[1], theta, exact, strict=True):
        length = gradient.norm() if ball == "tensor" else total
        delta = 0.5 * gradient / length
        wrong = (value.double() - (weight.double() + delta)).abs()
        rounding = torch.finfo(dtype).eps * value.double().abs() / 2  # of the sum, once
        arithmetic = 4 * torch.finfo(torch.float32).eps * (weight.double().abs() + delta.abs())
        assert (wrong <= rounding + arithmetic).all()
    assert same([weight.detach() for weight in weights], theta)
    assert rest.tolist() == weights[0].data.untyped_storage().tolist()  # what lies between the weights is untouched


@pytest.mark.parametrize("in_blocks", [False, True])
def test_an_autocast_around_the_whole_step_sees_the_perturbed_weights(in_blocks: bool) -> None:
    """Its cache keeps the weights of the clean pass in half precision, if nobody clears it."""
    results = []
    for around in (True, False):
        case = setup("mlp")
        optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.5)

        def forward(case: Setup = case, around: bool = around) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=not around):
                return cross_entropy(case.model(case.x).float(), case.y)

        losses: list[Tensor] = []

        def closure(optimizer: Any = optimizer, losses: list[Tensor] = losses, forward: Any = forward) -> Tensor:
            optimizer.zero_grad()
            losses.append(forward())
            losses[-1].backward()
            return losses[-1]

        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                if in_blocks:
                    closure()
                    with optimizer.perturbed():
                        losses.append(forward())
                        losses[-1].backward()
                    optimizer.step()
                else:
                    optimizer.step(closure)
        assert losses[1] > losses[0]
        results.append([*(loss.detach() for loss in losses), *case.weights()])
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)  # the arithmetic of the step is under autocast too


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    """A 1×1 convolution in channels-last has a gradient whose strides tell the same in other numbers."""
    results = []
    for strides in ((3, 1, 3, 3), (3, 1, 1, 1)):
        weight = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3, 1, 1).to(memory_format=torch.channels_last))
        weight.data = weight.data.as_strided((4, 3, 1, 1), (3, 1, 3, 3))
        optimizer = flatmin.AMP(SGD([weight], lr=0.1), epsilon=0.3)
        weight.grad = torch.linspace(1, 7, 12).as_strided((4, 3, 1, 1), strides)
        with optimizer.perturbed():
            results.append(weight.detach().clone())
            weight.square().sum().backward()
    assert torch.equal(*results)


class Quadratic:
    """½ Σ (aᵢ·wᵢ − 1)² over weights of several shapes, in float64."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((3,), (2, 4), (), (1, 1, 5))
        self.scales = [torch.randn(shape, generator=generator, dtype=torch.float64) * 3 for shape in shapes]
        self.weights = [nn.Parameter(torch.randn_like(scale, dtype=torch.float64)) for scale in self.scales]
        with torch.no_grad():
            for weight, scale in zip(self.weights, self.scales, strict=True):
                weight.copy_(scale.flatten().flip(0).view_as(scale))

    def train(self, optimizer: Optimizer, steps: int) -> list[list[Tensor]]:
        """The weights of every pass, step by step, and those at the end."""
        seen = list[list[Tensor]]()

        def closure() -> Tensor:
            optimizer.zero_grad()
            seen.append([weight.detach().clone() for weight in self.weights])
            parts = [(w * a - 1).square().sum() / 2 for w, a in zip(self.weights, self.scales, strict=True)]
            loss = torch.stack(parts).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)  # type: ignore[arg-type]
        return [*seen, [weight.detach().clone() for weight in self.weights]]


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    epsilon=st.floats(1e-6, 1e3),
    inner_lr=st.floats(0, 1e6),
    inner_iter=st.integers(1, 4),
    ball=st.sampled_from(BALLS),
    norm=st.sampled_from(NORMS),
)
def test_delta_is_inside_the_ball_whatever_the_settings(
    seed: int, epsilon: float, inner_lr: float, inner_iter: int, ball: Ball, norm: Norm
) -> None:
    problem = Quadratic(seed)
    base = SGD([{"params": problem.weights[:2]}, {"params": problem.weights[2:]}], lr=0.0)
    optimizer = flatmin.AMP(base, epsilon=epsilon, inner_lr=inner_lr, inner_iter=inner_iter, ball=ball, norm=norm)
    theta, *perturbed, after = problem.train(optimizer, 1)
    assert len(perturbed) == inner_iter
    rounding = 1e-14 * (1 + length(theta, [torch.zeros_like(t) for t in theta]))  # of θ + Δ − θ, as seen from here
    for weights in perturbed:
        for part in WHERE[ball]:
            assert length(weights[part], theta[part], norm) <= epsilon * (1 + 1e-6) + rounding
    assert same(after, theta)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    lr=st.floats(0, 0.1),
    momentum=st.floats(0, 0.99),
    weight_decay=st.floats(0, 0.1),
    inner_iter=st.integers(0, 3),
    epsilon=st.sampled_from([0.0, 0.3]),
)
def test_epsilon_zero_is_the_identity_whatever_the_settings(
    seed: int, lr: float, momentum: float, weight_decay: float, inner_iter: int, epsilon: float
) -> None:
    epsilon = epsilon if inner_iter == 0 else 0.0
    plain, wrapped = Quadratic(seed), Quadratic(seed)
    outer = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    expected = plain.train(SGD(plain.weights, **outer), 3)  # type: ignore[arg-type]
    base = SGD(wrapped.weights, **outer)  # type: ignore[arg-type]
    seen = wrapped.train(flatmin.AMP(base, epsilon=epsilon, inner_iter=inner_iter), 3)
    assert len(seen) == len(expected)
    assert all(same(ours, theirs) for ours, theirs in zip(seen, expected, strict=True))
