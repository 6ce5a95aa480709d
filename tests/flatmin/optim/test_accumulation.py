"""Gradient accumulation: micro-batches in one closure are one large batch; in a list, each climbs on its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD

import flatmin
from flatmin.optim.update.accumulation import MeanGradient
from tests.support.cases import MakeBase, Method, Setup, same, setup, tensors_in

Closure = Callable[[], Tensor]


def parts(case: Setup, count: int = 2) -> list[Setup]:
    return [Setup(case.model, case.x[part::count], case.y[part::count]) for part in range(count)]


def closures(case: Setup, optimizer: Any, count: int = 2) -> list[Closure]:
    return [part.closure(optimizer) for part in parts(case, count)]


def four_times(param: nn.Parameter, optimizer: Any) -> Closure:
    """A loss with the gradient 4."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.sum() * 4
        loss.backward()
        return loss

    return closure


def accumulating(case: Setup, optimizer: Any, count: int) -> Closure:
    """All micro-batches in one closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in parts(case, count):
            loss = part.loss() / count
            loss.backward()
            total += loss.detach()
        return total

    return closure


@pytest.mark.parametrize("count", [2, 5])
def test_micro_batches_in_one_closure_are_one_large_batch(method: Method, count: int) -> None:
    whole, cut = setup(dtype=torch.float64), setup(dtype=torch.float64)
    torch.manual_seed(1)
    one = method(SGD(whole.model.parameters(), lr=0.1, momentum=0.9), model=whole.model)
    for _ in range(4):
        one.step(whole.closure(one))
    torch.manual_seed(1)
    several = method(SGD(cut.model.parameters(), lr=0.1, momentum=0.9), model=cut.model)
    for _ in range(4):
        several.step(accumulating(cut, several, count))
    torch.testing.assert_close(cut.weights(), whole.weights(), rtol=1e-6, atol=1e-7)  # losses are float32's
    torch.testing.assert_close(several.last.delta_norm, one.last.delta_norm, rtol=1e-5, atol=0)


def test_in_blocks_too() -> None:
    whole, cut = setup(dtype=torch.float64), setup(dtype=torch.float64)
    one, several = (flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1) for case in (whole, cut))
    for _ in range(3):
        whole.step_in_blocks(one)
        several.zero_grad()
        for part in parts(cut):
            (part.loss() / 2).backward()
        with several.perturbed():
            for part in parts(cut):
                (part.loss() / 2).backward()
        several.step()
    torch.testing.assert_close(cut.weights(), whole.weights(), rtol=1e-6, atol=1e-7)


def test_a_list_of_one_is_the_closure_itself(method: Method, model_name: str) -> None:
    left, right = setup(model_name), setup(model_name)
    for case, as_list in ((left, False), (right, True)):
        torch.manual_seed(1)
        optimizer = method(SGD(case.model.parameters(), lr=0.1, momentum=0.9), model=case.model)
        for _ in range(3):
            closure = case.closure(optimizer)
            result = optimizer.step([closure] if as_list else closure)
            assert isinstance(result, list) == as_list
    assert same(left.weights(), right.weights())
    assert same(left.buffers(), right.buffers())


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_in_a_list_each_micro_batch_has_its_own_perturbation(inner_iter: int) -> None:
    """By hand: the gradient of each part at its own θ + Δᵢ, then one step with their mean."""
    case, twin = setup(), setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, inner_iter=inner_iter)
    base = SGD(twin.model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        losses = optimizer.step(closures(case, optimizer, 3))
        means = [torch.zeros_like(p) for p in twin.model.parameters()]
        expected = []
        for part in parts(twin, 3):
            alone = Setup(setup().model, part.x, part.y)
            alone.model.load_state_dict(twin.model.state_dict())
            still = flatmin.AMP(SGD(alone.model.parameters(), lr=0.0), epsilon=0.1, inner_iter=inner_iter)
            expected.append(still.step(alone.closure(still)))
            for mean, param in zip(means, alone.model.parameters(), strict=True):
                assert param.grad is not None
                mean.add_(param.grad / 3)
        for param, mean in zip(twin.model.parameters(), means, strict=True):
            param.grad = mean
        base.step()
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(optimizer.last.loss, torch.stack(expected).mean().detach())
        torch.testing.assert_close(case.weights(), twin.weights())


def test_perturbations_of_their_own_are_not_one_for_all() -> None:
    apart, together = setup(), setup()
    first, second = (flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.5) for case in (apart, together))
    first.step(closures(apart, first))
    second.step(accumulating(together, second, 2))
    assert not torch.allclose(apart.weights()[0], together.weights()[0], rtol=1e-4)


def test_with_epsilon_zero_a_list_is_the_bases_step_with_the_mean_gradient(make_base: MakeBase) -> None:
    plain, wrapped = setup(), setup()
    base = make_base(plain.model.parameters())
    optimizer = flatmin.AMP(make_base(wrapped.model.parameters()), epsilon=0.0)
    for _ in range(3):
        accumulating(plain, base, 2)()
        base.step()
        optimizer.step(closures(wrapped, optimizer))
        assert optimizer.last.loss is not None
    torch.testing.assert_close(wrapped.weights(), plain.weights())


def test_batchnorm_counts_every_micro_batch_once() -> None:
    plain, wrapped = setup("conv-batchnorm"), setup("conv-batchnorm")
    optimizer = flatmin.AMP(SGD(wrapped.model.parameters(), lr=0.0), epsilon=0.1, model=wrapped.model)
    for _ in range(2):
        optimizer.step(closures(wrapped, optimizer))
        for part in parts(plain):
            part.loss()
    assert same(plain.buffers(), wrapped.buffers())


@pytest.mark.parametrize("failing", range(6))
def test_an_exception_in_any_pass_of_any_micro_batch_loses_nothing(failing: int) -> None:
    case = setup("conv-batchnorm")
    optimizer = flatmin.AMP(
        SGD(case.model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, inner_iter=2, model=case.model
    )
    optimizer.step(closures(case, optimizer))
    before = case.weights(), case.buffers(), [t.clone() for t in tensors_in(optimizer)], torch.get_rng_state()
    calls = 0

    def breaking(closure: Closure) -> Closure:
        def run() -> Tensor:
            nonlocal calls
            loss = closure()
            calls += 1
            if calls == failing + 1:
                raise KeyboardInterrupt
            return loss

        return run

    with pytest.raises(KeyboardInterrupt):
        optimizer.step([breaking(closure) for closure in closures(case, optimizer)])
    assert same(case.weights(), before[0])
    assert same(case.buffers(), before[1])
    assert same(tensors_in(optimizer), before[2])
    assert torch.equal(torch.get_rng_state(), before[3])


@pytest.mark.parametrize("spoilt", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("unscale", [False, True])
def test_overflow_in_any_pass_of_any_micro_batch_skips_the_step(
    make_base: MakeBase, spoilt: int | None, unscale: bool
) -> None:
    case, twin = setup(), setup()
    optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1)
    expected = flatmin.AMP(make_base(twin.model.parameters()), epsilon=0.1)
    scaler, calls = GradScaler("cpu", init_scale=2.0**12), 0

    def scaled(part: Setup) -> Closure:
        def closure() -> Tensor:
            nonlocal calls
            optimizer.zero_grad()
            loss = part.loss()
            scaler.scale(loss).backward()
            if calls == spoilt:
                for param in case.model.parameters():
                    assert param.grad is not None
                    param.grad.fill_(float("inf"))
            if unscale:
                scaler.unscale_(optimizer)
            calls += 1
            return loss

        return closure

    theta = case.weights()
    optimizer.step([scaled(part) for part in parts(case)], scaler=scaler)
    scaler.update()
    if spoilt is None:
        expected.step(closures(twin, expected))
        torch.testing.assert_close(case.weights(), twin.weights(), rtol=1e-6, atol=1e-7)
    else:
        assert optimizer.last.skipped
        assert same(case.weights(), theta)
        assert scaler.get_scale() == 2.0**11


def test_a_parameter_that_one_micro_batch_alone_uses_counts_as_nothing_in_the_others() -> None:
    first, second = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))
    optimizer = flatmin.AMP(SGD([first, second], lr=1.0), epsilon=1e-6)

    optimizer.step([four_times(first, optimizer), four_times(second, optimizer)])
    assert [first.item(), second.item()] == [-1.0, 0.0]


def test_sparse_gradients_of_a_group_that_is_left_alone_are_averaged() -> None:
    embedding, head = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": embedding.parameters(), "epsilon": 0.0}, {"params": head.parameters()}]
    optimizer = flatmin.AMP(SGD(groups, lr=1.0), epsilon=0.1)
    before = embedding.weight.detach().clone()

    def of(row: int) -> Closure:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = embedding(torch.tensor([row])).sum() + 0 * head(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        return closure

    optimizer.step([of(0), of(2)])
    torch.testing.assert_close(
        before - embedding.weight.detach(), torch.tensor([[0.5, 0.5], [0, 0], [0.5, 0.5], [0, 0]])
    )


def test_half_precision_gradients_are_added_up_in_float32() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = flatmin.AMP(SGD([weight], lr=1.0), epsilon=1e-6)

    def of(slope: float) -> Closure:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (weight * slope).sum()
            loss.backward()
            return loss

        return closure

    optimizer.step([of(256.0), *([of(1.0)] * 3)])  # 256 + 1 = 256 in bfloat16
    assert weight.item() == -float(torch.tensor(259 / 4, dtype=torch.bfloat16))


def test_bad_closures_are_named_and_lose_nothing() -> None:
    case = setup()
    optimizer, theta = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1), case.weights()
    with pytest.raises(ValueError, match="or a list with one per micro-batch, got an empty list"):
        optimizer.step([])
    with pytest.raises(TypeError, match="got an object of type float by position"):
        optimizer.step([case.closure(optimizer), 0.5])  # type: ignore[list-item]
    for wrong in (case.loss, [case.closure(optimizer), case.loss]):
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"no parameter got a gradient in the closure; call backward\(\) inside"):
            optimizer.step(wrong)
        assert same(case.weights(), theta)
    optimizer.step(closures(case, optimizer))
    assert not same(case.weights(), theta)


def test_a_scaler_that_scales_nothing_is_an_error_that_names_the_way_out(method: Method) -> None:
    case, scaler = setup(), GradScaler("cpu")
    optimizer = method(SGD(case.model.parameters(), lr=0.1))
    theta = case.weights()
    words = r"has not scaled any loss.*call scaler.scale\(loss\).backward\(\), or leave out scaler="
    with pytest.raises(RuntimeError, match=words):
        optimizer.step(case.closure(optimizer), scaler=scaler)
    assert same(case.weights(), theta)
    optimizer.param_groups[0]["epsilon"] = 0.0
    with pytest.raises(RuntimeError, match=words):
        optimizer.step(case.closure(optimizer), scaler=scaler)
    assert same(case.weights(), theta)
    optimizer.step(case.closure(optimizer))
    assert not same(case.weights(), theta)


def test_losses_that_cannot_be_averaged_are_passed_through_all_the_same() -> None:
    """A tuple's first tensor counts as the loss; logits of micro-batches of different sizes have no mean."""
    for epsilon in (0.0, 0.1):
        case = setup()
        optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=epsilon)

        def of(part: Setup, optimizer: flatmin.AMP = optimizer) -> Callable[[], tuple[Tensor, Tensor]]:
            def closure() -> tuple[Tensor, Tensor]:
                optimizer.zero_grad()
                loss = part.loss()
                loss.backward()
                return part.model(part.x), loss

            return closure

        uneven = [Setup(case.model, case.x[:3], case.y[:3]), Setup(case.model, case.x[3:], case.y[3:])]
        results = optimizer.step([of(part) for part in uneven])
        assert [len(logits) for logits, _ in results] == [3, 7]
        assert optimizer.last.loss is None


