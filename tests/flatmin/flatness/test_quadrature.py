"""The Hessian's spectral density: quadratures that are exact to their probe, against dense Hessians in float64.

The oracles are numpy's Gauss-Legendre rule, which Lanczos' method must give from the right start, and scipy's eigsh.
"""

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from flatmin import flatness
from flatmin.flatness.hessian import RandomVectors
from flatmin.flatness.quadrature import quadrature
from flatmin.flatness.weights import Weights
from tests.support.flatness_cases import CASES, DEVICES, Case, Quadratic, itself, symmetric


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def probes_of(model: nn.Module, number: int) -> list[Tensor]:
    """The vectors that `spectrum` starts from, of length 1."""
    random = RandomVectors(Weights(model), None)
    drawn = [random.normal() for _ in range(number)]
    return [v / v.norm() for v in drawn]


# ---- one quadrature


@pytest.mark.parametrize("steps", [1, 2, 5, 17])
def test_lanczos_finds_the_rule_of_gauss_and_legendre(steps: int) -> None:
    """That of 40 points is exact up to degree 79, so a Hessian with its points as eigenvalues has those of fewer."""
    nodes, shares = (torch.from_numpy(numbers) for numbers in np.polynomial.legendre.leggauss(40))
    values, weights = quadrature(lambda v: nodes * v, shares.sqrt(), steps)
    expected, expected_weights = np.polynomial.legendre.leggauss(steps)
    assert values.numpy() == pytest.approx(expected, abs=1e-12)
    assert 2 * weights.numpy() == pytest.approx(expected_weights, rel=1e-10)


@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=12),
    st.integers(1, 14),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_moments_up_to_twice_the_steps_are_those_of_the_probe(values: list[float], steps: int, seed: int) -> None:
    """vᵀHᵏv by brute force, whatever the spectrum: repeated, of one value, with zeros."""
    dense, reach = symmetric(values, seed), max(map(abs, values)) or 1.0
    v = torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found, weights = quadrature(lambda u: dense @ u, v, min(steps, len(values)))
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    assert (weights >= 0).all()
    assert found.tolist() == sorted(found.tolist())
    power = v / v.norm()
    for degree in range(2 * len(found)):
        exact = (power @ (v / v.norm())).item()
        assert (weights * (found / reach) ** degree).sum().item() == pytest.approx(exact, abs=1e-9)
        power = dense @ power / reach


def test_moments_of_a_network_are_those_of_its_probes(case: Case) -> None:
    dense, steps = case.dense_hessian(), 6
    found = flatness.spectrum(case.model, case.loss, steps=steps, probes=3)
    for degree in range(2 * steps):
        exact = [(v @ torch.linalg.matrix_power(dense, degree) @ v).item() for v in probes_of(case.model, 3)]
        assert found.moments(degree).tolist() == pytest.approx(exact, rel=1e-9, abs=1e-12)
    beyond = [(v @ torch.linalg.matrix_power(dense, 2 * steps) @ v).item() for v in probes_of(case.model, 3)]
    assert found.moments(2 * steps).tolist() != pytest.approx(beyond, rel=1e-9, abs=1e-12)


def test_with_a_step_for_every_eigenvalue_each_probe_is_exact(case: Case) -> None:
    """Then the weight of an eigenvalue is the squared length of the probe's part in its space."""
    values, vectors = torch.linalg.eigh(case.dense_hessian())
    found = flatness.spectrum(case.model, case.loss, steps=10_000, probes=2)
    for i, v in enumerate(probes_of(case.model, 2)):
        shares = (vectors.T @ v).square()
        for cut in torch.linspace(float(values[0]) - 0.01, float(values[-1]) + 0.01, 25, dtype=torch.float64):
            assert bool((values - cut).abs().min() > 1e-6), "choose other cuts"
            below = found.weights[i][found.values[i] <= cut].sum()
            assert below.item() == pytest.approx(shares[values <= cut].sum().item(), abs=1e-8)


