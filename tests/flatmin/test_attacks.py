"""FGSM and PGD: inside the ball and the bounds, uphill, and the model is left as it was found."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatmin.attacks import fgsm, pgd
from flatmin.ball import NORMS, Norm
from flatmin.core.model_state import eval_mode
from tests.support.host_sync import run_without_host_sync

norms = st.sampled_from(NORMS)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 36, 5))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(7, 3, 6, 6, generator=generator), torch.randint(0, 5, (7,), generator=generator)


def lengths(delta: Tensor) -> Tensor:
    return delta.double().flatten(1).square().sum(dim=1).sqrt()


def assert_inside(found: Tensor, x: Tensor, epsilon: float, norm: Norm, bounds: tuple[float, float] = (0, 1)) -> None:
    """In the ball, in x's own type and to the last bits, and in the bounds."""
    delta = found.double() - x.double()
    size = lengths(delta) if norm == "l2" else delta.abs().flatten(1).amax(dim=1)
    assert float(size.max()) <= epsilon * (1 + 1e-6)
    assert found.dtype == x.dtype
    assert not found.requires_grad
    assert float(found.min()) >= bounds[0]
    assert float(found.max()) <= bounds[1]


@given(
    epsilon=st.floats(0, 0.5) | st.floats(0, 1e-6) | st.floats(0, 30),
    step=st.floats(0, 1) | st.floats(0, 100),
    steps=st.integers(0, 4),
    start=st.booleans(),
    norm=norms,
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    seed=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_result_is_in_the_ball_and_in_the_bounds(
    epsilon: float, step: float, steps: int, start: bool, norm: Norm, dtype: torch.dtype, seed: int
) -> None:
    model, (x, y) = network().to(dtype), batch(seed)
    x = x.to(dtype)
    x[0], x[1] = 0, 1  # on the bounds
    generator = torch.Generator().manual_seed(seed)
    found = pgd(
        model, x, y, epsilon=epsilon, step_size=step, steps=steps, norm=norm, random_start=start, generator=generator
    )
    assert_inside(found, x, epsilon, norm)


@given(
    lower=st.floats(-3, 0),
    upper=st.floats(0.1, 3),
    norm=norms,
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    as_tensors=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_bounds_that_the_inputs_cannot_hold_are_not_crossed_by_rounding(
    lower: float, upper: float, norm: Norm, dtype: torch.dtype, as_tensors: bool
) -> None:
    x = torch.linspace(-1, 1, 12).view(6, 2).to(dtype).clamp(lower + 0.05, upper - 0.05)
    bounds: Any = (lower, upper)
    if as_tensors:
        bounds = tuple(torch.tensor(bound, dtype=torch.float64) for bound in bounds)
    up = torch.tensor([1.0, -1.0], dtype=dtype)
    found = pgd(lambda x: x * up, x, torch.arange(6) % 2, epsilon=9.0, step_size=9.0, steps=1, norm=norm, bounds=bounds)
    assert bool(((found.double() >= lower) & (found.double() <= upper)).all())


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.1, 0.5, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_whole_pictures_stay_in_the_ball_after_rounding(epsilon: float, dtype: torch.dtype) -> None:
    """3072 roundings to the nearest would take a float32 image out of a small ball: 1e-3 by 2e-5 of it."""
    weights = torch.randn(3072, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = torch.rand(20, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = torch.arange(20) % 10
    for bounds in ((0, 1), (-9, 9)):
        found = pgd(
            lambda x: x.flatten(1) @ weights,
            x,
            y,
            epsilon=epsilon,
            step_size=epsilon / 3,
            steps=7,
            norm="l2",
            bounds=bounds,
        )
        assert_inside(found, x, epsilon, "l2", bounds)
        if dtype != torch.bfloat16 and bounds == (-9, 9) and epsilon > 1e-4:
            assert float(lengths(found - x).min()) > 0.99 * epsilon  # and they use it


def test_fgsm_is_the_formula() -> None:
    model, (x, y) = network().eval(), batch()
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(model(point), y), point)
    expected = (x + 0.03 * gradient.sign()).clamp(0, 1)
    torch.testing.assert_close(fgsm(model, x, y, epsilon=0.03), expected, rtol=0, atol=1e-7)


def test_fgsm_in_l2_is_one_step_of_length_epsilon_along_the_gradient() -> None:
    model, (x, y) = network().eval(), batch()
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(model(point), y), point)
    free = fgsm(model, x, y, epsilon=0.3, norm="l2", bounds=(-9, 9))
    torch.testing.assert_close(lengths(free - x), torch.full((7,), 0.3).double(), rtol=1e-6, atol=0)
    direction = gradient / gradient.flatten(1).norm(dim=1).view(7, 1, 1, 1)
    torch.testing.assert_close(free, x + 0.3 * direction, rtol=0, atol=1e-6)
    torch.testing.assert_close(fgsm(model, x, y, epsilon=0.3, norm="l2"), free.clamp(0, 1), rtol=0, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_the_loss_rises_and_more_so_with_more_steps(norm: Norm) -> None:
    model, (x, y) = network().eval(), batch()
    size = {"linf": 0.05, "l2": 0.4}[norm]
    found = [pgd(model, x, y, epsilon=size, step_size=size / 5, steps=steps, norm=norm) for steps in (0, 1, 8)]
    losses = [float(cross_entropy(model(one), y)) for one in found]
    assert losses == sorted(losses)
    assert losses[2] > losses[0] + 0.05


class Normalise(nn.Module):
    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels - self.mean) / self.std


def test_normalised_coordinates_are_the_same_attack() -> None:
    """ε/std and the normalised bounds on the normalised image, against the model with the normalisation inside."""
    model, (x, y) = network().eval().double(), batch()
    x = x.double()
    mean, std = (torch.tensor(numbers).double().view(3, 1, 1) for numbers in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.25)))
    pixels = nn.Sequential(Normalise(mean, std), model)
    inside = pgd(pixels, x, y, epsilon=4 / 255, step_size=1 / 255, steps=10)  # the paper's
    outside = pgd(
        model,
        (x - mean) / std,
        y,
        epsilon=4 / 255 / std,
        step_size=1 / 255 / std,
        steps=10,
        bounds=((0 - mean) / std, (1 - mean) / std),
    )
    torch.testing.assert_close(outside * std + mean, inside, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.inference_mode], ids=lambda kind: kind.__name__)
