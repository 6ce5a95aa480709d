"""RMP: a point drawn uniformly in the ball, one closure call, θ back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import flatmin
from flatmin.ball import BALLS, Ball, Norm
from tests.support.cases import run, same, setup


def draws(norm: Norm, dimension: int, n: int, seed: int = 0) -> Tensor:
    """N perturbations of a weight at 0, the radius being 2."""
    weight = nn.Parameter(torch.zeros(dimension))
    generator = torch.Generator().manual_seed(seed)
    optimizer = flatmin.RMP(SGD([weight], lr=0.0), epsilon=2.0, norm=norm, generator=generator)
    seen = list[Tensor]()

    def closure() -> Tensor:
        seen.append(weight.detach().clone())
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    for _ in range(n):
        optimizer.step(closure)
    assert len(seen) == n
    return torch.stack(seen)


@pytest.mark.parametrize("dimension", [1, 2, 3, 10])
def test_l2_points_are_uniform_in_the_ball(dimension: int) -> None:
    points = draws("l2", dimension, 2000)
    radius = points.norm(dim=1)
    assert radius.max() <= 2 * (1 + 1e-6)
    share = (radius / 2) ** dimension  # uniform in [0, 1], if the points are uniform in the ball
    gap = (share.sort().values - torch.linspace(0, 1, len(share))).abs().max()
    assert gap < 1.63 / len(share) ** 0.5  # Kolmogorov and Smirnov, 1 %
    directions = points / radius[:, None]
    assert directions.mean(dim=0).norm() < 4 / len(points) ** 0.5
    torch.testing.assert_close(
        directions.T @ directions / len(points), torch.eye(dimension) / dimension, atol=0.03, rtol=0
    )


def test_linf_points_are_uniform_in_the_cube() -> None:
    points = draws("linf", 3, 3000)
    assert points.abs().max() <= 2
    for column in points.T:
        gap = ((column.sort().values + 2) / 4 - torch.linspace(0, 1, len(column))).abs().max()
        assert gap < 1.63 / len(column) ** 0.5


@pytest.mark.parametrize(("ball", "bound"), [("global", 0.1), ("group", 0.1 * 2**0.5), ("tensor", 0.1 * 4**0.5)])
def test_each_ball_has_its_own_point(ball: str, bound: float) -> None:
    case = setup(dtype=torch.float64)
    base = SGD([{"params": layer} for layer in case.layers()], lr=0.0)
    optimizer = flatmin.RMP(base, epsilon=0.1, ball=ball)  # type: ignore[arg-type]
    lengths = []
    for _ in range(50):
        optimizer.step(case.closure(optimizer))
        lengths.append(float(optimizer.last.delta_norm))  # type: ignore[arg-type]
    assert max(lengths) <= bound * (1 + 1e-6)
    assert max(lengths) > 0.8 * bound


def test_the_same_generator_gives_the_same_training_and_the_global_one_stays_untouched() -> None:
    def train(seed: int) -> list[Tensor]:
        case = setup()
        generator = torch.Generator().manual_seed(seed)
        return run(case, flatmin.RMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.5, generator=generator), 3)

    assert same(train(1), train(1))
    assert not same(train(1), train(2))
    setup()
    state = torch.get_rng_state()
    train_again = setup()
    generator = torch.Generator().manual_seed(0)
    run(train_again, flatmin.RMP(SGD(train_again.model.parameters(), lr=0.1), epsilon=0.5, generator=generator), 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_parameters_stay() -> None:
    case = setup("frozen")
    theta = case.weights()
    optimizer = flatmin.RMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.5)
    seen = list[list[Tensor]]()
    optimizer.step(case.watched(optimizer, seen))
    assert same(seen[0][:2], theta[:2])
    assert not torch.equal(seen[0][2], theta[2])
    assert optimizer.last.loss_perturbed is not None
    assert optimizer.last.on_ball == 0


def test_epsilon_zero_is_the_base_optimizer_in_blocks_too() -> None:
    plain, wrapped = setup(), setup()
    expected = run(plain, SGD(plain.model.parameters(), lr=0.1), 3)
    optimizer = flatmin.RMP(SGD(wrapped.model.parameters(), lr=0.1), epsilon=0.0)
    for _ in range(3):
        wrapped.step_in_blocks(optimizer)
    assert same(wrapped.weights(), expected)


@pytest.mark.parametrize("ball", BALLS)
def test_groups_with_nothing_to_move_do_no_harm(ball: Ball) -> None:
    case = setup()
    first, second = case.layers()
    for param in second:
        param.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": first, "epsilon": 0.0}, {"params": second}, {"params": []}]
    for epsilon in (0.0, 0.1):
        groups[0]["epsilon"] = epsilon
        optimizer = flatmin.RMP(SGD(groups, lr=0.1), epsilon=0.1, ball=ball)
        theta = case.weights()
        assert not same(run(case, optimizer, 1), theta)
    empty = torch.nn.Parameter(torch.ones(0))
    optimizer = flatmin.RMP(SGD([*first, empty], lr=0.1), epsilon=0.1, ball=ball)
    run(case, optimizer, 1)
    assert optimizer.last.delta_norm is not None
    assert 0 < optimizer.last.delta_norm < 0.2


def test_entries_of_a_sparse_gradient_that_share_a_place_add_up() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = flatmin.RMP(SGD(table.parameters(), lr=0.1), epsilon=1e-6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = table(torch.tensor([1, 1, 3])).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.last.grad_norm == pytest.approx(10**0.5)  # two rows: (2, 2) and (1, 1)


# ---- the cube of the published code


@pytest.mark.parametrize(("ball", "dimensions"), [("tensor", (200, 50)), ("group", (250, 250)), ("global", (257, 257))])
def test_a_cube_has_numbers_up_to_the_root_of_epsilon_over_its_dimension(
    ball: Ball, dimensions: tuple[int, int]
) -> None:
    matrix, vector, other = (nn.Parameter(torch.zeros(shape)) for shape in ((20, 10), (50,), (7,)))
    base = SGD([{"params": [matrix, vector]}, {"params": [other]}], lr=0.0)
    generator = torch.Generator().manual_seed(0)
    optimizer = flatmin.RMP(base, epsilon=0.1, ball=ball, noise="cube", generator=generator)
    seen = list[list[Tensor]]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in (matrix, vector)])
        loss = matrix.sum() + vector.sum() + other.sum()
        loss.backward()
        return loss

    for _ in range(100):
        optimizer.step(closure)
    for place, dimension in enumerate(dimensions):
        numbers, side = torch.stack([one[place] for one in seen]).flatten(), (0.1 / dimension) ** 0.5
        assert numbers.abs().max() <= side * (1 + 1e-6)
        gap = ((numbers.sort().values / side + 1) / 2 - torch.linspace(0, 1, len(numbers))).abs().max()
        assert gap < 1.63 / len(numbers) ** 0.5  # Kolmogorov and Smirnov, 1 %


def test_a_cube_is_longer_than_its_ball_for_a_small_radius() -> None:
    weight = nn.Parameter(torch.zeros(10_000))
    optimizer = flatmin.RMP(SGD([weight], lr=0.0), epsilon=0.1, noise="cube")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.last.delta_norm == pytest.approx((0.1 / 3) ** 0.5, rel=0.02)
    assert torch.equal(weight, torch.zeros(10_000))


def test_a_cube_is_a_setting_of_the_l2_norm() -> None:
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="unknown noise 'box'"):
        flatmin.RMP(SGD([weight], lr=0.1), epsilon=0.1, noise="box")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm='l2'"):
        flatmin.RMP(SGD([weight], lr=0.1), epsilon=0.1, noise="cube", norm="linf")
