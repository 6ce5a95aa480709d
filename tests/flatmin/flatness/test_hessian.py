"""The Hessian's largest eigenvalues and trace, against the dense Hessian in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatmin import flatness
from flatmin.flatness.hessian import hessian_products
from flatmin.flatness.risk import parts_of
from flatmin.flatness.weights import Weights
from tests.support.flatness_cases import CASES, DEVICES, Case, Quadratic, flat, itself, symmetric


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


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
    assert found.products == 12
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
        for seed in range(24)
    ]
    values = torch.stack([found.value for found in drawn])
    off = [abs(found.value.item() - true) / max(found.error.item(), 1e-12) for found in drawn]
    assert abs(values.mean().item() - true) <= 4 * values.std().item() / 24**0.5 + 1e-12
    assert sum(ratio <= 3 for ratio in off) >= 20  # six samples: a t-distribution's tails


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
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    found = flatness.top_eigenvalues(model, loss, max_products=300, tolerance=1e-8)
    (vector,) = found.vectors
    h = 1e-4
    weights = Weights(model)
    with weights.movable():  # the second difference along the eigenvector, by hand
        losses = []
        for step in (-h, 0.0, h):
            weights.move([step * d for d in vector])
            losses.append(cross_entropy(model(x), y).item())
    assert (losses[0] - 2 * losses[1] + losses[2]) / h**2 == pytest.approx(found.values[0].item(), rel=1e-4)
    assert torch.equal(theta, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


@pytest.mark.parametrize("outlier", [1.005, 1.09, 3.0])
def test_one_eigenvalue_that_stands_out_among_many_equal_ones_is_found(outlier: float) -> None:
    """A random vector of 200,000 dimensions sees it by a share of 1/450: the first products look converged."""
    diagonal = torch.ones(200_000)
    diagonal[7] = outlier

    class Bowl(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(len(diagonal)))

        def forward(self) -> Tensor:
            return (diagonal * self.theta.square()).sum() / 2

    found = flatness.top_eigenvalues(Bowl(), itself)
    assert found.values[0].item() == pytest.approx(outlier, rel=1e-4)


def test_a_million_weights_in_float32_lose_no_digits() -> None:
    """Added up in one go, the products of a million float32 numbers are 4e-4 off on the CPU."""
    diagonal = torch.ones(1_000_000)
    diagonal[7] = 10.0
    theta = nn.Linear(1_000_000, 1, bias=False)
    found = flatness.top_eigenvalue(theta, lambda _: (diagonal * theta.weight.square()).sum() / 2)
    assert found.item() == pytest.approx(10, rel=1e-5)


def test_a_large_negative_eigenvalue_does_not_end_the_search_for_positive_ones() -> None:
    torch.manual_seed(0)
    model = Quadratic(torch.diag(torch.cat([torch.rand(498), torch.tensor([-1e4, 3.0])])))
    found = flatness.top_eigenvalues(model, itself, k=2)
    assert found.values[0].item() == pytest.approx(3, rel=1e-3)
    assert found.values[1].item() == pytest.approx(model.h.diagonal()[:498].max().item(), rel=5e-3)


def test_a_compiled_model_has_a_hessian_too() -> None:
    case = Case("mlp")
    compiled: Any = torch.compile(case.model, backend="aot_eager")
    plain = flatness.top_eigenvalue(case.model, case.loss)
    assert flatness.top_eigenvalue(compiled, case.loss).item() == pytest.approx(plain.item(), rel=1e-9)


@pytest.mark.cuda
def test_a_recurrent_network_has_gradients_on_a_gpu_in_eval_mode() -> None:
    torch.manual_seed(0)
    model, x, y = Attention().double(), torch.randn(5, 6, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    here = flatness.top_eigenvalue(model, flatness.empirical_risk(x, y)).item()
    there = flatness.top_eigenvalue(model.cuda(), flatness.empirical_risk(x.cuda(), y.cuda())).item()
    assert there == pytest.approx(here, rel=1e-6)
    assert torch.backends.cudnn.enabled
