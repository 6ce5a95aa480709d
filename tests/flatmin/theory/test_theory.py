"""The theorems: closed forms against brute force, upper bounds from duality, 60-digit arithmetic and scipy."""

import math
import random
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.linalg import vector_norm

from flatmin import AMP, theory
from flatmin.theory import GaussianSurface, in_operational_region, operational_boundary, prefers_flatter

SURFACES = 150  # a dimension, of which there are six
POINTS = 6  # on each surface


class Problem(NamedTuple):
    """A surface, points on it, a radius; and our largest exponent around each point, with the place where it is."""

    surface: GaussianSurface
    theta: Tensor
    epsilon: float
    largest: Tensor
    worst: Tensor


def rotation(size: int, generator: torch.Generator) -> Tensor:
    found: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return found


def problem(size: int, generator: torch.Generator) -> Problem:
    """Eigenvalues over up to four decades, some of them repeated; points near μ and far off, two of them hard cases."""

    def rand() -> float:
        return float(torch.rand((), generator=generator))

    widths = 10 ** (4 * rand() * torch.rand(size, generator=generator, dtype=torch.float64) - 2)
    if size > 1 and rand() < 0.2:
        widths[1] = widths[0]
    axes = rotation(size, generator)
    mu = torch.randn(size, generator=generator, dtype=torch.float64)
    surface = GaussianSurface(mu, axes @ widths.diag() @ axes.T, 10 ** (2 * rand() - 1), 2 * rand() - 1)
    offset = torch.randn(POINTS, size, generator=generator, dtype=torch.float64)
    offset *= 10 ** (4 * torch.rand(POINTS, 1, generator=generator, dtype=torch.float64) - 3)
    narrowest = axes[:, widths.argmin()]
    offset[0] -= (offset[0] @ narrowest) * narrowest  # nothing in the narrowest direction, but for rounding
    offset[1] = 0
    epsilon = 10 ** (4 * rand() - 3)
    theta = mu + offset
    return Problem(surface, theta, epsilon, surface.amp_exponent(theta, epsilon), theta + surface.worst(theta, epsilon))


@cache
def problems() -> dict[int, list[Problem]]:
    """By dimension. Called by tests, not a module fixture: that would be made before threads are limited."""
    generator = torch.Generator().manual_seed(0)
    return {size: [problem(size, generator) for _ in range(SURFACES)] for size in range(1, 7)}


class Stacked(NamedTuple):
    """All problems of one dimension as tensors: κ⁻¹ (S, K, K), θ−μ and Δ (S, P, K), ε (S, 1, 1), E (S, P)."""

    inverse: Tensor
    offset: Tensor
    step: Tensor
    epsilon: Tensor
    largest: Tensor


def stacked(own: list[Problem]) -> Stacked:
    return Stacked(
        torch.linalg.inv(torch.stack([torch.as_tensor(p.surface.kappa) for p in own])),
        torch.stack([p.theta - p.surface.mu for p in own]),
        torch.stack([p.worst - p.theta for p in own]),
        torch.tensor([p.epsilon for p in own], dtype=torch.float64)[:, None, None],
        torch.stack([p.largest for p in own]),
    )