def test_a_micro_batch_with_nothing_to_perturb_does_not_hide_the_others_numbers() -> None:
    chosen, rest = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))
    groups: list[dict[str, Any]] = [{"params": [chosen]}, {"params": [rest], "epsilon": 0.0}]
    optimizer = flatmin.AMP(SGD(groups, lr=1.0), epsilon=0.1)

    optimizer.step([four_times(rest, optimizer), four_times(chosen, optimizer)])
    assert optimizer.last.grad_norm == 4
    torch.testing.assert_close(optimizer.last.delta_norm, torch.tensor(0.1))


def test_sparse_and_dense_gradients_of_one_parameter_are_added() -> None:
    weight = nn.Parameter(torch.zeros(3))
    for order in (0, 1):
        mean = MeanGradient([weight])
        kinds = [torch.ones(3), torch.tensor([2.0, 0.0, 0.0]).to_sparse()]
        for gradient in (kinds[order], kinds[1 - order]):
            weight.grad = gradient
            mean.add()
            weight.grad = None
        mean.write_mean()
        torch.testing.assert_close(weight.grad, torch.tensor([1.5, 0.5, 0.5]))


def test_lbfgs_takes_one_closure() -> None:
    case = setup()
    optimizer = flatmin.AMP(torch.optim.LBFGS(case.model.parameters()), epsilon=0.0)
    with pytest.raises(TypeError, match="LBFGS evaluates its closure itself and takes only one, got 2"):
        optimizer.step(closures(case, optimizer))


