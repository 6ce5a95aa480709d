"""Crop, flip and Cutout against a loop over single images, and the paper's augmentation of each data set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pillow_loop
from flatmin_lab.data import Augmentation, AutoAugment, Crop, Cutout, Dataset, Flip, Split, augmentation, load
from flatmin_lab.data.augment.transforms import Stage, to_index
from tests.support.images import various

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
@pytest.mark.parametrize("kind", ["none", "vanilla", "vanilla_v1", "cutout"])
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


def test_the_first_version_pads_by_two_pixels_of_black() -> None:
    assert augmentation("vanilla_v1", "cifar10").stages == (Crop(2, fill=0), Flip())
    assert augmentation("vanilla_v1", "cifar100").stages == (Crop(2, fill=0), Flip())
    assert augmentation("vanilla_v1", "svhn").stages == (Crop(2, fill=0),)
    assert augmentation("vanilla_v1", "digits").stages == (Crop(1, fill=0),)
    assert augmentation("vanilla_v1", load("digits")).stages == (Crop(1, fill=0),)
    assert augmentation("vanilla_v1", own(3, 64, 48)).stages == (Crop(3, fill=0), Flip())
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    corner = augmentation("vanilla_v1", "cifar100")(white, torch.tensor([[0.0, 0.0, 0.9]]))  # up and left, no flip
    assert (corner == 0).sum() == 3 * (32 * 32 - 30 * 30)
    assert torch.equal(corner[..., 2:, 2:], white[..., 2:, 2:])


def own(*shape: int, name: str = "pets") -> Dataset:
    x, y = torch.zeros(2, *shape, dtype=torch.uint8), torch.tensor([0, 1])
    return Dataset(name, Split(x, y), Split(x, y), ["cat", "dog"])


def test_other_data_takes_photographs_rules_from_its_size() -> None:
    assert augmentation("cutout", own(3, 64, 64)).stages == (Crop(8), Flip(), Cutout(32))
    assert augmentation("cutout", own(1, 8, 10)).stages == (Crop(1), Flip(), Cutout(4))
    assert augmentation("cutout", load("digits")).stages == (Crop(1, fill=0), Cutout(4))
    assert augmentation("none", load("spiral")).stages == ()
    assert augmentation("cutout", own(3, 64, 64, name="digits")).stages == (
        Crop(8),
        Flip(),
        Cutout(32),
    )  # of that name only


def test_what_does_not_fit_the_data_is_said_before_the_first_batch() -> None:
    with pytest.raises(ValueError, match="3 colour channels, got images with 1"):
        augmentation("autoaugment", load("digits"))
    with pytest.raises(ValueError, match="only images can be augmented, got the points of spiral"):
        augmentation("vanilla", load("spiral"))
    for name in ("SVHN", "svnh", "", "pets"):
        with pytest.raises(
            ValueError, match=f"augmentation of '{name}' is not known; choose from cifar10, .*Dataset itself"
        ):
            augmentation("vanilla", name)
    with pytest.raises(ValueError, match=r"at most the image's side.*got 16 for images of 8 by 8"):
        augmentation("cutout", "cifar10").check(torch.Size([3, 8, 8]))


@pytest.mark.parametrize(
    ("x", "u", "error", "message"),
    [
        (torch.zeros(2, 3, 8, 8), torch.zeros(2, 3), TypeError, r"must be uint8 \(B, C, H, W\), got torch.float32"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, 3), ValueError, r"shape \(2, 3\), got .*\(1, 3\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 4), ValueError, r"shape \(2, 3\), got .*\(2, 4\)"),
        (
            torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
            torch.zeros(2, 3).double(),
            ValueError,
            "float32 .*got torch.float64",
        ),
    ],
)
def test_wrong_tensors_are_named(x: Tensor, u: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        augmentation("vanilla", "cifar10")(x, u)


def test_every_place_of_the_crop_is_as_likely_and_so_is_the_flip() -> None:
    """An image of one white pixel: where it lands in the window tells what was drawn."""
    n = 81_000
    x = torch.zeros(n, 1, 9, 9, dtype=torch.uint8)
    x[:, 0, 4, 4] = 255
    u = torch.rand(n, 3, generator=torch.Generator().manual_seed(0))
    places = Crop(4, fill=0)(x, u[:, :2]).flatten(1).argmax(dim=1).bincount(minlength=81)
    assert int(places.min()) > 850
    assert int(places.max()) < 1150
    x[:, 0, 4, 4], x[:, 0, 4, 0] = 0, 255
    mirrored = Flip()(x, u[:, 2:])[:, 0, 4, 8] == 255
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
    assert 0 <= int(to_index(u, count)) < count


def test_random_numbers_belong_to_the_image_not_to_the_batch() -> None:
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
