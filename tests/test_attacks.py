"""FGSM and PGD: inside the ball and the bounds, uphill, and the model is left as it was found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatmin.attacks import evaluating, fgsm, pgd


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 36, 5))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(7, 3, 6, 6, generator=generator), torch.randint(0, 5, (7,), generator=generator)


@given(
    epsilon=st.floats(0, 0.5),
    step=st.floats(0, 1),
    steps=st.integers(0, 4),
    start=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_result_is_in_the_ball_and_in_the_bounds(
    epsilon: float, step: float, steps: int, start: bool, seed: int
) -> None:
    model, (x, y) = network(), batch(seed)
    found = pgd(model, x, y, epsilon=epsilon, step_size=step, steps=steps, random_start=start)
    assert float((found - x).abs().max()) <= epsilon + 1e-7
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    assert not found.requires_grad


def test_fgsm_is_the_formula() -> None:
    model, (x, y) = network().eval(), batch()
    asked = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(model(asked), y), asked)
    expected = (x + 0.03 * gradient.sign()).clamp(0, 1)
    torch.testing.assert_close(fgsm(model, x, y, epsilon=0.03), expected, rtol=0, atol=1e-7)


@torch.no_grad()
def test_the_loss_rises_and_more_so_with_more_steps() -> None:
    model, (x, y) = network().eval(), batch()
    found = [pgd(model, x, y, epsilon=0.05, step_size=0.01, steps=steps) for steps in (0, 1, 8)]
    losses = [float(cross_entropy(model(one), y)) for one in found]
    assert losses == sorted(losses)
    assert losses[2] > losses[0] + 0.05


def test_normalised_coordinates_are_the_same_attack() -> None:
    """ε/std and the normalised bounds on the normalised picture, against the model with the normalisation inside."""
    model, (x, y) = network().eval().double(), batch()
    x = x.double()
    mean, std = (torch.tensor(numbers).double().view(3, 1, 1) for numbers in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.25)))
    inside = pgd(lambda pixels: model((pixels - mean) / std), x, y, epsilon=0.03, step_size=0.01, steps=5)
    outside = pgd(
        model,
        (x - mean) / std,
        y,
        epsilon=0.03 / std,
        step_size=0.01 / std,
        steps=5,
        bounds=((0 - mean) / std, (1 - mean) / std),
    )
    torch.testing.assert_close(outside * std + mean, inside, rtol=0, atol=1e-12)


def test_the_model_is_left_as_it_was() -> None:
    model, (x, y) = network(), batch()
    model[1].eval()  # type: ignore[index]  # one module frozen by its owner
    model(x).sum().backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    buffers = [buffer.clone() for buffer in model.buffers()]
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    pgd(model, x, y, epsilon=0.1, step_size=0.05, steps=3)
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True) if b.grad is not None)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(random, torch.get_rng_state())  # no dropout mask was drawn


def test_modes_come_back_after_an_exception() -> None:
    model = network()
    seen = []

    def failing() -> None:
        with evaluating(model):
            seen.append(any(module.training for module in model.modules()))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        failing()
    assert seen == [False]
    assert all(module.training for module in model.modules())


def test_it_works_where_gradients_are_off_and_on_soft_labels() -> None:
    model, (x, y) = network(), batch()
    with torch.no_grad():
        assert torch.equal(fgsm(model, x, y, epsilon=0.1), fgsm(model, x, y, epsilon=0.1))
    soft = torch.softmax(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    assert fgsm(model, x, soft, epsilon=0.1).shape == x.shape


def test_a_gradient_that_is_not_a_number_moves_nothing() -> None:
    x, y = batch()

    def broken(pixels: Tensor) -> Tensor:
        return (pixels.flatten(1)[:, :5] - pixels.flatten(1)[:, :5].detach()).sqrt() * torch.nan

    assert torch.equal(fgsm(broken, x, y, epsilon=0.1), x)


def test_impossible_settings_are_refused() -> None:
    model, (x, y) = network(), batch()
    with pytest.raises(ValueError, match=r"epsilon must be at least 0, got -0\.1"):
        fgsm(model, x, y, epsilon=-0.1)
    with pytest.raises(ValueError, match="step_size must be at least 0, got nan"):
        pgd(model, x, y, epsilon=0.1, step_size=float("nan"), steps=1)
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        pgd(model, x, y, epsilon=0.1, step_size=0.1, steps=-1)