def test_the_model_is_left_as_it_was(norm: Norm, around: Callable[[], AbstractContextManager[None]]) -> None:
    model, (x, y) = network().train(), batch()
    model[3].eval()  # type: ignore[index]  # one module frozen by its owner
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    model(x).sum().backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    buffers = [buffer.clone() for buffer in model.buffers()]
    modes = [module.training for module in model.modules()]
    flags = [param.requires_grad for param in model.parameters()]
    random, images = torch.get_rng_state(), x.clone()
    with around():
        pgd(model, x, y, epsilon=0.1, step_size=0.05, steps=3, norm=norm)
    after = [param.grad for param in model.parameters() if param.grad is not None]
    assert len(before) == len(list(model.parameters())) - 1
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert flags == [param.requires_grad for param in model.parameters()]
    assert torch.equal(images, x)
    assert not x.requires_grad
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


@pytest.mark.parametrize("norm", NORMS)
def test_a_model_may_change_its_inputs_in_place(norm: Norm) -> None:
    model, (x, y) = network().eval(), batch()
    before = x.clone()
    how: dict[str, Any] = {"epsilon": 0.1, "step_size": 0.05, "steps": 3, "norm": norm}
    found = pgd(lambda x: model(x.mul_(2)), x, y, **how)
    assert torch.equal(x, before)
    assert torch.equal(found, pgd(lambda x: model(x * 2), x, y, **how))


def test_a_plain_function_is_called_as_it_is() -> None:
    model, (x, y) = network().train(), batch()
    before = model[1].running_mean.clone()  # type: ignore[index]
    fgsm(lambda pixels: model(pixels), x, y, epsilon=0.03)  # noqa: PLW0108
    assert not torch.equal(before, model[1].running_mean)  # type: ignore[index]


def test_modes_come_back_after_an_exception() -> None:
    model = network()
    seen = []

    def failing() -> None:
        with eval_mode(model):
            seen.append(any(module.training for module in model.modules()))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        failing()
    assert seen == [False]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("norm", NORMS)
def test_it_works_where_gradients_are_off_and_on_soft_labels(norm: Norm) -> None:
    model, (x, y) = network().eval(), batch()
    attack = partial(fgsm, model, epsilon=0.1, norm=norm)
    expected = attack(x, y)
    assert not torch.equal(expected, x)
    with torch.no_grad():
        assert torch.equal(attack(x, y), expected)
    with torch.inference_mode():
        assert torch.equal(attack(x, y), expected)
        assert torch.equal(attack(x + 0, y + 0), expected)  # made here: autograd would not keep them
        radii = torch.full((7, 1, 1, 1), 0.1, dtype=torch.float64)
        torch.testing.assert_close(attack(x, y, epsilon=radii), expected, rtol=0, atol=1e-7)
    soft = torch.nn.functional.one_hot(y, 5).float()
    torch.testing.assert_close(attack(x, soft), expected, rtol=0, atol=1e-7)


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


