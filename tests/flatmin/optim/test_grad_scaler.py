"""fp16 with torch.amp.GradScaler: the same numbers, the same skipped steps, no more host reads than the base's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD

import flatmin
from tests.support.cases import OPTIMIZERS, MakeBase, Method, Setup, run, same, setup, tensors_in
from tests.support.host_sync import HostReads


def scaled_closure(
    case: Setup, optimizer: torch.optim.Optimizer, scaler: GradScaler, spoilt: tuple[int, ...] = ()
) -> Callable[[], Tensor]:
    """Passes whose number is in `spoilt` get a gradient that overflowed."""
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        optimizer.zero_grad()
        loss = case.loss()
        scaler.scale(loss).backward()
        if calls in spoilt:
            for param in case.model.parameters():
                if param.grad is not None:
                    param.grad.view(-1)[0] = float("inf")
        calls += 1
        return loss

    return closure


def new_scaler(**settings: float) -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**12, **settings)  # type: ignore[arg-type]


def test_scaled_steps_equal_plain_ones_bit_for_bit(method: Method, make_base: MakeBase) -> None:
    """The scale is a power of two, so nothing is rounded on the way."""
    plain, scaled = setup("conv-batchnorm"), setup("conv-batchnorm")
    torch.manual_seed(1)
    expected = run(plain, method(make_base(plain.model.parameters())), 4)
    torch.manual_seed(1)
    optimizer, scaler = method(make_base(scaled.model.parameters())), new_scaler()
    for _ in range(4):
        loss = optimizer.step(scaled_closure(scaled, optimizer, scaler), scaler=scaler)
        assert torch.equal(optimizer.last.loss, loss)  # type: ignore[arg-type]
        assert not optimizer.last.skipped
        scaler.update()
    for weight, value in zip(scaled.weights(), expected, strict=True):
        torch.testing.assert_close(weight, value, rtol=1e-6, atol=1e-7)


def test_blocks_take_a_scaler_and_equal_the_closure_form(make_base: MakeBase) -> None:
    for inner_iter in (1, 2):
        first, second = setup(), setup()
        with_closure = flatmin.AMP(make_base(first.model.parameters()), epsilon=0.1, inner_iter=inner_iter)
        in_blocks = flatmin.AMP(make_base(second.model.parameters()), epsilon=0.1, inner_iter=inner_iter)
        scaler, scaler_of_blocks = new_scaler(), new_scaler()
        for _ in range(3):
            with_closure.step(scaled_closure(first, with_closure, scaler), scaler=scaler)
            scaler.update()
            in_blocks.zero_grad()
            scaler_of_blocks.scale(second.loss()).backward()
            for _ in range(inner_iter):
                with in_blocks.perturbed(scaler=scaler_of_blocks):
                    scaler_of_blocks.scale(second.loss()).backward()
            in_blocks.step(scaler=scaler_of_blocks)
            scaler_of_blocks.update()
        assert same(first.weights(), second.weights())


@pytest.mark.parametrize("spoilt", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_overflow_in_any_pass_is_skipped_and_lowers_the_scale(
    make_base: MakeBase, spoilt: tuple[int, ...], steps_before: int
) -> None:
    case = setup("conv-batchnorm")
    optimizer, scaler = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1, inner_iter=2), new_scaler()
    for _ in range(steps_before):
        optimizer.step(scaled_closure(case, optimizer, scaler), scaler=scaler)
        scaler.update()
    theta, state = case.weights(), [t.clone() for t in tensors_in(optimizer)]
    optimizer.step(scaled_closure(case, optimizer, scaler, spoilt), scaler=scaler)
    scaler.update()
    assert optimizer.last.skipped
    assert scaler.get_scale() == 2.0**11
    assert same(case.weights(), theta)
    assert all(buffer.isfinite().all() for buffer in case.model.buffers())
    if steps_before:
        assert same(tensors_in(optimizer), state)
    assert all(bool((t == 0).all()) for t in tensors_in(optimizer) if not steps_before)
    optimizer.step(scaled_closure(case, optimizer, scaler), scaler=scaler)
    scaler.update()
    assert not optimizer.last.skipped
    assert not same(case.weights(), theta)


def test_a_scale_that_is_much_too_large_comes_down_by_itself() -> None:
    case = setup()
    optimizer, scaler = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1), GradScaler("cpu", 2.0**127)
    theta, skipped = case.weights(), 0
    while same(case.weights(), theta):
        optimizer.step(scaled_closure(case, optimizer, scaler), scaler=scaler)
        skipped += bool(optimizer.last.skipped)
        scaler.update()
        assert skipped < 100
    assert skipped > 0
    assert scaler.get_scale() == 2.0 ** (127 - skipped)


def test_gradients_can_be_unscaled_and_clipped_before_the_step() -> None:
    first, second = setup(), setup()
    plain = flatmin.AMP(SGD(first.model.parameters(), lr=0.1), epsilon=0.1)
    scaled, scaler = flatmin.AMP(SGD(second.model.parameters(), lr=0.1), epsilon=0.1), new_scaler()
    for _ in range(3):
        plain.zero_grad()
        first.loss().backward()
        with plain.perturbed():
            first.loss().backward()
        torch.nn.utils.clip_grad_norm_(first.model.parameters(), 0.1)
        plain.step()

        scaled.zero_grad()
        scaler.scale(second.loss()).backward()
        with scaled.perturbed(scaler=scaler):
            scaler.scale(second.loss()).backward()
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(second.model.parameters(), 0.1)
        scaled.step(scaler=scaler)
        scaler.update()
    for weight, value in zip(second.weights(), first.weights(), strict=True):
        torch.testing.assert_close(weight, value, rtol=1e-6, atol=1e-7)


def test_a_scaler_that_is_switched_off_changes_nothing(make_base: MakeBase) -> None:
    plain, wrapped = setup(), setup()
    expected = run(plain, flatmin.AMP(make_base(plain.model.parameters()), epsilon=0.1), 3)
    optimizer, scaler = (
        flatmin.AMP(make_base(wrapped.model.parameters()), epsilon=0.1),
        GradScaler("cpu", enabled=False),
    )
    for _ in range(3):
        optimizer.step(scaled_closure(wrapped, optimizer, scaler), scaler=scaler)
        scaler.update()
    assert same(wrapped.weights(), expected)
    optimizer.step(scaled_closure(wrapped, optimizer, scaler, spoilt=(0,)), scaler=scaler)
    assert optimizer.last.skipped


def test_with_epsilon_zero_a_scaled_step_is_the_bases_own(make_base: MakeBase) -> None:
    plain, wrapped = setup(), setup()
    base, base_scaler = make_base(plain.model.parameters()), new_scaler()
    optimizer, scaler = flatmin.AMP(make_base(wrapped.model.parameters()), epsilon=0.0), new_scaler()
    for spoilt in ((), (0,), ()):
        scaled_closure(plain, base, base_scaler, spoilt)()
        base_scaler.step(base)
        base_scaler.update()
        optimizer.step(scaled_closure(wrapped, optimizer, scaler, spoilt), scaler=scaler)
        scaler.update()
    assert same(plain.weights(), wrapped.weights())
    assert scaler.get_scale() == base_scaler.get_scale()


def test_no_host_read_beyond_those_of_the_scaler_and_the_base(make_base: MakeBase) -> None:
    plain, wrapped = setup(), setup()
    base, base_scaler = make_base(plain.model.parameters()), new_scaler()
    optimizer, scaler = flatmin.AMP(make_base(wrapped.model.parameters()), epsilon=0.1), new_scaler()
    for _ in range(2):
        with HostReads() as own:
            scaled_closure(plain, base, base_scaler)()
            base_scaler.step(base)
            base_scaler.update()
        with HostReads() as ours:
            optimizer.step(scaled_closure(wrapped, optimizer, scaler), scaler=scaler)
            scaler.update()
    assert ours.count == own.count


def in_blocks(case: Setup, optimizer: flatmin.AMP, scaler: GradScaler, *, overflow: bool) -> None:
    optimizer.zero_grad()
    scaler.scale(case.loss() * (float("inf") if overflow else 1)).backward()
    for _ in range(optimizer.inner_iter):
        with optimizer.perturbed(scaler=scaler):
            scaler.scale(case.loss()).backward()


def test_scaler_step_of_the_optimizer_ends_blocks_as_well(make_base: MakeBase) -> None:
    """What loops and trainers write; on overflow too, where torch would not call an ordinary optimizer at all."""
    for inner_iter in (1, 2):
        runs = []
        for form in ("optimizer.step", "scaler.step"):
            case, scaler = setup(), new_scaler()
            optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1, inner_iter=inner_iter)
            for overflow in (False, True, False):
                in_blocks(case, optimizer, scaler, overflow=overflow)
                if form == "optimizer.step":
                    optimizer.step(scaler=scaler)
                else:
                    scaler.step(optimizer)
                scaler.update()
                assert bool(optimizer.last.skipped) == overflow
            assert scaler.get_scale() == 2.0**11
            runs.append(case.weights())
        assert same(*runs)


@pytest.mark.parametrize("unscale", [False, True])
def test_with_epsilon_zero_scaler_step_needs_no_blocks(make_base: MakeBase, unscale: bool) -> None:
    plain, wrapped = setup(), setup()
    base, base_scaler = make_base(plain.model.parameters()), new_scaler()
    optimizer, scaler = flatmin.AMP(make_base(wrapped.model.parameters()), epsilon=0.0), new_scaler()
    for overflow in (False, True, False):
        for case, stepped, scales in ((plain, base, base_scaler), (wrapped, optimizer, scaler)):
            stepped.zero_grad()
            scales.scale(case.loss() * (float("inf") if overflow else 1)).backward()
            if unscale:
                scales.unscale_(stepped)
            scales.step(stepped)
            scales.update()
        assert bool(optimizer.last.skipped) == overflow
        assert optimizer.last.epsilon == 0.0
        assert same(plain.weights(), wrapped.weights())
    assert scaler.get_scale() == base_scaler.get_scale() == 2.0**11


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_scaler_step_takes_no_closure_and_says_who_does(epsilon: float) -> None:
    case, scaler = setup(), new_scaler()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=epsilon)
    scaler.scale(case.loss()).backward()
    with pytest.raises(TypeError, match=r"takes no closure.* write optimizer.step\(closure, scaler=scaler\)"):
        scaler.step(optimizer, case.closure(optimizer))


def test_a_scaler_given_to_some_calls_only_is_an_error_that_loses_nothing() -> None:
    case, scaler = setup(), new_scaler()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    theta = case.weights()
    in_blocks(case, optimizer, scaler, overflow=False)
    with pytest.raises(RuntimeError, match=r"to all calls of a step.* then optimizer.step\(scaler=scaler\)"):
        optimizer.step()
    optimizer.zero_grad()
    scaler.scale(case.loss()).backward()
    with optimizer.perturbed():
        scaler.scale(case.loss()).backward()
    with pytest.raises(RuntimeError, match=r"write `with optimizer.perturbed\(scaler=scaler\):`"):
        scaler.step(optimizer)
    assert same(case.weights(), theta)
    optimizer.zero_grad()
    optimizer.step(case.closure(optimizer))
    assert not same(case.weights(), theta)


def clipped_training(case: Setup, scaler: GradScaler | None, form: str) -> list[Tensor]:
    """Three steps with N = 2 in which the gradients of every pass are clipped, in their own size."""
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=2)

    def run_pass() -> Tensor:
        loss = case.loss()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.05)
        return loss

    def closure() -> Tensor:
        optimizer.zero_grad()
        return run_pass()

    for _ in range(3):
        if form == "closure":
            optimizer.step(closure, scaler=scaler)
        else:
            closure()
            for _ in range(2):
                with optimizer.perturbed(scaler=scaler):
                    run_pass()
            optimizer.step(scaler=scaler)
        assert float(optimizer.last.grad_norm) == pytest.approx(0.05, rel=1e-4)  # type: ignore[arg-type]
        if scaler is not None:
            scaler.update()
    return case.weights()


@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_the_gradients_of_every_pass_can_be_unscaled_and_clipped(form: str) -> None:
    plain, scaled = clipped_training(setup(), None, form), clipped_training(setup(), new_scaler(), form)
    for weight, value in zip(scaled, plain, strict=True):
        torch.testing.assert_close(weight, value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_overflow_in_any_pass_is_skipped_after_unscaling_too(make_base: MakeBase, spoilt: int) -> None:
    case, scaler = setup(), new_scaler()
    optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1, inner_iter=2)
    theta = case.weights()

    def run_pass(number: int) -> None:
        scaler.scale(case.loss() * (float("inf") if number == spoilt else 1)).backward()

    run_pass(0)
    for number in (1, 2):
        with optimizer.perturbed(scaler=scaler):
            run_pass(number)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
    optimizer.step(scaler=scaler)
    scaler.update()
    assert optimizer.last.skipped
    assert same(case.weights(), theta)
    assert scaler.get_scale() == 2.0**11
    assert all(bool((t == 0).all()) for t in tensors_in(optimizer))


def test_an_empty_parameter_does_not_hide_an_overflow() -> None:
    weight, empty = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(0))
    optimizer, scaler = flatmin.AMP(SGD([weight, empty], lr=0.1), epsilon=0.1, inner_iter=2), new_scaler()
    losses = iter([1.0, float("inf"), 1.0])

    def closure() -> None:
        optimizer.zero_grad()
        scaler.scale((weight.square().sum() + empty.sum()) * next(losses)).backward()

    optimizer.step(closure, scaler=scaler)
    scaler.update()
    assert optimizer.last.skipped
    assert weight.tolist() == [1, 1]
    assert scaler.get_scale() == 2.0**11


def test_at_epsilon_zero_a_skipped_step_is_told_too() -> None:
    case, scaler = setup("mlp"), new_scaler()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.0)
    for spoilt in ((0,), ()):
        optimizer.step(scaled_closure(case, optimizer, scaler, spoilt), scaler=scaler)
        scaler.update()
        assert optimizer.last.skipped is not None
        assert bool(optimizer.last.skipped) == bool(spoilt)


def test_a_base_that_asks_the_scaler_itself_leaves_no_flag_and_steps() -> None:
    """A fused base without any gradient: torch's own `scaler.step` takes it, and so does ours."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = flatmin.AMP(SGD([weight], lr=0.1, fused=True), epsilon=0.0)
    scaler = new_scaler()
    scaler.scale(torch.ones(()))  # which makes its scale
    optimizer.step(lambda: torch.ones(()), scaler=scaler)
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("where", ["nowhere", "before", "inside", "after", "before and inside"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-9])
@pytest.mark.parametrize("base_name", ["nesterov", "adamw-fused"])
def test_gradients_are_unscaled_once_wherever_that_is_asked_for(
    base_name: str, where: str, inner_iter: int, sync: bool, epsilon: float
) -> None:
    """Blocks of a radius next to nothing, or of none: the step of a plain training, with and without a scaler."""
    plain, wrapped, make_base = setup(), setup(), OPTIMIZERS[base_name]
    base = make_base(plain.model.parameters())
    optimizer = flatmin.AMP(
        make_base(wrapped.model.parameters()), epsilon=epsilon, inner_iter=inner_iter, sync_perturbation=sync
    )
    scaler = new_scaler()
    for _ in range(2):
        plain.closure(base)()
        base.step()
        optimizer.zero_grad()
        scaler.scale(wrapped.loss()).backward()
        if "before" in where:
            scaler.unscale_(optimizer)
        for _ in range(inner_iter):
            with optimizer.perturbed(scaler=scaler):
                scaler.scale(wrapped.loss()).backward()
                if "inside" in where:
                    scaler.unscale_(optimizer)
        if where == "after":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(wrapped.weights(), plain.weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_micro_batch_that_overflowed_is_not_forgotten_by_the_next_ones_unscaling(epsilon: float, spoilt: int) -> None:
    weight, scaler = torch.nn.Parameter(torch.ones(2)), new_scaler()
    optimizer = flatmin.AMP(SGD([weight], lr=0.1, momentum=0.9), epsilon=epsilon)

    def of(factor: float) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (weight * factor).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            return loss

        return closure

    optimizer.step([of(float("inf") if place == spoilt else 1.0) for place in range(2)], scaler=scaler)
    scaler.update()
    assert optimizer.last.skipped
    assert torch.equal(weight, torch.ones(2))
    assert scaler.get_scale() == 2.0**11


def test_an_error_before_the_base_steps_leaves_no_theta_behind() -> None:
    """What was loaded after it is what the next step starts from."""
    for make in (flatmin.AMP, flatmin.RMP):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = make(SGD([weight], lr=0.1), epsilon=1e-6)

        def closure(weight: torch.nn.Parameter = weight, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        with pytest.raises(RuntimeError, match="has not scaled any loss"):
            optimizer.step(closure, scaler=new_scaler())
        with torch.no_grad():
            weight.fill_(100.0)
        optimizer.step(closure)
        torch.testing.assert_close(weight.detach(), torch.full((2,), 80.0))