@pytest.mark.parametrize(
    "eigenvalues",
    [[3.0, 3.0, 3.0, 1.0], [0.0] * 5, [-2.0] * 4, [1e6, 1.0, -1e6, 1.0], [5.0, *[0.0] * 40]],
    ids=str,
)
def test_a_spectrum_of_few_values_is_found_exactly_and_ends_early(eigenvalues: list[float]) -> None:
    """Where rounding lets a probe go on, its further values are among the eigenvalues and split their weight."""
    dense = symmetric(eigenvalues)
    model = Quadratic(dense)
    found = flatness.spectrum(model, itself, probes=3)
    own = torch.tensor(sorted(set(eigenvalues)), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(dense)
    for v, here, weights in zip(probes_of(model, 3), found.values, found.weights, strict=True):
        assert weights.sum().item() == pytest.approx(1, abs=1e-12)
        for value in own:
            near = 1e-9 * float(own.abs().max())
            share = (vectors.T @ v)[(values - value).abs() <= near].square().sum()
            assert weights[(here - value).abs() <= near].sum().item() == pytest.approx(share.item(), abs=1e-9)
    assert 3 * len(own) <= found.products < max(3 * len(eigenvalues), 3 * len(own) + 1)


def test_parameters_that_do_nothing_are_eigenvalues_of_zero() -> None:
    """Dead, or not in the loss at all: they count in n, and their share is at 0."""
    model = Quadratic(symmetric([2.0] * 30))
    model.register_parameter("unused", nn.Parameter(torch.zeros(10, dtype=torch.float64)))
    found = flatness.spectrum(model, itself, probes=100)
    assert found.dimension == 40
    assert found.cumulative(1.0).item() == pytest.approx(0.25, abs=0.03)
    (own,) = (p for name, p in model.named_parameters() if name == "theta")
    assert flatness.spectrum(model, itself, parameters=[own]).cumulative(1.0).item() == 0


def test_a_loss_that_is_linear_has_its_whole_spectrum_at_zero() -> None:
    layer = nn.Linear(4, 1)
    found = flatness.spectrum(layer, lambda model: model(torch.ones(1, 4)).sum())
    assert (found.largest.item(), found.smallest.item(), found.trace.item()) == (0, 0, 0)
    assert found.negative_curvature.item() == 0
    assert found.density().values.isfinite().all()


# ---- the mean of several


def test_the_mean_over_probes_tends_to_the_exact_distribution() -> None:
    eigenvalues = [9.0, 4.0, *[1.0] * 8, *[0.1] * 10, *[0.0] * 12, *[-0.2] * 8]
    model, cuts = Quadratic(symmetric(eigenvalues)), torch.tensor([-0.3, -0.1, 0.05, 0.5, 2.0, 5.0, 10.0])
    exact = torch.tensor([sum(value <= cut for value in eigenvalues) / 40 for cut in cuts.tolist()])
    off = [
        (flatness.spectrum(model, itself, probes=number).cumulative(cuts) - exact).abs().max().item()
        for number in (1, 200)
    ]
    assert off[1] < 0.02  # the shares of a probe spread by 0.1
    assert off[1] < off[0]


def test_the_first_moment_gives_the_trace(case: Case) -> None:
    true = case.dense_hessian().trace().item()
    found = flatness.spectrum(case.model, case.loss, steps=1, probes=60)
    assert abs(found.trace.item() - true) <= 4 * found.trace_error.item()
    assert found.trace.item() == pytest.approx(found.dimension * found.moments(1).mean().item())
    assert math.isnan(flatness.spectrum(case.model, case.loss, steps=2, probes=1).trace_error)


def test_scaling_the_loss_scales_the_spectrum(case: Case) -> None:
    def scaled(model: Any) -> Tensor:
        return -8 * sum((part(model) for part in case.loss), start=torch.zeros((), dtype=torch.float64))

    one, other = (flatness.spectrum(case.model, loss, steps=7) for loss in (case.loss, scaled))
    for i in range(4):
        assert torch.allclose(-8 * one.values[i].flip(0), other.values[i], rtol=1e-8, atol=1e-9)
        assert torch.allclose(one.weights[i].flip(0), other.weights[i], rtol=1e-6, atol=1e-9)
    whole = one.negative_curvature + other.negative_curvature
    assert whole.item() == pytest.approx(1, rel=1e-9)


def test_negative_curvature_is_weighted_by_its_size() -> None:
    model = Quadratic(symmetric([*[2.0] * 10, *[1.0] * 10, *[-1.0] * 10, *[0.0] * 10]))
    found = flatness.spectrum(model, itself, probes=100)
    assert found.negative_curvature.item() == pytest.approx(1 / 6, abs=0.02)
    assert found.cumulative(-0.5).item() == pytest.approx(1 / 4, abs=0.03)
    assert flatness.spectrum(Quadratic(symmetric([2.0, 1.0])), itself).negative_curvature.item() == 0


@pytest.mark.parametrize("steps", [20, 60])
def test_negative_curvature_does_not_depend_on_the_nodes_beside_zero(steps: int) -> None:
    """As in a network: a few eigenvalues with a heavy tail, the others too small for a quadrature to tell from 0."""
    ranks = torch.arange(1, 301, dtype=torch.float64)
    tiny = torch.linspace(-1e-6, 1e-6, 20000, dtype=torch.float64)
    values = torch.cat([1.5 * ranks**-1.1, -0.5 * ranks**-0.8, tiny])
    model = nn.Linear(1, len(values), bias=False, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    found = flatness.spectrum(model, lambda model: (values * model(one)[0].square()).sum() / 2, steps=steps)
    seen = torch.stack(probes_of(model, 4)).square().mean(dim=0)
    exact = (seen * values.clamp(max=0).square()).sum() / (seen * values.square()).sum()
    assert found.negative_curvature.item() == pytest.approx(exact.item(), rel=0.01)


def test_the_extremes_are_those_that_scipy_finds(case: Case) -> None:
    dense = case.dense_hessian().numpy()
    operator = LinearOperator(dense.shape, matvec=lambda v: dense @ v, dtype=np.float64)
    found = flatness.spectrum(case.model, case.loss, steps=30)
    ends = [eigsh(operator, k=1, which=which, return_eigenvectors=False)[0] for which in ("SA", "LA")]
    assert [found.smallest.item(), found.largest.item()] == pytest.approx(ends, rel=1e-6, abs=1e-8)


# ---- the density


def test_the_density_integrates_to_one_and_to_the_first_moment(case: Case) -> None:
    found = flatness.spectrum(case.model, case.loss, steps=20)
    grid, values, width = found.density()
    assert torch.trapezoid(values, grid).item() == pytest.approx(1, abs=1e-5)
    mean = found.moments(1).mean().item()
    assert torch.trapezoid(values * grid, grid).item() == pytest.approx(mean, abs=1e-4 * float(found.largest))
    assert width == pytest.approx(0.01 * float(found.largest - found.smallest))


def test_the_density_is_a_bell_at_each_value() -> None:
    values = [torch.tensor(own, dtype=torch.float64) for own in ([0.0, 2.0], [2.0])]
    weights = [torch.tensor(own, dtype=torch.float64) for own in ([0.5, 0.5], [1.0])]
    found = flatness.Spectrum(values, weights, 2, 3)
    grid = torch.tensor([0.0, 2.0, 2.1])
    heights = found.density(grid, width=0.1).values
    peak = 1 / (0.1 * math.sqrt(2 * math.pi))
    assert heights.tolist() == pytest.approx([peak / 4, 3 * peak / 4, 3 * peak / 4 * math.exp(-0.5)], rel=1e-6)


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_a_single_eigenvalue_has_a_density_too(value: float) -> None:
    grid, values, _ = flatness.spectrum(Quadratic(symmetric([value] * 3)), itself).density()
    assert torch.trapezoid(values, grid).item() == pytest.approx(1, abs=1e-5)
    assert grid[values.argmax()].item() == pytest.approx(value, abs=1e-6)


# ---- how it is taken


def test_the_same_seed_gives_the_same_spectrum_and_products_are_counted() -> None:
    case, seen = Case("mlp"), list[int]()
    before = torch.get_rng_state()
    one = flatness.spectrum(case.model, case.loss, steps=5, probes=3, progress=seen.append)
    other = flatness.spectrum(case.model, case.loss, steps=5, probes=3)
    third = flatness.spectrum(case.model, case.loss, steps=5, probes=3, generator=torch.Generator().manual_seed(7))
    assert all(map(torch.equal, one.values, other.values))
    assert not torch.equal(one.values[0], third.values[0])
    assert torch.equal(before, torch.get_rng_state())
    assert one.products == 15
    assert seen == list(range(1, 16))


def test_a_product_takes_two_passes() -> None:
    """In parts, each product runs every part forward once; of a loss in one part the gradient's graph is kept."""
    case = Case("mlp")
    calls = [0]

    def counting(part: Any) -> Any:
        def counted(model: Any) -> Tensor:
            calls[0] += 1
            found: Tensor = part(model)
            return found

        return counted

    flatness.spectrum(case.model, [counting(part) for part in case.loss], steps=5, probes=2)
    assert calls[0] == 10 * len(case.loss)
    calls[0] = 0
    flatness.spectrum(case.model, counting(case.loss[0]), steps=5, probes=2)
    assert calls[0] == 1


@pytest.mark.parametrize("device", DEVICES)
def test_float32_comes_within_its_rounding(device: str) -> None:
    exact, rough = Case("convolutional"), Case("convolutional", dtype=torch.float32, device=device)
    rough.model.load_state_dict(exact.model.state_dict())
    rough.loss = flatness.empirical_risk(exact.x.float().to(device), exact.y.to(device))
    one, other = (flatness.spectrum(own.model, own.loss, steps=12) for own in (exact, rough))
    for degree in range(4):
        assert other.moments(degree).tolist() == pytest.approx(one.moments(degree).tolist(), rel=1e-3, abs=1e-5)
    assert all(w.sum().item() == pytest.approx(1, abs=1e-9) for w in other.weights)
    assert other.values[0].dtype == torch.float64