def test_a_weight_with_gaps_that_only_a_later_micro_batch_uses_is_moved_alone() -> None:
    """What lies in the gaps is somebody else's."""
    ended = []
    for gaps in (True, False):
        torch.manual_seed(0)
        first, memory = nn.Parameter(torch.randn(3)), torch.randn(4, 6)
        second = nn.Parameter(memory[:, :3] if gaps else memory[:, :3].clone())
        optimizer = flatmin.AMP(SGD([first, second], lr=0.1), epsilon=0.5)
        others = memory[:, 3:].clone()

        def micro_batch(uses_both: bool, optimizer: Any = optimizer, params: Any = (first, second)) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = sum(param.square().sum() for param in params[: 1 + uses_both])
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step([partial(micro_batch, False), partial(micro_batch, True)])
        assert torch.equal(memory[:, 3:], others)
        ended.append([first, second])
    assert all(torch.allclose(a, b) for a, b in zip(*ended, strict=True))


@pytest.mark.skipif(not hasattr(torch.zeros(1), "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_wider_than_their_weights_stay_so() -> None:
    """A micro-batch that does not use a weight leaves its gradient to the mean, in the dtype that it must have."""
    layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]).bfloat16()
    for param in layers.parameters():
        param.grad_dtype = torch.float32
    optimizer = flatmin.AMP(torch.optim.SGD(layers.parameters(), lr=0.1, foreach=False), epsilon=0.1)
    x = torch.randn(8, 4).bfloat16()

    def closure(used: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum(layer(x).float().square().mean() for layer in layers[:used])
        loss.backward()
        return loss

    optimizer.step([lambda: closure(2), lambda: closure(1)])
    assert {param.grad.dtype for param in layers.parameters() if param.grad is not None} == {torch.float32}


def test_closures_that_leave_zeroing_to_the_step_do_not_add_up_over_steps() -> None:
    """Neither while nothing is perturbed, nor when it starts, nor after a checkpoint."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = flatmin.AMP(SGD([weight], lr=0.0), epsilon=0.1)
    scheduler = flatmin.RadiusScheduler(optimizer, 4, start=0.5)

    def closure() -> Tensor:
        loss = weight.sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step([closure, closure])
        assert weight.grad == 1
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
