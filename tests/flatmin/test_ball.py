"""Norms and projections: inside the ball, nearest, idempotent, over the right tensors, without overflow of rounding."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from flatmin.ball import BALLS, NORMS, Ball, Norm, combine, norms, project_, radii, shrink

sizes = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=3)
magnitudes = st.floats(1e-6, 1e6)


def draw(shape: list[list[int]], seed: int, magnitude: float, dtype: torch.dtype) -> list[list[Tensor]]:
    """Groups of tensors of these sizes; heavy-tailed, so that a few numbers carry the norm."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(n, generator=generator, dtype=torch.float64) ** 3 * magnitude).to(dtype) for n in group]
        for group in shape
    ]


def lengths_by_ball(groups: list[list[Tensor]], ball: Ball, norm: Norm) -> list[float]:
    """Brute force: one float64 norm for each ball."""
    everything = [[t for group in groups for t in group]]
    balls = {"global": everything, "group": groups, "tensor": [[t] for group in groups for t in group]}[ball]
    order = 2 if norm == "l2" else float("inf")
    flats = [torch.cat([t.double().flatten() for t in tensors]) for tensors in balls]
    return [float(torch.linalg.vector_norm(flat, order)) if flat.numel() else 0.0 for flat in flats]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("ball", BALLS)
@settings(deadline=None, max_examples=60)
@given(shape=sizes, seed=st.integers(0, 2**31), magnitude=magnitudes, epsilon=magnitudes)
def test_a_projection_is_inside_the_ball_and_projecting_again_changes_nothing(
    ball: Ball, norm: Norm, dtype: torch.dtype, shape: list[list[int]], seed: int, magnitude: float, epsilon: float
) -> None:
    delta = draw(shape, seed, magnitude, dtype)
    before = lengths_by_ball(delta, ball, norm)
    original = [[t.clone() for t in group] for group in delta]
    project_(delta, [epsilon] * len(delta), ball=ball, norm=norm)
    after = lengths_by_ball(delta, ball, norm)
    assert all(length <= epsilon * (1 + 1e-6) for length in after)
    for was, now in zip(before, after, strict=True):
        assert now == pytest.approx(min(was, epsilon), rel=1e-6)
    if all(length <= epsilon * (1 - 1e-6) for length in before):
        assert all(torch.equal(a, b) for x, y in zip(original, delta, strict=True) for a, b in zip(x, y, strict=True))
    once = [[t.clone() for t in group] for group in delta]
    project_(delta, [epsilon] * len(delta), ball=ball, norm=norm)
    for x, y in zip(once, delta, strict=True):
        for a, b in zip(x, y, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31))
def test_a_projection_is_the_nearest_point_of_the_ball(norm: Norm, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    point = torch.randn(5, generator=generator, dtype=torch.float64) * 3
    projected = point.clone()
    project_([[projected]], [1.0], norm=norm)
    others = torch.randn(2000, 5, generator=generator, dtype=torch.float64)
    if norm == "l2":
        others /= others.norm(dim=1, keepdim=True).clamp(min=1)
    else:
        others.clamp_(-1, 1)
    assert (projected - point).norm() <= (others - point).norm(dim=1).min() + 1e-12


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (4096,), (4097,), (3, 5, 7), (64, 32, 3, 3)])
def test_norms_equal_brute_force(norm: Norm, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape, dtype=dtype)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.double().flatten()
    expected = 0.0 if flat.numel() == 0 else float(flat.norm() if norm == "l2" else flat.abs().max())
    assert float(norms([tensor], norm=norm)[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["channels-last", "transposed", "strided", "expanded"])
def test_norms_are_right_for_any_layout_in_memory(layout: str) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(16, 24, 5, 5)
    tensor = {
        "channels-last": lambda: tensor.to(memory_format=torch.channels_last),
        "transposed": lambda: tensor.transpose(0, 1),
        "strided": lambda: tensor[::2, 1:, :, ::2],
        "expanded": lambda: tensor[:, :1].expand(16, 24, 5, 5),
    }[layout]()
    for norm, order in (("l2", 2), ("linf", float("inf"))):
        expected = torch.linalg.vector_norm(tensor.double(), order)
        assert float(norms([tensor], norm=norm)[0]) == pytest.approx(float(expected), rel=1e-6)  # type: ignore[arg-type]


def test_the_norm_of_millions_of_float32_numbers_is_right_to_a_millionth() -> None:
    """Torch's own is 0.1 % too small there, on the CPU, which would let Δ leave its ball."""
    torch.manual_seed(0)
    tensor = torch.randn(20_000_000)
    exact = float(tensor.double().norm())
    assert float(norms([tensor])[0]) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm", NORMS)
def test_what_is_not_finite_is_projected_onto_the_centre_of_its_ball(poison: float, norm: Norm) -> None:
    spoilt, sound = torch.tensor([1.0, poison]), torch.tensor([0.5])
    project_([[spoilt], [sound]], [1.0, 1.0], ball="group", norm=norm)
    assert spoilt.tolist() == [0.0, 0.0]
    assert sound.tolist() == [0.5]


def test_radii_may_be_tensors_on_the_device() -> None:
    delta = torch.tensor([3.0, 4.0])
    project_([[delta]], [torch.tensor(1.0)])
    assert delta.tolist() == pytest.approx([0.6, 0.8])
    assert shrink(torch.tensor(4.0), torch.tensor(2.0)) == 0.5


def test_nothing_has_no_length() -> None:
    assert norms([]).tolist() == []
    assert combine(norms([])) == 0
    assert combine(norms([], norm="linf"), norm="linf") == 0
    project_([[]], [1.0])
    assert radii([norms([torch.zeros(2)])], ball="global")[0] == 0