def test_a_random_start_in_l2_is_uniform_in_the_ball() -> None:
    """Of n dimensions, the share within r is (r/ε)ⁿ; and it is as often on either side."""
    x = torch.full((4000, 3), 0.5, dtype=torch.float64)
    found = pgd(
        nn.Linear(3, 2).double(),
        x,
        torch.zeros(4000, dtype=torch.long),
        epsilon=0.2,
        step_size=0,
        steps=0,
        norm="l2",
        random_start=True,
        generator=torch.Generator().manual_seed(0),
    )
    share = (lengths(found - x) / 0.2) ** 3
    grid = torch.linspace(0.1, 0.9, 9)
    assert all(abs(float((share <= u).double().mean()) - float(u)) < 0.03 for u in grid)
    assert float(((found - x).mean(dim=0) / 0.2).abs().max()) < 0.03


def test_in_l2_a_radius_may_be_one_for_all_or_one_per_example() -> None:
    model, (x, y) = network(), batch()
    radii = torch.linspace(0.1, 0.7, 7).view(7, 1, 1, 1)
    found = fgsm(model, x, y, epsilon=radii, norm="l2", bounds=(-9, 9))
    torch.testing.assert_close(lengths(found - x), radii.flatten().double(), rtol=1e-5, atol=0)
    for one, radius in zip(range(7), radii.flatten().tolist(), strict=True):
        alone = fgsm(model, x[one : one + 1], y[one : one + 1], epsilon=radius, norm="l2", bounds=(-9, 9))
        torch.testing.assert_close(found[one : one + 1], alone, rtol=0, atol=1e-6)
    as_tensor = fgsm(model, x, y, epsilon=torch.tensor(0.25, dtype=torch.float64), norm="l2")
    assert torch.equal(as_tensor, fgsm(model, x, y, epsilon=0.25, norm="l2"))
    for shape in ((3, 1, 1), (7,), (1, 3, 1, 1), (7, 3, 6, 6)):
        with pytest.raises(ValueError, match=r"one per example in the shape \(7, 1, 1, 1\), got \(.*\); .* for linf"):
            pgd(model, x, y, epsilon=torch.ones(shape), step_size=0.1, steps=1, norm="l2")
        with pytest.raises(ValueError, match="step_size must be one number in l2"):
            pgd(model, x, y, epsilon=0.1, step_size=torch.ones(shape), steps=1, norm="l2")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(4,), (4, 3), (0, 3), (2, 3, 4, 5, 6)], ids=str)
