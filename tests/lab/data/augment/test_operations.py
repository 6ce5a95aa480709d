"""AutoAugment's operations, one by one and image by image, against Pillow."""

import pytest
import torch
from torch import Tensor

import pillow_loop
from flatmin_lab.data import AutoAugment
from flatmin_lab.data.augment import operations
from flatmin_lab.data.augment.operations import GEOMETRIC, LEVELS, OPERATIONS, SIGNED
from flatmin_lab.data.augment.policies import Operation
from tests.support.images import various

NOTHING = Operation("invert", 0.0, 0)
CASES = [(name, sign) for name in OPERATIONS for sign in ((1, -1) if name in SIGNED else (1,))]


def ours(name: str, level: int, sign: int, x: Tensor) -> Tensor:
    """The operation alone, as a policy of one."""
    u = torch.zeros(len(x), 5)
    u[:, 2] = 0.25 if sign < 0 else 0.75
    return AutoAugment(((Operation(name, 1.0, level), NOTHING),))(x, u)


def pillows(name: str, level: int, sign: int, x: Tensor) -> Tensor:
    amount = sign * operations.magnitude(name, level)
    return torch.stack(
        [pillow_loop.to_tensor(pillow_loop.operation(pillow_loop.to_pil(one), name, amount)) for one in x]
    )


@pytest.mark.parametrize(("name", "sign"), CASES)
@pytest.mark.parametrize("size", [(32, 32), (28, 28), (24, 40)])
def test_every_level_is_pillows(name: str, sign: int, size: tuple[int, int]) -> None:
    """Colour exactly; shears, whose cubic Pillow computes in double precision, within one grey level everywhere."""
    x = various(height=size[0], width=size[1])
    for level in range(LEVELS):
        gap = (ours(name, level, sign, x).int() - pillows(name, level, sign, x).int()).abs()
        if name in operations.SHEARS:
            assert int(gap.max()) <= 1
            assert float((gap == 0).float().mean()) > 0.99
        else:
            assert int(gap.max()) == 0, f"level {level}"


def test_there_are_fourteen() -> None:
    assert len(set(OPERATIONS)) == len(OPERATIONS) == 14
    assert "rotate" in GEOMETRIC
    assert "rotate" not in SIGNED


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_mirrored_operation_goes_the_other_way(name: str) -> None:
    x = various()
    same = torch.equal(ours(name, 7, 1, x), ours(name, 7, -1, x))
    assert same == (name not in SIGNED)


@pytest.mark.parametrize("name", ["shear_x", "translate_y", "rotate"])
def test_what_was_outside_the_image_is_grey(name: str) -> None:
    x = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    moved = ours(name, 9, 1, x)
    assert set(moved.unique().tolist()) == {0, 128}


def test_an_area_of_one_level_stays_so_under_a_shear() -> None:
    """The four weights sum to 1 − 6e-8 in places: cutting to whole numbers must not darken them."""
    for level in range(256):
        x = torch.full((1, 3, 32, 32), level, dtype=torch.uint8)
        assert set(ours("shear_y", 7, 1, x).unique().tolist()) == {level, 128}


def test_the_weights_of_the_cubic_sum_to_one() -> None:
    between = torch.linspace(0, 1, 101)
    torch.testing.assert_close(operations.cubic(between).sum(dim=0), torch.ones(101))


# what level 9 means, from the AutoAugment paper's table 6 and the published AMP code; level 0 of the first is nothing
RANGES = {
    "shear_x": (0.0, 0.3),
    "shear_y": (0.0, 0.3),
    "translate_x": (0.0, 150 / 331),
    "translate_y": (0.0, 150 / 331),
    "rotate": (0.0, 30.0),
    "color": (0.0, 0.9),
    "contrast": (0.0, 0.9),
    "sharpness": (0.0, 0.9),
    "brightness": (0.0, 0.9),
    "solarize": (256.0, 0.0),
}


def test_levels_mean_what_they_do_in_the_published_code() -> None:
    for name, (first, last) in RANGES.items():
        expected = [first + (last - first) * level / 9 for level in range(10)]
        assert [operations.magnitude(name, level) for level in range(10)] == pytest.approx(expected)
    assert [operations.magnitude("posterize", level) for level in range(10)] == [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]
    assert set(SIGNED) == set(RANGES) - {"rotate", "solarize"}
    assert operations.FILL == 128
