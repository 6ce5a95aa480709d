"""Normalisation by the training set's own statistics, and batches fixed by seed and epoch alone."""

import pytest
import torch
from torch.utils.data import DataLoader

from flatmin_lab.data import Augmentation, Batches, Dataset, Normalisation, Split, augmentation, in_order, load
from flatmin_lab.data.batches import HeldOut
from flatmin_lab.system.rng import generator
from tests.support.official_files import made


def images(count: int = 103) -> Dataset:
    return Dataset("made", Split(*made(count, 10, seed=0)), Split(*made(20, 10, seed=1)), [str(n) for n in range(10)])


def batches(data: Dataset, **settings: object) -> Batches:
    chosen = {"batch_size": 10, "augment": augmentation("autoaugment", "cifar10"), "seed": 0, **settings}
    return Batches(split=data.train, normalise=Normalisation.of(data.train), **chosen)  # type: ignore[arg-type]


class TestNormalisation:
    def test_two_given_numbers_bring_pixels_to_minus_one_and_one(self) -> None:
        train = load("digits").train
        given = Normalisation.fixed(0.5, 0.5, like=train)
        assert (given.mean.tolist(), given.std.tolist()) == ([0.5], [0.5])
        black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        assert given(black_and_white).flatten().tolist() == [-1.0, 1.0]
        with pytest.raises(ValueError, match="above 0, got 0"):
            Normalisation.fixed(0.5, 0.0, like=train)

    def test_the_training_set_gets_mean_zero_and_standard_deviation_one(self) -> None:
        for data in (images(), load("digits"), load("spiral")):
            x = Normalisation.of(data.train)(data.train.x).double()
            axes = [axis for axis in range(x.ndim) if axis != 1]
            torch.testing.assert_close(x.mean(dim=axes), torch.zeros(x.shape[1]).double(), atol=1e-6, rtol=0)
            torch.testing.assert_close(
                x.std(dim=axes, correction=0), torch.ones(x.shape[1]).double(), rtol=1e-6, atol=0
            )

    def test_statistics_are_float64s(self) -> None:
        x = images(5000).train.x
        found = Normalisation.of(Split(x, torch.zeros(len(x), dtype=torch.int64)))
        unit = x.double() / 255
        torch.testing.assert_close(found.mean, unit.mean(dim=(0, 2, 3)).float(), rtol=1e-7, atol=0)
        torch.testing.assert_close(found.std, unit.std(dim=(0, 2, 3), correction=0).float(), rtol=1e-7, atol=0)

    def test_undo_is_the_inverse(self) -> None:
        data = images()
        normalise = Normalisation.of(data.train)
        back = normalise.undo(normalise(data.train.x))
        assert torch.equal((back * 255).round().to(torch.uint8), data.train.x)

    def test_a_channel_that_never_varies_stays_finite(self) -> None:
        x = torch.full((4, 3, 5, 5), 9, dtype=torch.uint8)
        normalised = Normalisation.of(Split(x, torch.zeros(4, dtype=torch.int64)))(x)
        assert torch.equal(normalised, torch.zeros_like(normalised))

    def test_it_can_give_bfloat16(self) -> None:
        data = images()
        assert Normalisation.of(data.train)(data.train.x, dtype=torch.bfloat16).dtype == torch.bfloat16


