"""AutoAugment as a whole: the published policies, each image for itself, nothing decided on the host."""

import hashlib
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pillow_loop
from flatmin_lab.data import Augmentation, AutoAugment, Batches, Normalisation, Split, augmentation
from flatmin_lab.data.augment import autoaugment
from flatmin_lab.data.augment.operations import OPERATIONS, SIGNED, TABLES
from flatmin_lab.data.augment.policies import POLICIES, Operation
from tests.support.images import various

policies = pytest.mark.parametrize("policy", POLICIES)


def numbers(count: int, *, seed: int = 0) -> Tensor:
    return torch.rand(count, 5, generator=torch.Generator().manual_seed(seed))


def rows_of(policy: str, n: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Which row of the first and of the second stage each of n images gets."""
    rows: list[Tensor] = []

    def noted(self: object, x: Tensor, row: Tensor) -> Tensor:
        rows.append(row)
        return x

    monkeypatch.setattr(autoaugment._Stage, "__call__", noted)
    AutoAugment(policy)(torch.zeros(n, 3, 3, 3, dtype=torch.uint8), numbers(n))
    return rows


@policies
def test_images_are_those_of_the_pillow_loop(policy: str) -> None:
    """A shear's single grey levels may be stretched by the operation after it: all other images agree exactly."""
    stage = AutoAugment(policy)
    x = torch.cat([various(seed=seed) for seed in range(20)])
    u = numbers(len(x))
    result, expected = stage(x, u), pillow_loop.augment(Augmentation((stage,)), x, u)
    gap = (result.int() - expected.int()).abs().amax(dim=(1, 2, 3))
    chosen = [stage.pairs[int(number * 25)] for number in u[:, 0].tolist()]
    sheared = torch.tensor([pair[0].name.startswith("shear") for pair in chosen])
    stretched = torch.tensor([pair[1].name in TABLES for pair in chosen])
    assert int(gap[~sheared].max()) == 0
    assert int(gap[~stretched].max()) <= 1
    assert float((result.int() - expected.int()).abs().le(1).float().mean()) > 0.999


@policies
def test_operations_come_as_often_as_the_policy_says(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the rows that the stages get: 25 sub-policies alike, each operation by its probability and sign."""
    n = 200_000
    rows = rows_of(policy, n, monkeypatch)
    for half, row in enumerate(rows):
        counts = row.bincount(minlength=51)
        for number, pair in enumerate(POLICIES[policy]):
            share = counts[2 * number : 2 * number + 2] / n
            expected = pair[half].probability / 25 / 2
            tolerance = 5 * (expected / n) ** 0.5 + 1e-9
            assert abs(float(share[0]) - expected) < tolerance
            assert abs(float(share[1]) - expected) < tolerance
        assert int(counts.sum()) == n


@policies
def test_the_two_operations_of_an_image_are_drawn_apart(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 200_000
    rows = rows_of(policy, n, monkeypatch)
    done = [row < 50 for row in rows]
    number = int(numbers(1)[0, 0] * 25)
    first, second = POLICIES[policy][number]
    mine = (numbers(n)[:, 0] * 25).long() == number
    both = float((done[0] & done[1])[mine].float().mean())
    assert both == pytest.approx(first.probability * second.probability, abs=0.02)


@policies
def test_a_policy_is_25_pairs_of_known_operations(policy: str) -> None:
    pairs = POLICIES[policy]
    assert len(pairs) == 25
    assert {operation.name for pair in pairs for operation in pair} <= set(OPERATIONS)


def test_the_policies_are_the_published_ones() -> None:
    """Counted by hand in the published tables."""
    names = {name: Counter(op.name for pair in pairs for op in pair) for name, pairs in POLICIES.items()}
    digests = {"cifar10": "d2c5ce2247daf9f8", "svhn": "4f0e9917ea952dab"}
    for name, pairs in POLICIES.items():  # the whole tables, once compared with the published ones row by row
        content = repr([[tuple(operation) for operation in pair] for pair in pairs])
        assert hashlib.sha256(content.encode()).hexdigest()[:16] == digests[name]
    assert names["cifar10"]["equalize"] == 9
    assert names["cifar10"]["rotate"] == 1
    assert names["svhn"]["shear_y"] == 8
    assert names["svhn"]["invert"] == 12
    assert POLICIES["cifar10"][5] == (Operation("shear_y", 0.2, 7), Operation("posterize", 0.3, 7))
    assert POLICIES["svhn"][15] == (Operation("invert", 0.8, 5), Operation("translate_y", 0.0, 2))


def test_an_image_does_not_depend_on_its_batch() -> None:
    stage = AutoAugment("cifar10")
    x, u = various(), numbers(30)
    alone = torch.cat([stage(x[i : i + 1], u[i : i + 1]) for i in range(len(x))])
    assert torch.equal(stage(x, u), alone)


def test_the_input_is_left_alone() -> None:
    x, u = various(), numbers(30)
    before = x.clone()
    AutoAugment("svhn")(x, u)
    assert torch.equal(x, before)


def test_a_draw_just_below_one_takes_the_last_sub_policy() -> None:
    top = torch.tensor([1 - 2**-24])
    u = torch.cat([top, torch.zeros(1), top, torch.ones(2)])[None]
    x = various()[:1]
    last = POLICIES["cifar10"][24][0]
    assert last.name in SIGNED
    assert not torch.equal(AutoAugment("cifar10")(x, u), x)


def test_a_whole_batch_decides_nothing_on_the_host() -> None:
    """Also gathering and normalising: `Batches.at` under fake tensors."""
    split = Split(various(), torch.arange(30) % 3)
    batches = Batches(
        split=split, batch_size=8, normalise=Normalisation.of(split), augment=augmentation("autoaugment", "cifar10")
    )
    plan = batches.plan(0)
    batches.at(plan.order[:8], plan.u[:8])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, _ = batches.at(mode.from_tensor(plan.order[:8]), mode.from_tensor(plan.u[:8]))
    assert x.shape == (8, 3, 32, 32)


@pytest.mark.parametrize(("kind", "data"), [(k, d) for k in ("vanilla", "cutout", "autoaugment") for d in POLICIES])
def test_no_value_reaches_the_host_and_no_shape_depends_on_one(kind: str, data: str) -> None:
    """Fake tensors have shapes and no values: whatever asked for one would raise."""
    augment = augmentation(kind, data)  # type: ignore[arg-type]
    x, u = various(), torch.rand(30, augment.draws)
    augment(x, u)  # the tables are made once, outside
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = augment(mode.from_tensor(x), mode.from_tensor(u))
    assert result.shape == x.shape
    assert result.dtype == torch.uint8


def test_consecutive_draws_are_not_alike() -> None:
    stage, x = AutoAugment("cifar10"), various()
    results = [stage(x, numbers(30, seed=seed)) for seed in range(4)]
    assert not any(torch.equal(one, two) for one, two in pairwise(results))


def test_what_cannot_go_through_is_named() -> None:
    with pytest.raises(ValueError, match="3 colour channels, got images with 1"):
        AutoAugment()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), numbers(2))
    with pytest.raises(ValueError, match="at least 3 by 3, got 2 by 9"):
        AutoAugment()(torch.zeros(2, 3, 2, 9, dtype=torch.uint8), numbers(2))
    with pytest.raises(ValueError, match="unknown AutoAugment policy 'imagenet'; choose from cifar10, svhn"):
        AutoAugment("imagenet")
    with pytest.raises(ValueError, match="unknown operation 'blur'"):
        AutoAugment(((Operation("blur", 1.0, 3), Operation("invert", 0.0, 0)),))
    with pytest.raises(ValueError, match="tuple of at least one pair"):
        AutoAugment(())
    with pytest.raises(ValueError, match=r"probability of invert must be between 0 and 1, got 2\.0"):
        AutoAugment(((Operation("invert", 2.0, 1), Operation("invert", 0.0, 0)),))
    with pytest.raises(ValueError, match="level of invert must be 0 to 9, got 10"):
        AutoAugment(((Operation("invert", 1.0, 10), Operation("invert", 0.0, 0)),))
    with pytest.raises(ValueError, match="unknown augmentation 'mixup'"):
        augmentation("mixup", "cifar10")  # type: ignore[arg-type]
