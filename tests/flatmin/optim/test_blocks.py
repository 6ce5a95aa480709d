"""`perturbed()`: the form for loops without a closure, and what its misuse gets."""

from typing import Any

import pytest
import torch
from torch.optim import SGD

import flatmin
from tests.support.cases import MakeBase, Method, same, setup


def test_inside_a_block_the_weights_are_perturbed_and_outside_they_are_theta(method: Method) -> None:
    case = setup()
    optimizer = method(SGD(case.model.parameters(), lr=0.1))
    theta = case.weights()
    case.loss().backward()
    for _ in range(optimizer.inner_iter):
        with optimizer.perturbed():
            assert not same(case.weights(), theta)
            case.loss().backward()
        assert same(case.weights(), theta)
    optimizer.step()
    assert not same(case.weights(), theta)


def test_the_gradient_left_by_a_block_is_that_at_the_perturbed_weights() -> None:
    case = setup(dtype=torch.float64)
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    params = list(case.model.parameters())
    case.loss().backward()
    with optimizer.perturbed():
        expected = torch.autograd.grad(case.loss(), params)
        case.loss().backward()
    assert same([param.grad for param in params if param.grad is not None], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_backward_pass_through_the_graph_of_the_clean_pass_is_an_error_that_loses_nothing(dtype: torch.dtype) -> None:
    """It would mix activations at θ with weights at θ + Δ."""
    case = setup(dtype=dtype)
    optimizer, theta = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1), case.weights()
    loss = case.loss()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), optimizer.perturbed():
        loss.backward()
    assert same(case.weights(), theta)


def test_zero_grad_inside_a_block_does_no_harm() -> None:
    first, second = setup(), setup()
    for case, inside in ((first, False), (second, True)):
        optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
        optimizer.zero_grad()
        case.loss().backward()
        with optimizer.perturbed():
            if inside:
                optimizer.zero_grad()
            case.loss().backward()
        optimizer.step()
    assert same(first.weights(), second.weights())


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_too_few_blocks_are_an_error_that_loses_nothing(make_base: MakeBase, blocks: int) -> None:
    case, straight = setup(), setup()
    optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1, inner_iter=3)
    expected = flatmin.AMP(make_base(straight.model.parameters()), epsilon=0.1, inner_iter=3)
    straight.step_in_blocks(expected)
    theta = case.weights()
    case.loss().backward()
    for _ in range(blocks):
        with optimizer.perturbed():
            case.loss().backward()
    message = rf"inner_iter=3 .*got {blocks}" if blocks else r"needs a closure .*perturbed\(\)"
    with pytest.raises((RuntimeError, TypeError), match=message):
        optimizer.step()
    assert same(case.weights(), theta)
    for _ in range(blocks, 3):
        with optimizer.perturbed():
            case.loss().backward()
    optimizer.step()
    assert same(case.weights(), straight.weights())


@pytest.mark.parametrize("inner_iter", [0, 1, 2])
def test_too_many_blocks_are_an_error_that_loses_nothing(inner_iter: int) -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=inner_iter)
    theta = case.weights()
    case.loss().backward()
    for _ in range(inner_iter):
        with optimizer.perturbed():
            case.loss().backward()
    with pytest.raises(RuntimeError, match=rf"inner_iter={inner_iter} .*call step\(\) next"), optimizer.perturbed():
        pass
    assert same(case.weights(), theta)
    optimizer.step()
    assert not same(case.weights(), theta)


def test_a_block_without_a_gradient_says_so() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    with pytest.raises(RuntimeError, match=r"no parameter has one; call backward\(\) first"), optimizer.perturbed():
        pass


def test_a_block_without_backward_says_so_and_loses_nothing(method: Method) -> None:
    case = setup()
    optimizer = method(SGD(case.model.parameters(), lr=0.1))
    theta = case.weights()
    case.loss().backward()
    with pytest.raises(RuntimeError, match=r"in the perturbed\(\) block; call backward"), optimizer.perturbed():
        case.loss()
    assert same(case.weights(), theta)
    case.step_in_blocks(optimizer)
    assert not same(case.weights(), theta)


def test_a_block_may_perturb_nothing_when_the_groups_to_perturb_are_frozen() -> None:
    case = setup()
    first, second = case.layers()
    for param in first:
        param.requires_grad_(False)
    base = SGD([{"params": first}, {"params": second, "epsilon": 0.0}], lr=0.1)  # type: ignore[arg-type]
    optimizer = flatmin.AMP(base, epsilon=0.1)
    theta = case.weights()
    case.step_in_blocks(optimizer)
    assert same(case.weights()[:2], theta[:2])
    assert not same(case.weights()[2:], theta[2:])


def test_blocks_do_not_nest_and_a_step_does_not_fit_inside() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    theta = case.weights()
    case.loss().backward()
    with pytest.raises(RuntimeError, match="leave the current pass"), optimizer.perturbed(), optimizer.perturbed():
        pass
    assert same(case.weights(), theta)
    case.loss().backward()
    with pytest.raises(RuntimeError, match=r"step\(\) was called inside"), optimizer.perturbed():
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"step\(\) was called inside"):
        optimizer.step(lambda: optimizer.step(case.closure(optimizer)))
    assert same(case.weights(), theta)