def _doubles(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def upper_bound(inverse: Tensor, offset: Tensor, step: Tensor, epsilon: Tensor) -> Tensor:
    """No Δ with ‖Δ‖ ≤ ε has a larger exponent than this, by Lagrange's dual. For any λ above all eigenvalues of H = κ⁻¹

    max (d+Δ)ᵀH(d+Δ) ≤ λε² + dᵀHd + (Hd)ᵀ(λ−H)⁻¹Hd;   the bound is tight for the λ that belongs to the worst Δ.
    """
    heights, axes = torch.linalg.eigh(inverse)
    d, delta = offset @ axes, step @ axes
    top = heights[:, None, -1:] * (1 + 1e-11)
    multiplier = (delta * heights[:, None] * (d + delta)).sum(dim=-1, keepdim=True) / epsilon.square()
    multiplier = torch.maximum(multiplier, top)
    pull = heights[:, None] * d
    rest = (pull * d + pull.square() / (multiplier - heights[:, None])).sum(dim=-1)
    bound: Tensor = (multiplier * epsilon.square()).squeeze(-1) + rest
    return bound / 2


def test_the_largest_difference_of_the_amp_loss_from_a_proven_upper_bound_is_below_a_billionth() -> None:
    """Ours is reached by a step inside the ball, so it is at most the maximum; the dual is at least the maximum."""
    differences = []
    for own in problems().values():
        s = stacked(own)
        assert (vector_norm(s.step, dim=-1) <= s.epsilon[..., 0] * (1 + 1e-9) + 1e-15).all()
        reached = ((s.offset + s.step) @ s.inverse * (s.offset + s.step)).sum(dim=-1) / 2
        torch.testing.assert_close(reached, s.largest, rtol=1e-9, atol=0)
        bound = upper_bound(*s[:4])
        differences.append(((bound - s.largest) / bound).abs().max())
    assert float(max(differences)) < 1e-9


def test_no_ascent_from_any_start_climbs_higher() -> None:
    """Δ ← ε·κ⁻¹(d+Δ)/‖·‖ climbs at every step, the exponent being convex; the best of 24 starts comes near."""
    generator = torch.Generator().manual_seed(1)
    for size, own in problems().items():
        s = stacked(own)
        inverse, offset, epsilon = s.inverse[:, None], s.offset[:, :, None], s.epsilon[..., None]
        delta = torch.randn(len(own), POINTS, 24, size, generator=generator, dtype=torch.float64)
        delta *= epsilon / vector_norm(delta, dim=-1, keepdim=True)
        for _ in range(60):
            delta = (offset + delta) @ inverse
            delta *= epsilon / vector_norm(delta, dim=-1, keepdim=True)
        climbed = ((offset + delta) @ inverse * (offset + delta)).sum(dim=-1).amax(dim=-1) / 2
        assert (climbed <= s.largest * (1 + 1e-9)).all()
        assert ((climbed / s.largest) > 0.99).double().mean() > 0.99
        assert ((climbed / s.largest) > 1 - 1e-9).double().mean() > 0.8


def test_theorem_1_the_amp_loss_is_least_at_mu_and_is_what_the_theorem_says() -> None:
    for own in problems().values():
        for surface, theta, epsilon, largest, _ in own:
            least = surface.amp_minimum_exponent(epsilon)
            assert largest[1] == pytest.approx(least, rel=1e-12)  # the point is μ
            assert (largest >= (least + surface.exponent(theta)) * (1 - 1e-12)).all()
            losses = surface.amp_loss(theta, epsilon)
            assert losses[1] == losses.min() == pytest.approx(surface.amp_minimum(epsilon), rel=1e-12, abs=1e-12)
        smallest = torch.linalg.eigvalsh(torch.stack([torch.as_tensor(p.surface.kappa) for p in own]))[:, 0]
        torch.testing.assert_close(_doubles([p.surface.narrowest for p in own]), smallest, rtol=1e-9, atol=0)


@pytest.mark.parametrize("size", range(1, 7))
def test_theorem_1_a_minimiser_that_knows_nothing_finds_no_less(size: int) -> None:
    for surface, theta, epsilon, *_ in problems()[size][:1]:

        def loss(place: np.ndarray[Any, Any], surface: GaussianSurface = surface, epsilon: float = epsilon) -> float:
            return float(surface.amp_exponent(torch.from_numpy(place), epsilon))

        start = theta[2].numpy()
        found = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 400, "fatol": 0.0})
        least = surface.amp_minimum_exponent(epsilon)
        assert least * (1 - 1e-12) <= found.fun <= least + 0.3 * (loss(start) - least)
        if size == 1:
            assert found.fun == pytest.approx(least, rel=1e-9)


def test_scipy_finds_no_larger_loss_in_the_ball() -> None:
    for size in (2, 3, 6):
        for surface, theta, epsilon, largest, worst in problems()[size][:8]:
            inverse = np.linalg.inv(np.asarray(surface.kappa))
            offset = (theta[3] - surface.mu).numpy()

            def fall(
                x: np.ndarray[Any, Any],
                inverse: np.ndarray[Any, Any] = inverse,
                offset: np.ndarray[Any, Any] = offset,
                epsilon: float = epsilon,
                scale: float = float(largest[3]),
            ) -> float:
                place = offset + epsilon * x
                return float(-place @ inverse @ place) / 2 / scale

            inside = {"type": "ineq", "fun": lambda x: 1 - x @ x}
            step = (worst - theta)[3].numpy() / epsilon
            starts = [step + 0.3 * np.sin(np.arange(size)), -step, np.full(size, 0.1)]
            best = min(minimize(fall, x, method="SLSQP", constraints=[inside]).fun for x in starts)
            assert best == pytest.approx(-1, rel=1e-6)