class TestBatches:
    def test_an_epoch_shows_every_image_once(self) -> None:
        data = images()
        split = Split(data.train.x, torch.arange(len(data.train)))
        plain = Batches(split=split, batch_size=10, normalise=Normalisation.of(split))
        seen = [y for _, y in plain.epoch(0)]
        assert [len(y) for y in seen] == [10] * 10 + [3]
        assert len(plain) == 11
        assert torch.cat(seen).sort().values.equal(torch.arange(103))

    def test_images_that_are_held_out_are_not_shown_until_their_time_and_an_epoch_is_as_long(self) -> None:
        data = images()
        out = torch.tensor([2, 3, 50])
        plain, some = batches(data), batches(data, held_out=HeldOut(out, epochs=2))
        for epoch in range(2):
            order = some.plan(epoch).order
            assert len(order) == 103
            assert not torch.isin(order, out).any()
            assert len(order.unique()) == 100  # all others, three of them twice
            assert torch.equal(order, some.plan(epoch).order)
        assert not torch.equal(some.plan(0).order, some.plan(1).order)
        for epoch in (2, 3):
            assert torch.equal(some.plan(epoch).order, plain.plan(epoch).order)
        most = batches(data, held_out=HeldOut(torch.arange(80), epochs=1)).plan(0).order
        assert most.bincount(minlength=103)[80:].min() >= 4
        assert len(most) == 103

    def test_the_same_seed_and_epoch_give_the_same_batches(self) -> None:
        data = images()
        one, two = (list(batches(data).epoch(4)) for _ in range(2))
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True))
        for other in (batches(data).epoch(5), batches(data, seed=1).epoch(4)):
            assert not torch.equal(next(iter(other))[0], one[0][0])

    def test_an_epoch_goes_on_from_any_batch(self) -> None:
        data = images()
        whole = list(batches(data).epoch(2))
        rest = list(batches(data).epoch(2, start=7))
        assert len(rest) == len(whole) - 7
        assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[7:], rest, strict=True))

    def test_its_parts_make_its_batches(self) -> None:
        plan = batches(images())
        parts, whole = list(plan.parts(2, start=8)), list(plan.epoch(2, start=8))
        assert [len(index) for index, _ in parts] == [10, 10, 3]
        for (index, u), (x, y) in zip(parts, whole, strict=True):
            again = plan.at(index, u)
            assert torch.equal(again[0], x)
            assert torch.equal(again[1], y)

    def test_the_global_generator_is_left_alone(self) -> None:
        before = torch.get_rng_state()
        list(batches(images()).epoch(0))
        assert torch.equal(before, torch.get_rng_state())

    def test_a_batch_is_the_images_it_names(self) -> None:
        data = images()
        plain = batches(data, augment=Augmentation())
        plan = plain.plan(3)
        x, y = next(iter(plain.epoch(3)))
        assert torch.equal(x, plain.normalise(data.train.x[plan.order[:10]]))
        assert torch.equal(y, data.train.y[plan.order[:10]])

    def test_evaluation_goes_in_order(self) -> None:
        data = images()
        normalise = Normalisation.of(data.train)
        parts = list(in_order(data.test, normalise, batch_size=8))
        assert torch.equal(torch.cat([x for x, _ in parts]), normalise(data.test.x))
        assert torch.equal(torch.cat([y for _, y in parts]), data.test.y)

    def test_impossible_combinations_are_refused(self) -> None:
        data = images()
        for size in (0, -3, 104):
            with pytest.raises(ValueError, match=f"from 1 to the 103 images of the split, got {size}"):
                batches(data, batch_size=size)
        with pytest.raises(ValueError, match="3 colour channels, got images with 1"):
            batches(load("digits"))
        for start in (-1, 12):
            with pytest.raises(ValueError, match=f"one of the 11 batches of an epoch, got {start}"):
                next(batches(data).epoch(0, start=start))
        assert list(batches(data).epoch(0, start=11)) == []

    def test_other_objects_are_refused_with_the_way_out(self) -> None:
        data = images()
        normalise = Normalisation.of(data.train)
        with pytest.raises(TypeError, match=r"split must be a Split, got Dataset; use data\.train"):
            Batches(split=data, batch_size=5, normalise=normalise)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"split must be a Split, got DataLoader; .*from_torch"):
            Batches(split=DataLoader([1]), batch_size=5, normalise=normalise)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="augment must be a Augmentation, got str"):
            batches(data, augment="vanilla")
        with pytest.raises(TypeError, match=r"takes a Split such as data\.train, got Dataset"):
            Normalisation.of(data)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="only images can be augmented, got points"):
            batches(load("spiral"), augment=augmentation("vanilla", "cifar10"))


def test_a_generator_depends_on_its_purpose_alone() -> None:
    def first(*what: str | int) -> float:
        return float(torch.rand((), generator=generator(*what)))

    assert first("order", 0, 1) == first("order", 0, 1)
    assert len({first(*what) for what in (("order", 0, 1), ("order", 1, 0), ("augment", 0, 1), ("order", 0))}) == 4
