"""The Hessian of trained networks, against PyHessian and curvlinops; and what these two do otherwise."""

import copy
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hessian_oracles as oracles
from flatmin import flatness

CPU = torch.device("cpu")
CURVLINOPS = "curvlinops is an oracle that requires torchvision; hessian_oracles.py says how to install it without"
needs_pyhessian = pytest.mark.skipif(
    find_spec("pyhessian") is None, reason="pyhessian is an oracle, installed with flatmin[dev]"
)
needs_curvlinops = pytest.mark.skipif(find_spec("curvlinops") is None, reason=CURVLINOPS)
DTYPES = pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-13), (torch.float32, 3e-6)], ids=str)


def of_dtype(problem: oracles.Problem, dtype: torch.dtype) -> oracles.Problem:
    return oracles.Problem(copy.deepcopy(problem.model).to(dtype), problem.x.to(dtype), problem.y)


def vectors_of(problem: oracles.Problem, dtype: torch.dtype) -> list[Tensor]:
    return [v.to(dtype) for v in oracles.normals(problem, 0, 2)]


@needs_pyhessian
@DTYPES
@pytest.mark.parametrize("seed", [0, 1], ids=["mlp", "convnet"])
def test_products_are_pyhessians(seed: int, dtype: torch.dtype, near: float) -> None:
    problem = oracles.trained(seed, CPU)
    rough = of_dtype(problem, dtype)
    with oracles.its_surroundings(dtype):
        theirs = oracles.their_hessian(rough)
        for v, ours in zip(
            vectors_of(problem, dtype), oracles.our_products(rough, vectors_of(problem, dtype)), strict=True
        ):
            _, found = theirs.dataloader_hv_product(rough.shaped(v))
            expected = torch.cat([piece.reshape(-1) for piece in found])
            assert (ours - expected).norm() <= near * expected.norm()


@needs_curvlinops
@DTYPES
@pytest.mark.parametrize("seed", [0, 1], ids=["mlp", "convnet"])
def test_products_are_those_of_curvlinops(seed: int, dtype: torch.dtype, near: float) -> None:
    problem = oracles.trained(seed, CPU)
    rough = of_dtype(problem, dtype)
    operator = oracles.their_operator(rough)
    for v, ours in zip(
        vectors_of(problem, dtype), oracles.our_products(rough, vectors_of(problem, dtype)), strict=True
    ):
        expected = operator @ v
        assert (ours - expected).norm() <= near * expected.norm()


@needs_pyhessian
def test_pyhessians_trace_and_ours_are_estimates_of_the_exact_one() -> None:
    """Hutchinson's method there, Hutch++ here; as many products as parameters give the trace itself."""
    problem = oracles.trained(0, CPU)
    exact = flatness.trace(problem.model, problem.risk, products=10_000)
    assert exact.error == 0
    ours = flatness.trace(problem.model, problem.risk, products=60)
    with oracles.its_surroundings():
        torch.manual_seed(0)
        drawn = torch.tensor(oracles.their_hessian(problem).trace(maxIter=200, tol=0.0))
    assert (drawn.mean() - exact.value).abs() <= 3 * drawn.std() / len(drawn) ** 0.5
    assert (ours.value - exact.value).abs() <= 3 * ours.error


@needs_pyhessian
def test_pyhessian_seeks_the_largest_absolute_value_and_flatmin_the_largest() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 1, bias=False).double()
    curvatures = torch.tensor([2.0, 1.0, -7.0], dtype=torch.float64)

    def criterion(_: Any, labels: Any) -> Tensor:
        return (curvatures * layer.weight.square()).sum() / 2

    problem = oracles.Problem(layer, torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1))
    assert flatness.top_eigenvalue(layer, lambda model: criterion(None, None)).item() == pytest.approx(2)
    with oracles.its_surroundings():
        found, _ = (
            import_module("pyhessian")
            .hessian(layer, criterion, data=(problem.x, problem.y), cuda=False)
            .eigenvalues(tol=1e-10)
        )
    assert found[0] == pytest.approx(-7, rel=1e-5)


class SpelledOut(nn.Module):
    """BatchNorm with the statistics of the batch, of elementary functions."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=(0, 2, 3), keepdim=True)
        deviation = (centred.square().mean(dim=(0, 2, 3), keepdim=True) + self.eps).sqrt()
        return centred / deviation * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def batch_norm(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    own = nn.BatchNorm2d(norm.num_features, norm.eps, track_running_stats=False).double()
    own.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    return own


def with_batch_statistics(problem: oracles.Problem, new: Callable[[nn.BatchNorm2d], nn.Module]) -> oracles.Problem:
    model = copy.deepcopy(problem.model)
    for name, norm in list(model.named_modules()):
        if isinstance(norm, nn.BatchNorm2d):
            model.set_submodule(name, new(norm))
    return oracles.Problem(model.eval(), problem.x, problem.y)


def test_products_through_the_statistics_of_a_batch_are_those_of_batchnorm_spelled_out() -> None:
    """Whether the batch's statistics come from `track_running_stats=False` or from a loss in train mode.

    curvlinops is percents off in the former, and fails in the latter.
    """
    problem = oracles.trained(1, CPU)
    vectors = oracles.normals(problem, 0, 2)
    expected = oracles.our_products(with_batch_statistics(problem, SpelledOut), vectors)
    found = oracles.our_products(with_batch_statistics(problem, batch_norm), vectors)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    before = copy.deepcopy(problem.model.state_dict())
    in_train_mode = [
        lambda model, x=x, y=y: len(x) / len(problem.x) * cross_entropy(model.train()(x), y) for x, y in problem.batches
    ]
    torch.testing.assert_close(
        oracles.products(problem.model, in_train_mode, vectors), expected, rtol=1e-10, atol=1e-10
    )
    assert not problem.model.training
    assert all(
        torch.equal(now, then) for now, then in zip(problem.model.state_dict().values(), before.values(), strict=True)
    )


@needs_curvlinops
def test_curvlinops_agrees_once_batchnorm_is_spelled_out() -> None:
    problem = with_batch_statistics(oracles.trained(1, CPU), SpelledOut)
    (v,) = oracles.normals(problem, 0, 1)
    (ours,) = oracles.our_products(problem, [v])
    torch.testing.assert_close(ours, (oracles.their_operator(problem) @ v).detach(), rtol=1e-10, atol=1e-10)