def test_in_one_dimension_the_exponent_is_that_of_the_distance_and_the_radius() -> None:
    theta = torch.linspace(-5, 5, 101, dtype=torch.float64)
    for mu, variance, epsilon in ((0.0, 1.0, 0.5), (1.5, 1e-6, 3.0), (-2.0, 1e8, 1e-9), (0.0, 0.3, 0.0)):
        for surface in (GaussianSurface(mu, variance, 2.0, 1.0), GaussianSurface(torch.tensor([mu]), variance, 2.0, 1)):
            places = theta if isinstance(surface.mu, float) else theta[:, None]
            expected = ((theta - mu).abs() + epsilon) ** 2 / (2 * variance)
            torch.testing.assert_close(surface.amp_exponent(places, epsilon), expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(
                surface.amp_loss(places, epsilon), 1 - 2 * torch.exp(-expected), rtol=1e-12, atol=0
            )


@pytest.mark.parametrize("wide", [1.001, 2.0, 1e4, 1e8])
@pytest.mark.parametrize("epsilon", [1e-6, 1.0, 1e6])
def test_with_nothing_in_the_narrowest_direction_the_step_goes_there_all_the_same(wide: float, epsilon: float) -> None:
    """The hard case, κ = diag(1, s), d = (0, b): where b ≤ ε(s−1), Δ₂ = b/(s−1) and 2E = ε² + b²/(s−1)."""
    surface = GaussianSurface(torch.zeros(2), torch.tensor([1.0, wide], dtype=torch.float64).diag(), 1.0, 0.0)
    shares = torch.tensor([0.0, 1e-9, 0.3, 0.99, 1.0, 1.01, 10.0], dtype=torch.float64)
    b = shares * epsilon * (wide - 1)
    for narrow in (0.0, -0.0, 1e-320, 1e-250, -1e-190, 1e-30):
        theta = torch.stack([torch.full_like(b, narrow * epsilon), b], dim=-1)
        step = surface.worst(theta, epsilon)
        expected = torch.where(shares <= 1, epsilon**2 + b**2 / (wide - 1), (b + epsilon) ** 2 / wide) / 2
        torch.testing.assert_close(surface.amp_exponent(theta, epsilon), expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(vector_norm(step, dim=-1), torch.full_like(b, epsilon), rtol=1e-12, atol=0)
        torch.testing.assert_close(step[:4, 1], shares[:4] * epsilon, rtol=1e-12, atol=1e-15 * epsilon)
        assert abs(narrow) < 1e-300 or (step[:4, 0].sign() == math.copysign(1, narrow)).all()


@pytest.mark.parametrize("size", [2, 3, 6])
def test_on_a_round_surface_the_step_goes_straight_out(size: int) -> None:
    surface = GaussianSurface(torch.zeros(size), 4 * torch.eye(size), 1.0, 0.0)
    theta = torch.randn(50, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    length = vector_norm(theta, dim=-1, keepdim=True)
    torch.testing.assert_close(surface.worst(theta, 0.7), 0.7 * theta / length)
    torch.testing.assert_close(surface.amp_exponent(theta, 0.7), ((length + 0.7) ** 2 / 8).squeeze(-1))
    assert float(vector_norm(surface.worst(torch.zeros(size), 0.7))) == pytest.approx(0.7)


def test_a_repeated_smallest_eigenvalue_is_one_plane() -> None:
    surface = GaussianSurface(torch.zeros(3), torch.diag(torch.tensor([9.0, 1.0, 1.0])), 1.0, 0.0)
    step = surface.worst(torch.tensor([0.0, 3e-9, 4e-9], dtype=torch.float64), 1.0)
    torch.testing.assert_close(step, torch.tensor([0.0, 0.6, 0.8], dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e8])
def test_radii_and_distances_of_any_size_give_a_step_that_is_proven_the_worst(condition: float) -> None:
    widths = torch.logspace(0, math.log10(condition), 4, dtype=torch.float64)
    surface, inverse = GaussianSurface(torch.zeros(4), widths.diag(), 1.0, 0.0), widths.reciprocal().diag()[None]
    direction = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction *= (torch.rand(200, 4, generator=torch.Generator().manual_seed(1)) < 0.7).double()
    for distance in (1e-100, 1e-9, 1.0, 1e9, 1e100):
        for epsilon in (1e-100, 1e-9, 1.0, 1e9, 1e100):
            step = surface.worst(distance * direction, epsilon)
            torch.testing.assert_close(
                vector_norm(step / epsilon, dim=-1), torch.ones(200).double(), rtol=1e-12, atol=0
            )
            ours = surface.amp_exponent(distance * direction, epsilon)
            here, least = surface.exponent(distance * direction), surface.amp_minimum_exponent(epsilon)
            assert ((here + least) * (1 - 1e-12) <= ours).all()
            assert (ours <= (here.sqrt() + math.sqrt(least)) ** 2 * (1 + 1e-12)).all()  # the triangle inequality
            if 1e-10 < epsilon / distance < 1e10:  # else these two leave nothing to see
                bound = upper_bound(inverse, distance * direction[None], step[None], _doubles([[[epsilon]]]))
                torch.testing.assert_close(ours, bound[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("epsilon", [0.0, 5e-324, 1e-300])
def test_hardly_any_radius_is_hardly_any_difference(epsilon: float) -> None:
    surface = GaussianSurface(torch.zeros(2), torch.diag(torch.tensor([1.0, 3.0])), 1.0, 0.0)
    theta = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1e-320, 1e150]], dtype=torch.float64)
    assert torch.equal(surface.amp_exponent(theta, epsilon), surface.exponent(theta))
    assert vector_norm(surface.worst(theta, epsilon), dim=-1).amax() <= epsilon


def test_the_gradient_of_the_amp_loss_is_the_gradient_at_the_perturbed_place() -> None:
    for own in problems().values():
        for surface, theta, epsilon, _, worst in own[:20]:
            at, moved = theta[2:].clone().requires_grad_(), worst[2:].clone().requires_grad_()
            surface.amp_loss(at, epsilon).sum().backward()
            surface.value(moved).sum().backward()
            assert at.grad is not None
            assert moved.grad is not None
            torch.testing.assert_close(at.grad, moved.grad, rtol=1e-6, atol=1e-12)
    surface, theta = GaussianSurface(torch.zeros(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]]), 1.0, 0.0), torch.ones(2)
    theta = theta.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda place: surface.amp_loss(place, 0.3), theta)


