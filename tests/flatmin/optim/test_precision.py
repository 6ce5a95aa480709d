"""A perturbation survives rounding: L(θ + Δ) − L(θ) in half precision against float64, as the optimizer measures it.

Δ of length 0.1 over a hundred thousand weights moves each by some 3e-4, less than the distance of neighbouring bfloat16
numbers beside most of them. But Δ points where the loss rises, and rounding errors point everywhere.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import flatmin
from flatmin.ball import Ball
from flatmin_lab.data import load
from flatmin_lab.data.normalise import Normalisation
from tests.support.cases import same


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load("digits").train
    return Normalisation.of(data)(data.x)[:400].flatten(1), data.y[:400]


@pytest.fixture(scope="module")
def trained(digits: tuple[Tensor, Tensor]) -> nn.Module:
    torch.manual_seed(0)
    x, y = digits
    model = nn.Sequential(nn.Linear(x.shape[1], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def sharpness(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    epsilon: float = 0.1,
) -> float:
    """L(θ + Δ) − L(θ) as a step with rate 0 measures it; Δ lies on the ball."""
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.0), epsilon=epsilon, inner_lr=1e3, model=model)
    dtype, device = next(model.parameters()).dtype, x.device.type
    cast: AbstractContextManager[None] = nullcontext() if autocast is None else torch.autocast(device, autocast)
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> Tensor:
        optimizer.zero_grad()
        with cast:
            logits = model(x.to(dtype))
        loss = cross_entropy(logits.double(), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    optimizer.step(closure, scaler=scaler)
    if scaler is not None:
        scaler.update()
    assert same(model.parameters(), before)  # rate 0: and θ came back to the bit
    assert optimizer.last.loss is not None
    assert optimizer.last.loss_perturbed is not None
    assert optimizer.last.on_ball == 1
    return float(optimizer.last.loss_perturbed - optimizer.last.loss)


def off(rounded: list[float], exact: list[float]) -> float:
    """The mean error, as a share of the mean."""
    return sum(abs(a - b) for a, b in zip(exact, rounded, strict=True)) / sum(exact)


def batches(digits: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = digits
    yield from ((x[start::8], y[start::8]) for start in range(8))


@pytest.mark.parametrize(
    ("autocast", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.005), (None, 1e-4)], ids=str
)
@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.5])
def test_under_autocast_the_sharpness_is_that_of_float64(
    trained: nn.Module, digits: tuple[Tensor, Tensor], autocast: torch.dtype | None, tolerance: float, epsilon: float
) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**10) if autocast == torch.float16 else None
    exact, rounded = [], []
    for x, y in batches(digits):
        exact.append(sharpness(copy.deepcopy(trained).double(), x, y, epsilon=epsilon))
        rounded.append(sharpness(trained, x, y, autocast=autocast, scaler=scaler, epsilon=epsilon))
    assert min(exact) > 0
    assert off(rounded, exact) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.5])
def test_weights_in_half_precision_keep_it_too(
    trained: nn.Module, digits: tuple[Tensor, Tensor], dtype: torch.dtype, epsilon: float
) -> None:
    """θ + Δ is rounded to the weights' own digits, number by number; the loss there is right all the same."""
    coarse, exact, rounded = copy.deepcopy(trained).to(dtype), [], []
    for x, y in batches(digits):
        exact.append(sharpness(copy.deepcopy(coarse).double(), x.to(dtype), y, epsilon=epsilon))
        rounded.append(sharpness(coarse, x, y, epsilon=epsilon))
    assert off(rounded, exact) < 0.05


@pytest.mark.cuda
@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 0.005), ("bfloat16", 0.02), ("float16", 0.005)])
def test_on_a_gpu_too(trained: nn.Module, digits: tuple[Tensor, Tensor], precision: str, tolerance: float) -> None:
    model, exact, rounded = copy.deepcopy(trained).cuda(), [], []
    autocast = None if precision == "tf32" else getattr(torch, precision)
    scaler = GradScaler("cuda", init_scale=2.0**10) if precision == "float16" else None
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        for x, y in batches(digits):
            exact.append(sharpness(copy.deepcopy(model).double(), x.cuda(), y.cuda()))
            rounded.append(sharpness(model, x.cuda(), y.cuda(), autocast=autocast, scaler=scaler))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert off(rounded, exact) < tolerance


@pytest.mark.parametrize("ball", ["global", "tensor"])
def test_a_gradient_whose_squares_underflow_is_followed_all_the_same(ball: Ball) -> None:
    """Δ = ζ∇J lies inside the ball; only the norms that are reported are 0, as torch's own would be."""
    weight = nn.Parameter(torch.tensor([3e-25, 4e-25]))
    optimizer = flatmin.AMP(SGD([weight], lr=0.5), epsilon=0.1, ball=ball)
    weight.grad = weight.detach().clone()
    with optimizer.perturbed():
        assert torch.equal(weight, torch.tensor([6e-25, 8e-25]))
        weight.grad = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, torch.zeros(2))
    assert optimizer.last.grad_norm == nn.utils.get_total_norm([torch.tensor([3e-25, 4e-25])]) == 0
    assert not optimizer.last.skipped
