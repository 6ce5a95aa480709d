"""Crop, flip and Cutout against a loop over single pictures, and the paper's augmentation of each data set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pillow_loop
from flatmin_lab.data import Augmentation, AutoAugment, Crop, Cutout, Flip, augmentation
from flatmin_lab.data.augment import Stage, below
from pictures import various

STAGES: list[Stage] = [Crop(4), Crop(2, fill=0), Crop(0), Flip(), Cutout(16), Cutout(8), Cutout(5), Cutout(20)]


def drawn(augment: Augmentation, count: int, *, seed: int = 0) -> Tensor:
    return augment.draw(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_stage_is_the_pillow_loop(stage: Stage) -> None:
    augment = Augmentation((stage,))
    x = torch.cat([various(seed=seed) for seed in range(5)])
    u = drawn(augment, len(x))
    assert torch.equal(augment(x, u), pillow_loop.augment(augment, x, u))


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "svhn"])
@pytest.mark.parametrize("kind", ["none", "vanilla", "cutout"])
def test_stages_follow_each_other_as_in_the_loop(kind: str, data: str) -> None:
    augment = augmentation(kind, data)  # type: ignore[arg-type]
    x = various()
    u = drawn(augment, len(x))
    assert torch.equal(augment(x, u), pillow_loop.augment(augment, x, u))


PAPER = {
    ("vanilla", "cifar10"): (Crop(4), Flip()),
    ("vanilla", "cifar100"): (Crop(4), Flip()),
    ("vanilla", "svhn"): (Crop(2),),
    ("cutout", "cifar10"): (Crop(4), Flip(), Cutout(16)),
    ("cutout", "cifar100"): (Crop(4), Flip(), Cutout(8)),
    ("cutout", "svhn"): (Crop(2), Cutout(20)),
    ("autoaugment", "cifar10"): (Crop(4), Flip(), AutoAugment("cifar10"), Cutout(16)),
    ("autoaugment", "cifar100"): (Crop(4), Flip(), AutoAugment("cifar10"), Cutout(8)),
    ("autoaugment", "svhn"): (AutoAugment("svhn"), Cutout(20)),
    ("none", "svhn"): (),
}


@pytest.mark.parametrize(("kind", "data"), PAPER)
def test_each_data_set_has_the_published_augmentation(kind: str, data: str) -> None:
    assert augmentation(kind, data).stages == PAPER[kind, data]  # type: ignore[arg-type]
    assert all(stage.fill == 128 for stage in PAPER[kind, data] if isinstance(stage, Crop))


def test_other_data_takes_photographs_rules() -> None:
    assert augmentation("cutout", "pets", side=64).stages == (Crop(8), Flip(), Cutout(32))
    assert augmentation("cutout", "digits", side=8).stages == (Crop(1, fill=0), Cutout(4))


def test_every_place_of_the_crop_is_as_likely_and_so_is_the_flip() -> None:
    n = 81_000
    marked = torch.arange(81, dtype=torch.uint8).view(1, 1, 9, 9)
    window = Crop(4, fill=255)
    # a 1 by 1 picture padded by 4: the window shows the picture in one of 81 places
    x = torch.zeros(n, 1, 1, 1, dtype=torch.uint8)
    u = torch.rand(n, 3, generator=torch.Generator().manual_seed(0))
    shown = float((window(x, u[:, :2]) == 0).float().mean())
    assert shown == pytest.approx(1 / 81, rel=0.2)
    places = (below(u[:, 0], 9) * 9 + below(u[:, 1], 9)).bincount(minlength=81)
    assert int(places.min()) > 850
    assert int(places.max()) < 1150
    mirrored = Flip()(marked.expand(n, -1, -1, -1), u[:, 2:])[:, 0, 0, 0] == 8
    assert float(mirrored.float().mean()) == pytest.approx(0.5, abs=0.01)


def test_the_hole_is_black_and_its_middle_is_anywhere() -> None:
    n = 4096
    x = torch.full((n, 3, 32, 32), 255, dtype=torch.uint8)
    holed = Cutout(16)(x, torch.rand(n, 2, generator=torch.Generator().manual_seed(0)))
    sizes = (holed[:, 0] == 0).sum(dim=(1, 2))
    assert set(holed.unique().tolist()) == {0, 255}
    assert int(sizes.max()) == 256
    assert int(sizes.min()) == 64  # in a corner
    assert torch.equal((holed == 0).any(dim=1), (holed == 0).all(dim=1))


@given(count=st.integers(1, 1000), bits=st.integers(0, 2**24 - 1))
@settings(deadline=None, derandomize=True)
def test_whole_numbers_stay_below_their_count(count: int, bits: int) -> None:
    u = torch.tensor([bits / 2**24])
    assert 0 <= int(below(u, count)) < count


def test_random_numbers_belong_to_the_picture_not_to_the_batch() -> None:
    augment = augmentation("autoaugment", "cifar10")
    x = various()
    u = drawn(augment, len(x))
    halves = [augment(x[part], u[part]) for part in (slice(0, 7), slice(7, None))]
    assert torch.equal(augment(x, u), torch.cat(halves))
    assert torch.equal(u, drawn(augment, len(x)))
    assert u.shape == (len(x), 2 + 1 + 5 + 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Crop(-1), "padding must be at least 0, got -1"),
        (lambda: Crop(1, fill=256), "from 0 to 255, got 256"),
        (lambda: Cutout(0), "length must be at least 1, got 0"),
    ],
)
def test_impossible_stages_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