def test_many_points_at_once_are_one_point_at_a_time() -> None:
    for size, own in problems().items():
        surface, theta, epsilon, largest, worst = own[0]
        for i in range(POINTS):
            torch.testing.assert_close(surface.amp_exponent(theta[i], epsilon), largest[i], rtol=1e-13, atol=0)
        folded = theta.view(2, POINTS // 2, size)
        assert surface.amp_loss(folded, epsilon).shape == surface.value(folded).shape == (2, POINTS // 2)
        torch.testing.assert_close(surface.worst(folded, epsilon), (worst - theta).view_as(folded))


def test_without_a_radius_the_amp_loss_is_the_loss() -> None:
    for own in problems().values():
        for surface, theta, *_ in own[:20]:
            assert torch.equal(surface.amp_loss(theta, 0.0), surface.value(theta))
            assert surface.amp_minimum(0.0) == surface.minimum() == float(surface.value(surface.mu))


def exact_minimum_difference(first: GaussianSurface, second: GaussianSurface, epsilon: float) -> Decimal:
    """γ*₁,AMP − γ*₂,AMP in 60 digits, whatever underflows elsewhere."""

    def left(surface: GaussianSurface) -> Decimal:
        return Decimal(surface.A) * (-(Decimal(epsilon) ** 2) / (2 * Decimal(float(surface.kappa)))).exp()

    with localcontext(Context(prec=60, Emin=-(10**9), Emax=10**9)):
        return (Decimal(first.C) - Decimal(second.C)) - (left(first) - left(second))


def agrees_with_corollary_1(first: GaussianSurface, second: GaussianSurface, epsilon: float) -> bool:
    """Asserts the equivalence, and says which side of it this is."""
    deeper = Decimal(first.C) - Decimal(first.A) < Decimal(second.C) - Decimal(second.A)
    expected = bool(deeper and exact_minimum_difference(first, second, epsilon) > 0)
    assert prefers_flatter(first, second, epsilon=epsilon) == expected, (first, second, epsilon)
    assert not (expected and prefers_flatter(second, first, epsilon=epsilon))
    return expected


def test_corollary_1_holds_in_both_directions_for_surfaces_at_random() -> None:
    draw = random.Random(0)
    verdicts = []
    for _ in range(3000):
        pair = [
            GaussianSurface(0.0, 10 ** draw.uniform(-2, 2), 10 ** draw.uniform(-1, 1), draw.uniform(-1, 1))
            for _ in range(2)
        ]
        verdicts.append(agrees_with_corollary_1(pair[0], pair[1], 10 ** draw.uniform(-3, 2)))
    assert 0.05 < sum(verdicts) / len(verdicts) < 0.95


@pytest.mark.parametrize("exponents", [(1e-12, 1e-6), (1e-3, 1.0), (1.0, 60.0), (60.0, 700.0)], ids=str)
def test_corollary_1_changes_its_answer_at_its_boundary(exponents: tuple[float, float]) -> None:
    """C₁ a millionth of the gap above and below C₂ + A₁·exp(−ε²/2σ₁²) − A₂·exp(−ε²/2σ₂²)."""
    draw = random.Random(1)
    for _ in range(500):
        one, two = (math.exp(draw.uniform(*map(math.log, exponents))) for _ in range(2))
        first, second = (GaussianSurface(0.0, 1 / (2 * e), math.exp(draw.uniform(-1, 1)), 0.0) for e in (one, two))
        gap = exact_minimum_difference(second, first, 1.0)
        if first.A < second.A and gap < 0:
            continue
        verdicts = []
        for side in (-1e-6, 1e-6):
            tilt = GaussianSurface(0.0, first.kappa, first.A, float(gap) * (1 + math.copysign(side, side * float(gap))))
            verdicts.append(agrees_with_corollary_1(tilt, second, 1.0))
        assert verdicts in ([False, True], [False, False])  # twice no, where the second is the deeper one


def test_corollary_1_holds_where_the_exponential_underflows() -> None:
    draw = random.Random(2)
    verdicts = []
    for _ in range(1000):
        one = math.exp(draw.uniform(math.log(60), math.log(1e6)))
        depth, share = 10 ** draw.uniform(-1, 1), draw.uniform(0.1, 0.999)
        two = (one + math.log(share)) * draw.choice([1 - 1e-6, 1 + 1e-6, 0.5, 2.0])  # around A₁·exp(·) = A₂·exp(·)
        first, second = (GaussianSurface(0.0, 1 / (2 * e), a, 0.0) for e, a in ((one, depth), (two, depth * share)))
        verdicts.append(agrees_with_corollary_1(first, second, 1.0))
        for height in (1e-300, -1e-300, 1e-5, -1e-5):
            agrees_with_corollary_1(GaussianSurface(0.0, first.kappa, first.A, height), second, 1.0)
    assert 0.3 < sum(verdicts) / len(verdicts) < 0.7


def test_without_a_radius_nothing_is_preferred_over_the_deeper_minimum() -> None:
    sharp, flat = GaussianSurface(0.0, 1e-6, 1.0, 0.0), GaussianSurface(0.0, 1e6, 0.999, 0.0)
    assert not prefers_flatter(sharp, flat, epsilon=0.0)
    assert prefers_flatter(sharp, flat, epsilon=1e-3)
    assert not in_operational_region(0.999999, 1e9, ratio=0.0)
    assert operational_boundary(0.999999, ratio=0.0) == math.inf


def test_corollary_1_looks_at_the_narrowest_direction_alone() -> None:
    deep = GaussianSurface(torch.zeros(3), torch.diag(torch.tensor([1e4, 0.01, 1e4])), 1.0, 0.0)
    flat = GaussianSurface(torch.zeros(2), torch.diag(torch.tensor([1.0, 1.0])), 0.9, 0.0)
    assert prefers_flatter(deep, flat, epsilon=0.1)
    assert not prefers_flatter(GaussianSurface(torch.zeros(1), torch.tensor([[1e4]]), 1.0, 0.0), flat, epsilon=0.1)


def exactly_in_region(beta: float, r: float, ratio: float) -> bool:
    """The definition, γ*₂,AMP < γ*₁,AMP, as exp(−ratio) < β·exp(−ratio/r), in 60 digits."""
    with localcontext(Context(prec=60, Emin=-(10**9), Emax=10**9)):
        return (-Decimal(ratio)).exp() < Decimal(beta) * (-Decimal(ratio) / Decimal(r)).exp()


@pytest.mark.parametrize("ratios", [(1e-6, 1e-2), (1e-2, 60.0), (60.0, 1e6)], ids=str)
def test_corollary_2_holds_in_both_directions_and_at_its_boundary(ratios: tuple[float, float]) -> None:
    draw = random.Random(3)
    cases = []
    for _ in range(700):
        ratio = math.exp(draw.uniform(*map(math.log, ratios)))
        beta = math.exp(-ratio * draw.uniform(1e-4, 0.99)) if draw.random() < 0.8 and ratio < 700 else draw.random()
        edge = float(operational_boundary(beta, ratio=ratio))
        for r in (edge * (1 - 1e-8), edge * (1 + 1e-8), 10 ** draw.uniform(-2, 4)):
            cases += [(beta, r, ratio)] if math.isfinite(r) else []
    betas, widths, reaches = _doubles(cases).unbind(dim=1)
    ours = in_operational_region(betas, widths, ratio=reaches)
    expected = [exactly_in_region(*case) for case in cases]
    assert ours.tolist() == expected
    assert 0.2 < sum(expected) / len(expected) < 0.8


def test_corollary_2_is_corollary_1_with_equal_heights() -> None:
    draw = random.Random(4)
    for _ in range(500):
        beta, r, epsilon, width = draw.random(), 10 ** draw.uniform(-1, 2), 10 ** draw.uniform(-2, 2), draw.random()
        first = GaussianSurface(0.0, width, 3.0, 0.5)
        second = GaussianSurface(0.0, r * width, 3.0 * beta, 0.5)
        inside = bool(in_operational_region(beta, r, ratio=epsilon**2 / (2 * width)))
        assert prefers_flatter(first, second, epsilon=epsilon) == inside


def test_the_operational_region_grows_with_the_ratio_and_never_holds_a_sharper_minimum() -> None:
    beta, r = torch.rand(1000, generator=torch.Generator().manual_seed(0)), torch.logspace(-2, 3, 500)
    beta = beta.clamp(1e-3, 0.999)[:, None]
    before = torch.zeros(1000, 500, dtype=torch.bool)
    for ratio in (0.0, 0.01, 0.1, 1.0, 10.0, 1e3, 1e6):
        inside = in_operational_region(beta, r, ratio=ratio)
        assert (inside >= before).all()
        assert not inside[:, r <= 1].any()
        before = inside


def smooth(seed: int) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights, bias = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64).unbind()
    return lambda theta: (torch.sin(weights @ theta) * bias.sum(dim=1)).sum() + torch.logsumexp(bias @ theta, dim=0)


def quadratic(seed: int) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root, slope = torch.randn(4, 4, generator=generator).double(), torch.randn(4, generator=generator).double()
    return lambda theta: theta @ (root @ root.T - 2 * torch.eye(4)) @ theta / 2 + slope @ theta


def gradient(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


def gap_of_theorem_2(
    risk: Callable[[Tensor], Tensor], theta: Tensor, *, epsilon: float, inner_lr: float, as_printed: bool = False
) -> float:
    """‖∇(J+Ω)(θ) − ∇J(θ+Δ)‖, Δ the step of AMP."""

    def penalised(place: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(risk(place), place, create_graph=True)
        length = vector_norm(slope)
        return risk(place) + theory.gradient_norm_penalty(
            length, epsilon=epsilon, inner_lr=inner_lr, as_printed=as_printed
        )

    slope = gradient(risk, theta)
    delta = inner_lr * slope * min(1.0, epsilon / float(inner_lr * vector_norm(slope)))
    return float(vector_norm(gradient(penalised, theta) - gradient(risk, theta + delta)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("clipped", [False, True], ids=["inside", "outside"])
def test_theorem_2_the_gradient_with_the_penalty_is_amps_to_first_order(seed: int, clipped: bool) -> None:
    risk, theta = smooth(seed), torch.randn(4, generator=torch.Generator().manual_seed(seed)).double()
    length = float(vector_norm(gradient(risk, theta)))

    def error(inner_lr: float, as_printed: bool = False) -> float:
        epsilon = inner_lr * length * (0.5 if clipped else 2.0)
        return gap_of_theorem_2(risk, theta, epsilon=epsilon, inner_lr=inner_lr, as_printed=as_printed)

    assert error(1e-4) / error(5e-5) == pytest.approx(4, rel=0.05)  # O(ζ²)
    if clipped:
        assert error(1e-4, as_printed=True) == pytest.approx(error(1e-4), rel=1e-3)  # a constant apart
    else:
        assert error(1e-4, as_printed=True) / error(5e-5, as_printed=True) == pytest.approx(2, rel=0.05)  # O(ζ)
        assert error(1e-4, as_printed=True) > 10 * error(1e-4)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("epsilon", [1e9, 0.01], ids=["inside", "outside"])
def test_theorem_2_is_exact_for_a_quadratic_and_as_printed_it_is_not(seed: int, epsilon: float) -> None:
    risk, theta = quadratic(seed), torch.randn(4, generator=torch.Generator().manual_seed(seed)).double()
    assert gap_of_theorem_2(risk, theta, epsilon=epsilon, inner_lr=0.7) < 1e-10
    printed = gap_of_theorem_2(risk, theta, epsilon=epsilon, inner_lr=0.7, as_printed=True)
    assert (printed < 1e-10) == (epsilon < 1)


@pytest.mark.parametrize("epsilon", [1e9, 0.01], ids=["inside", "outside"])
def test_theorem_2_the_optimizer_steps_down_the_penalised_risk(epsilon: float) -> None:
    risk, weight = quadratic(0), torch.nn.Parameter(torch.ones(4).double())
    before = weight.detach().clone()
    optimizer = AMP(torch.optim.SGD([weight], lr=1.0), epsilon=epsilon, inner_lr=0.7)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = risk(weight)
        loss.backward()
        return loss

    optimizer.step(closure)

    def penalised(place: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(risk(place), place, create_graph=True)
        return risk(place) + theory.gradient_norm_penalty(vector_norm(slope), epsilon=epsilon, inner_lr=0.7)

    torch.testing.assert_close(before - weight.detach(), gradient(penalised, before), rtol=1e-6, atol=1e-8)


def test_the_slope_of_the_penalty_is_the_length_of_the_step_and_as_printed_it_falls_at_the_knee() -> None:
    norm = torch.linspace(0, 4, 401, dtype=torch.float64, requires_grad=True)

    def slope(as_printed: bool) -> Tensor:
        total = theory.gradient_norm_penalty(norm, epsilon=0.5, inner_lr=0.25, as_printed=as_printed).sum()
        return torch.autograd.grad(total, norm)[0]

    torch.testing.assert_close(slope(False), (0.25 * norm).clamp(max=0.5).detach())
    inside = (0.25 * norm <= 0.5).detach()
    torch.testing.assert_close(slope(True), torch.where(inside, 0.5 * norm, 0.5).detach())
    true, printed = (
        theory.gradient_norm_penalty(norm, epsilon=0.5, inner_lr=0.25, as_printed=p) for p in (False, True)
    )
    assert printed.diff().max() < 0.0101 < true.diff().max() * 2.1  # neither jumps: no rise above 2ε·0.01
    assert not theory.gradient_norm_penalty(norm, epsilon=0.5, inner_lr=0.0).any()
    assert not theory.gradient_norm_penalty(norm, epsilon=0.0, inner_lr=0.25).any()


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.3, 0.55, 100.0])
def test_pooling_is_the_maximum_over_the_grid_points_within_the_radius(epsilon: float) -> None:
    risk = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pooled = theory.max_pooled(risk, spacing=0.1, epsilon=epsilon)
    for i in range(40):
        near = [j for j in range(40) if abs(i - j) * 0.1 <= epsilon + 1e-9]
        assert torch.equal(pooled[:, i], risk[:, near].amax(dim=1))


def test_pooling_an_inverted_gaussian_gives_its_amp_loss() -> None:
    surface, grid = GaussianSurface(0.3, 0.04, 0.8, 1.0), torch.linspace(-1, 2, 30001, dtype=torch.float64)
    pooled = theory.max_pooled(surface.value(grid), spacing=1e-4, epsilon=0.15)
    exact = surface.amp_loss(grid, 0.15)
    assert (exact - pooled)[1500:-1500].abs().max() < 1e-12
    assert pooled.min() == pytest.approx(surface.amp_minimum(0.15), rel=1e-9)


def test_the_amp_risk_of_two_minima_is_least_at_the_flat_one() -> None:
    grid = torch.linspace(-2, 4, 6001, dtype=torch.float64)
    risk = theory.two_minima(grid)
    assert float(grid[risk.argmin()]) == pytest.approx(-1, abs=2e-3)
    chosen = [float(grid[theory.max_pooled(risk, spacing=1e-3, epsilon=e).argmin()]) for e in (0.01, 0.05, 0.1, 0.3)]
    assert chosen == pytest.approx([-1, -1, 1, 1], abs=5e-3)


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.3, 1.0, 2.0, 5.0])
def test_a_kinked_loss_tells_amp_from_adversarial_training(epsilon: float) -> None:
    theta = torch.linspace(-3, 3, 6001, dtype=torch.float64)
    moves = torch.linspace(-epsilon, epsilon, 401, dtype=torch.float64)[:, None]
    amp = theory.kinked_amp_loss(theta, epsilon=epsilon)
    adversarial = theory.kinked_adversarial_loss(theta, epsilon=epsilon)
    torch.testing.assert_close(amp, theory.kinked(theta + moves).amax(dim=0))
    torch.testing.assert_close(adversarial, theory.kinked(theta * (1 + moves)).amax(dim=0))
    best = theory.kinked_amp_minimiser(epsilon=epsilon)
    assert best == pytest.approx(epsilon / 3)
    assert float(theory.kinked_amp_loss(best, epsilon=epsilon)) == pytest.approx(4 * epsilon / 3)
    assert amp.min() >= 4 * epsilon / 3 * (1 - 1e-12)
    assert float(theta[amp.argmin()]) == pytest.approx(best, abs=1e-3)
    assert theta[adversarial.argmin()].abs() < 1e-12
    assert (adversarial[theta.abs() > 1e-12] > 0).all()


one = GaussianSurface(0.0, 1.0, 1.0, 0.0)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no depth": (lambda: GaussianSurface(0.0, 1.0, 0.0, 0.0), "A must be above 0 and finite, got 0.0"),
    "a depth that is nan": (lambda: GaussianSurface(0.0, 1.0, math.nan, 0.0), "A must be above 0"),
    "no height": (lambda: GaussianSurface(0.0, 1.0, 1.0, math.inf), "C must be finite, got inf"),
    "a matrix for mu": (lambda: GaussianSurface(torch.zeros(2, 2), torch.eye(2), 1.0, 0.0), "mu must be"),
    "no dimension": (lambda: GaussianSurface(torch.zeros(0), torch.eye(0), 1.0, 0.0), "mu must be"),
    "mu is nowhere": (lambda: GaussianSurface(math.nan, 1.0, 1.0, 0.0), "mu must be a finite"),
    "kappa of another size": (lambda: GaussianSurface(torch.zeros(2), torch.eye(3), 1.0, 0.0), r"must be \(2, 2\)"),
    "a variance for two": (lambda: GaussianSurface(torch.zeros(2), 1.0, 1.0, 0.0), r"must be \(2, 2\).*got \(\)"),
    "kappa is not finite": (lambda: GaussianSurface(0.0, math.inf, 1.0, 0.0), "kappa must be finite"),
    "kappa leans": (
        lambda: GaussianSurface(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]]), 1.0, 0.0),
        "must be symmetric",
    ),
    "no variance": (lambda: GaussianSurface(0.0, 0.0, 1.0, 0.0), "positive definite, got eigenvalues"),
    "kappa is singular": (lambda: GaussianSurface(torch.zeros(3), torch.ones(3, 3), 1.0, 0.0), "positive definite"),
    "a saddle": (
        lambda: GaussianSurface(torch.zeros(2), torch.diag(torch.tensor([1.0, -1.0])), 1.0, 0.0),
        "does not rise out of theta",
    ),
    "theta of another size": (
        lambda: GaussianSurface(torch.zeros(2), torch.eye(2), 1.0, 0.0).value(torch.zeros(2, 3)),
        r"\(\.\.\., 2\), got \(2, 3\)",
    ),
    "theta is nowhere": (lambda: one.amp_loss(math.nan, 0.1), "theta must be finite"),
    "epsilon below 0": (lambda: one.amp_loss(0.0, -0.1), "epsilon must be at least 0 and finite, got -0.1"),
    "epsilon is inf": (lambda: one.amp_minimum(math.inf), "got inf"),
    "epsilon is nan": (lambda: prefers_flatter(one, one, epsilon=math.nan), "got nan"),
    "beta is 1": (lambda: in_operational_region(1.0, 2.0, ratio=1.0), "beta must lie between 0 and 1, got 1.0"),
    "beta is 0": (lambda: operational_boundary(0.0, ratio=1.0), "beta must lie"),
    "r is 0": (lambda: in_operational_region(0.5, 0.0, ratio=1.0), "r must be above 0"),
    "ratio below 0": (lambda: operational_boundary(0.5, ratio=-1.0), "ratio must be at least 0"),
    "a norm below 0": (lambda: theory.gradient_norm_penalty(-1.0, epsilon=1.0, inner_lr=1.0), "norm must be"),
    "inner_lr below 0": (lambda: theory.gradient_norm_penalty(1.0, epsilon=1.0, inner_lr=-1.0), "inner_lr must be"),
    "no spacing": (lambda: theory.max_pooled(torch.zeros(3), spacing=0.0, epsilon=1.0), "spacing must be above 0"),
    "no grid": (lambda: theory.max_pooled(torch.zeros(0), spacing=1.0, epsilon=1.0), "n at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused_with_the_rule_and_the_value(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
