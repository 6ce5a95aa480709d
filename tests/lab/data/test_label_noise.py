"""Wrong labels on purpose: as many as asked for, every one wrong, the same for every method."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatmin_lab.data import load
from flatmin_lab.data.label_noise import add_label_noise
from tests.support.small_runs import tiny_data


@settings(deadline=None, max_examples=30)
@given(share=st.floats(0, 0.99), seed=st.integers(0, 1000))
def test_that_share_is_wrong_and_nothing_else_changes(share: float, seed: int) -> None:
    data = tiny_data()
    noisy, wrong = add_label_noise(data, share, seed=seed)
    assert len(wrong) == round(share * len(data.train))
    changed = (noisy.train.y != data.train.y).nonzero().flatten()
    assert changed.tolist() == sorted(wrong.tolist())
    assert noisy.train.y.min() >= 0
    assert noisy.train.y.max() < 3
    assert torch.equal(noisy.train.x, data.train.x)
    assert torch.equal(noisy.test.y, data.test.y)


def test_the_other_classes_are_equally_likely() -> None:
    digits = load("digits")
    shifts = []
    for seed in range(20):
        noisy, wrong = add_label_noise(digits, 0.5, seed=seed)
        shifts.append((noisy.train.y[wrong] - digits.train.y[wrong]) % 10)
    counts = torch.cat(shifts).bincount(minlength=10).double()
    assert counts[0] == 0
    expected = counts.sum() / 9
    chi = ((counts[1:] - expected).square() / expected).sum().item()
    assert chi < 26.1  # 8 degrees of freedom: one in a thousand is above


def test_a_share_of_one_or_a_single_class_is_refused() -> None:
    with pytest.raises(ValueError, match="got 1"):
        add_label_noise(tiny_data(), 1.0, seed=0)