def test_examples_have_any_shape(norm: Norm, shape: tuple[int, ...]) -> None:
    def model(x: Tensor) -> Tensor:
        mean = x.reshape(len(x), math.prod(shape[1:])).mean(dim=1)
        return torch.stack([mean, -mean], dim=1)

    x, y = torch.full(shape, 0.5), torch.zeros(shape[0], dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    found = pgd(model, x, y, epsilon=0.1, step_size=0.05, steps=20, norm=norm, random_start=True, generator=generator)
    assert found.shape == shape
    assert bool((found <= x).all())  # downhill for the first class: to the end of the ball
    if norm == "l2" and len(x):
        expected = torch.full((shape[0],), 0.1, dtype=torch.float64)
        torch.testing.assert_close(lengths((found - x).view(shape[0], -1)), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_in_l2_tiny_and_huge_gradients_have_a_direction(size: float) -> None:
    """Their squares would be 0 or infinite in float32."""
    x = torch.full((1, 2), 0.5)
    found = fgsm(lambda x: x * size, x, None, epsilon=0.1, norm="l2", loss=lambda logits, _: logits.sum())
    torch.testing.assert_close(found - x, torch.full((1, 2), 0.1 / 2**0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_radii_of_another_type_do_not_change_the_inputs(dtype: torch.dtype) -> None:
    model, (x, y) = network().to(dtype), batch()
    radius = torch.full((3, 1, 1), 0.1, dtype=torch.float64)
    found = pgd(model, x.to(dtype), y, epsilon=radius, step_size=radius / 2, steps=2, random_start=True)
    assert found.dtype == dtype
    assert not torch.equal(found, x.to(dtype))


def test_in_half_precision_a_small_loss_still_moves_the_pictures() -> None:
    """The mean over many images would be too small a gradient for float16."""
    weights = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float16)
    x = torch.rand(4096, 12, generator=torch.Generator().manual_seed(1)).half()

    def surely(pixels: Tensor) -> Tensor:
        return pixels @ weights * 0.05 + torch.tensor([9, 0, 0, 0, 0], dtype=torch.float16)

    found = fgsm(surely, x, torch.zeros(4096, dtype=torch.int64), epsilon=0.1)
    assert float((found != x).float().mean()) > 0.9


@pytest.mark.parametrize("norm", NORMS)
def test_a_gradient_of_zero_or_none_moves_nothing(norm: Norm) -> None:
    x, y = batch()
    assert torch.equal(fgsm(lambda pixels: 0 * pixels.flatten(1)[:, :5], x, y, epsilon=0.1, norm=norm), x)

    def broken(pixels: Tensor) -> Tensor:
        return (pixels.flatten(1)[:, :5] - pixels.flatten(1)[:, :5].detach()).sqrt() * torch.nan

    assert torch.equal(fgsm(broken, x, y, epsilon=0.1, norm=norm), x)


def test_impossible_settings_are_refused() -> None:
    model, (x, y) = network(), batch()
    with pytest.raises(TypeError, match=r"must be floats .*, got torch\.uint8"):
        fgsm(model, (x * 255).to(torch.uint8), y, epsilon=0.1)
    with pytest.raises(ValueError, match=r"epsilon must be at least 0 and finite, got -0\.1"):
        fgsm(model, x, y, epsilon=-0.1)
    with pytest.raises(ValueError, match="epsilon must be at least 0 and finite, got inf"):
        fgsm(model, x, y, epsilon=float("inf"))
    with pytest.raises(ValueError, match="step_size must be at least 0 and finite, got nan"):
        pgd(model, x, y, epsilon=0.1, step_size=float("nan"), steps=1)
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        pgd(model, x, y, epsilon=0.1, step_size=0.1, steps=-1)
    with pytest.raises(ValueError, match="unknown norm 'l1'; choose from l2, linf"):
        fgsm(model, x, y, epsilon=0.1, norm="l1")  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_gpu_finds_the_same_without_a_wait_and_stays_in_the_ball(norm: Norm, dtype: torch.dtype) -> None:
    model, (x, y) = network().to(dtype), batch()
    x = x.to(dtype)
    attack = partial(pgd, epsilon=0.2, step_size=0.07, steps=5, norm=norm)
    expected = attack(model, x, y)
    model, there, labels = model.cuda(), x.cuda(), y.cuda()
    found = run_without_host_sync(lambda: attack(model, there, labels))
    assert_inside(found.cpu(), x, 0.2, norm)
    assert_inside(run_without_host_sync(lambda: attack(model, there, labels, random_start=True)).cpu(), x, 0.2, norm)
    if dtype == torch.float64:
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_inputs_out_of_bounds_stay_in_the_ball_too(norm: Any) -> None:
    """Normalised images with the bounds of plain ones: a mistake, which must not move them by a whole unit."""
    torch.manual_seed(0)
    x, y = 3 * torch.randn(6, 4), torch.randint(0, 3, (6,))
    model = nn.Linear(4, 3)
    found = pgd(model, x, y, epsilon=0.1, step_size=0.05, steps=4, norm=norm, random_start=True)
    apart = (found - x).double()
    length = apart.abs().amax(dim=1) if norm == "linf" else apart.norm(dim=1)
    assert length.max() <= 0.1 * (1 + 1e-6)
    assert torch.equal(fgsm(model, x, y, epsilon=0.0, norm=norm), x)


def test_bounds_the_wrong_way_around_are_named() -> None:
    with pytest.raises(ValueError, match="a lower and an upper number"):
        fgsm(nn.Linear(2, 2), torch.rand(1, 2), torch.tensor([0]), epsilon=0.1, bounds=(1.0, 0.0))


@pytest.mark.cuda
def test_a_recurrent_network_is_attacked_on_a_gpu_in_eval_mode_and_the_start_is_the_cpus() -> None:
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.inside(x)[0][:, -1]

    model, x, y = Last().double(), torch.rand(5, 6, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    settings: dict[str, Any] = {"epsilon": 0.1, "step_size": 0.03, "steps": 3, "random_start": True}
    here = pgd(model, x, y, generator=torch.Generator().manual_seed(0), **settings)
    there = pgd(model.cuda(), x.cuda(), y.cuda(), generator=torch.Generator().manual_seed(0), **settings)
    assert torch.allclose(here, there.cpu(), atol=1e-9)