@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("model", ["conv-batchnorm", "dropout"])
def test_two_optimizers_in_one_block_are_one_with_a_ball_for_each_group(model: str, inner_iter: int) -> None:
    one, two = setup(model), setup(model)
    settings: dict[str, Any] = {"epsilon": 0.1, "inner_iter": inner_iter}
    params, others = list(one.model.parameters()), list(two.model.parameters())
    base = SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1, momentum=0.9)
    optimizer = flatmin.AMP(base, ball="group", model=one.model, **settings)
    first = flatmin.AMP(SGD(others[:2], lr=0.1, momentum=0.9), model=two.model, **settings)
    second = flatmin.AMP(SGD(others[2:], lr=0.1, momentum=0.9), model=two.model, **settings)
    for step in range(3):
        torch.manual_seed(step)
        one.step_in_blocks(optimizer)
        torch.manual_seed(step)
        first.zero_grad()
        second.zero_grad()
        two.loss().backward()
        for _ in range(inner_iter):
            with first.perturbed(), second.perturbed():
                two.loss().backward()
        first.step()
        second.step()
    assert same(one.weights(), two.weights())
    assert same(one.buffers(), two.buffers())


def test_the_two_forms_do_not_mix_and_zero_grad_begins_afresh() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    theta = case.weights()
    case.loss().backward()
    with optimizer.perturbed():
        case.loss().backward()
    with pytest.raises(RuntimeError, match=r"got one after 1 block.*zero_grad\(\)"):
        optimizer.step(case.closure(optimizer))
    assert same(case.weights(), theta)
    optimizer.zero_grad()
    optimizer.step(case.closure(optimizer))
    assert not same(case.weights(), theta)


def test_loading_a_checkpoint_between_blocks_begins_afresh() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    case.loss().backward()
    with optimizer.perturbed():
        case.loss().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()


@pytest.mark.parametrize("sync", [True, False])
def test_without_a_radius_the_clean_gradients_are_stepped_whoever_wrote_over_them(sync: bool) -> None:
    """Dropout draws anew in the block, and this base zeroes in place: the clean pass counts all the same."""

    class InPlace(SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    plain, wrapped = setup("dropout"), setup("dropout")
    base = InPlace(plain.model.parameters(), lr=0.1)
    optimizer = flatmin.AMP(InPlace(wrapped.model.parameters(), lr=0.1), epsilon=0.0, sync_perturbation=sync)
    for step in range(3):
        torch.manual_seed(step)
        plain.closure(base)()
        base.step()
        torch.manual_seed(step)
        wrapped.step_in_blocks(optimizer)
    assert same(plain.weights(), wrapped.weights())


def test_a_step_without_blocks_is_an_error_during_a_warm_up_too() -> None:
    """Where the rate is 0 and there is no state yet, only gradients of 0 are torch's way to make a state."""
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.0, momentum=0.9), epsilon=0.1)
    optimizer.zero_grad()
    case.loss().backward()
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()
    for param in case.model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert len(optimizer.state) == 4


def test_a_block_may_be_a_function() -> None:
    case, other = setup(), setup()
    optimizer, plain = (flatmin.AMP(SGD(one.model.parameters(), lr=0.1), epsilon=0.1) for one in (case, other))

    @optimizer.perturbed()
    def run() -> None:
        case.loss().backward()

    for _ in range(2):
        optimizer.zero_grad()
        case.loss().backward()
        run()
        optimizer.step()
        other.step_in_blocks(plain)
    assert same(case.weights(), other.weights())


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_the_losses_that_the_loop_tells_are_what_the_step_has_measured(epsilon: float) -> None:
    """The same `last` as with a closure; without a perturbation there is one loss."""
    case, other = setup(), setup()
    optimizer, with_closure = (
        flatmin.AMP(SGD(one.model.parameters(), lr=0.1), epsilon=epsilon) for one in (case, other)
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = case.loss()
        loss.backward()
        with optimizer.perturbed():
            perturbed = case.loss()
            perturbed.backward()
        optimizer.step(losses=(loss, perturbed))
        with_closure.step(other.closure(with_closure))
    for name in ("loss", "loss_perturbed", "delta_norm"):
        found, expected = (getattr(one.last, name) for one in (optimizer, with_closure))
        assert (found is None) == (expected is None)
        assert expected is None or same([found], [expected])
    assert optimizer.last.loss is not None
    assert not optimizer.last.loss.requires_grad
    assert (optimizer.last.loss_perturbed is None) == (epsilon == 0)
    optimizer.zero_grad()  # the losses were those of that step alone
    case.loss().backward()
    with optimizer.perturbed():
        case.loss().backward()
    optimizer.step()
    assert optimizer.last.loss is None


def test_losses_belong_to_blocks_and_are_two_tensors() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    loss = case.loss()
    theta = case.weights()
    with pytest.raises(
        TypeError, match=r"losses= is for a step after perturbed\(\) blocks; a closure returns its loss"
    ):
        optimizer.step(case.closure(optimizer), losses=(loss, loss))
    for wrong in (loss, (loss,), (0.1, 0.2)):
        with pytest.raises(TypeError, match=r"two tensors, .* step\(losses=\(loss, loss_perturbed\)\), got"):
            optimizer.step(losses=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step(losses=(loss, loss))  # without a block
    assert same(case.weights(), theta)
    optimizer.step(case.closure(optimizer))  # nothing is left of these
    assert optimizer.last.loss_perturbed is not None
    assert optimizer.last.loss_perturbed > loss
