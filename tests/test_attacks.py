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
    model, (x, y) = network().train(), batch()
    model[3].eval()  # type: ignore[index]  # one module frozen by its owner
    model(x).sum().backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    buffers = [buffer.clone() for buffer in model.buffers()]
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    pgd(model, x, y, epsilon=0.1, step_size=0.05, steps=3)
    assert len(before) == len(list(model.parameters()))
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True) if b.grad is not None)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(random, torch.get_rng_state())  # no dropout mask was drawn


def test_the_attack_is_the_one_in_eval_mode() -> None:
    """BatchNorm with the batch's own statistics would give another gradient."""
    (x, y), trained = batch(), network().train()
    for _ in range(3):
        trained(x)  # running statistics that are not the first ones
    found = fgsm(trained, x, y, epsilon=0.03)
    assert torch.equal(found, fgsm(trained.eval(), x, y, epsilon=0.03))


def test_a_plain_function_is_called_as_it_is() -> None:
    model, (x, y) = network().train(), batch()
    before = model[1].running_mean.clone()  # type: ignore[index]
    fgsm(lambda pixels: model(pixels), x, y, epsilon=0.03)  # noqa: PLW0108
    assert not torch.equal(before, model[1].running_mean)  # type: ignore[index]


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
    model, (x, y) = network().eval(), batch()
    expected = fgsm(model, x, y, epsilon=0.1)
    assert not torch.equal(expected, x)
    with torch.no_grad():
        assert torch.equal(fgsm(model, x, y, epsilon=0.1), expected)
    with torch.inference_mode():
        assert torch.equal(fgsm(model, x, y, epsilon=0.1), expected)
        assert torch.equal(fgsm(model, x + 0, y, epsilon=0.1), expected)
    soft = torch.nn.functional.one_hot(y, 5).float()
    assert torch.equal(fgsm(model, x, soft, epsilon=0.1), expected)


def test_the_loss_can_be_another_one() -> None:
    """Descending where the default ascends: away from the other end of the ball."""
    model, (x, y) = network().eval(), batch()
    up = fgsm(model, x, y, epsilon=0.01, bounds=(-9, 9))
    down = fgsm(model, x, y, epsilon=0.01, bounds=(-9, 9), loss=lambda logits, y: -cross_entropy(logits, y))
    torch.testing.assert_close(up - x, x - down, rtol=0, atol=1e-6)


def test_a_random_start_is_drawn_by_its_generator() -> None:
    model, (x, y) = network(), batch()

    def started(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(7 + seed)
        return pgd(model, x, y, epsilon=0.1, step_size=0, steps=0, random_start=True, generator=generator)

    assert torch.equal(started(0), started(0))
    assert not torch.equal(started(0), started(1))
    assert float((started(0) - x).abs().max()) > 0.09


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_radii_of_another_type_do_not_change_the_inputs(dtype: torch.dtype) -> None:
    model, (x, y) = network().to(dtype), batch()
    radius = torch.full((3, 1, 1), 0.1, dtype=torch.float64)
    found = pgd(model, x.to(dtype), y, epsilon=radius, step_size=radius / 2, steps=2, random_start=True)
    assert found.dtype == dtype
    assert not torch.equal(found, x.to(dtype))


def test_in_half_precision_a_small_loss_still_moves_the_pictures() -> None:
    """The mean over many pictures would be too small a gradient for float16."""
    weights = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float16)
    x = torch.rand(4096, 12, generator=torch.Generator().manual_seed(1)).half()

    def surely(pixels: Tensor) -> Tensor:
        return pixels @ weights * 0.05 + torch.tensor([9, 0, 0, 0, 0], dtype=torch.float16)

    found = fgsm(surely, x, torch.zeros(4096, dtype=torch.int64), epsilon=0.1)
    assert float((found != x).float().mean()) > 0.9


def test_a_gradient_that_is_not_a_number_moves_nothing() -> None:
    x, y = batch()

    def broken(pixels: Tensor) -> Tensor:
        return (pixels.flatten(1)[:, :5] - pixels.flatten(1)[:, :5].detach()).sqrt() * torch.nan

    assert torch.equal(fgsm(broken, x, y, epsilon=0.1), x)


def test_impossible_settings_are_refused() -> None:
    model, (x, y) = network(), batch()
    with pytest.raises(TypeError, match=r"must be floats .*, got torch\.uint8"):
        fgsm(model, (x * 255).to(torch.uint8), y, epsilon=0.1)
    with pytest.raises(ValueError, match=r"epsilon must be at least 0, got -0\.1"):
        fgsm(model, x, y, epsilon=-0.1)
    with pytest.raises(ValueError, match="step_size must be at least 0, got nan"):
        pgd(model, x, y, epsilon=0.1, step_size=float("nan"), steps=1)
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        pgd(model, x, y, epsilon=0.1, step_size=0.1, steps=-1)
