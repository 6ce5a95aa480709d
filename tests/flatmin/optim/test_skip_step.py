"""A gradient that is not finite never reaches the weights or the optimizer's state."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import flatmin
from tests.support.cases import MakeBase, Setup, run, same, setup, tensors_in


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_gradient_that_is_not_finite_leaves_theta_and_a_finite_state(
    make_base: MakeBase, poison: float, spoilt: int
) -> None:
    for steps_before in (0, 2):  # with lazy state not made yet, and made
        case = setup("conv-batchnorm")
        optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1, inner_iter=2)
        run(case, optimizer, steps_before)
        theta, calls = case.weights(), 0

        def closure(case: Setup = case, optimizer: flatmin.AMP = optimizer) -> Tensor:
            nonlocal calls
            loss = case.closure(optimizer)()
            if calls == spoilt:
                case.model[1].weight.grad[2, 0, 1, 1] = poison  # type: ignore[index]
            calls += 1
            return loss

        optimizer.step(closure)
        assert optimizer.last.skipped
        assert same(case.weights(), theta)
        assert all(t.isfinite().all() for t in tensors_in(optimizer))
        assert all(buffer.isfinite().all() for buffer in case.model.buffers())
        assert all(t.abs().max() < 1e6 for t in tensors_in(optimizer))
        assert not same(run(case, optimizer, 1), theta)
        assert not optimizer.last.skipped


def test_a_bad_gradient_in_a_group_with_epsilon_zero_is_skipped_too(make_base: MakeBase) -> None:
    case = setup()
    first, second = case.layers()
    groups = [{"params": first, "epsilon": 0.0}, {"params": second}]
    optimizer = flatmin.AMP(make_base(groups), epsilon=0.1)
    run(case, optimizer, 2)
    theta = case.weights()

    def closure() -> Tensor:
        loss = case.closure(optimizer)()
        first[1].grad[0] = float("nan")  # type: ignore[index]
        return loss

    optimizer.step(closure)
    assert optimizer.last.skipped
    assert same(case.weights(), theta)


def test_rmp_skips_a_gradient_that_is_not_finite(make_base: MakeBase) -> None:
    case = setup()
    optimizer = flatmin.RMP(make_base(case.model.parameters()), epsilon=0.1)
    run(case, optimizer, 2)
    theta = case.weights()

    def closure() -> Tensor:
        loss = case.closure(optimizer)()
        case.model[0].bias.grad[0] = float("inf")  # type: ignore[index]
        return loss

    optimizer.step(closure)
    assert optimizer.last.skipped
    assert same(case.weights(), theta)
    assert all(t.isfinite().all() for t in tensors_in(optimizer))


def test_a_zero_gradient_gives_no_perturbation_and_an_ordinary_step(make_base: MakeBase) -> None:
    plain, wrapped = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for weight, optimizer in (
        (plain, make_base([plain])),
        (wrapped, flatmin.AMP(make_base([wrapped]), epsilon=0.1)),
    ):

        def closure(weight: Tensor = weight, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (weight * 0).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)  # type: ignore[arg-type]
    assert same([wrapped], [plain])
    assert isinstance(optimizer, flatmin.AMP)
    assert optimizer.last.delta_norm == 0
    assert not optimizer.last.skipped


@pytest.mark.parametrize("base", [SGD, AdamW])
def test_a_copy_of_a_fused_base_skips_by_itself_too(base: Callable[..., Optimizer]) -> None:
    case = setup()
    settings = {"momentum": 0.9} if base is SGD else {}
    optimizer = flatmin.AMP(base(case.model.parameters(), lr=0.1, fused=True, **settings), epsilon=0.1)
    run(case, optimizer, 2)
    copied, its_optimizer = deepcopy((case, optimizer))
    before = [tensor.clone() for tensor in tensors_in(its_optimizer)]

    def closure() -> Tensor:
        loss = copied.closure(its_optimizer)()
        for param in copied.model.parameters():
            param.grad = torch.full_like(param, float("nan"))
        return loss

    its_optimizer.step(closure)
    assert its_optimizer.last.skipped
    assert same(tensors_in(its_optimizer), before)
