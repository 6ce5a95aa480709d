"""The chosen trial against ERM: a paired test that stays honest although the best of many is tested."""

from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.checkpoint import Checkpoint
from flatmin_lab.runs.folder import VALIDATION, read_image_scores
from flatmin_lab.tuning.erm_comparison import LEVEL, Comparison, compare

IMAGES, REPEATS = 100, 120


def errors(count: int, *, share: float = 0.1, seed: int = 0) -> list[Tensor]:
    """Of networks that are wrong on the same share of images: they differ by chance alone."""
    random = torch.Generator().manual_seed(seed)
    hardness = torch.rand(IMAGES, generator=random) * 2 * share
    return [(torch.rand(IMAGES, generator=random) < hardness).to(torch.uint8) for _ in range(count)]


def best_of(erm: Tensor, trials: list[Tensor]) -> Comparison:
    scores = dict(enumerate(trials, start=1))
    return compare(erm, scores, chosen=min(scores, key=lambda number: float(scores[number].float().mean())))


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_with_one_trial_it_is_mcnemars_test(lost: int) -> None:
    """One-sided and exact; where its p is too near 5 %, random signs may fall on either side."""
    decided = []
    for won in range(lost, 25):
        erm, trial = torch.zeros(2, IMAGES)
        erm[:won], trial[won : won + lost] = 1, 1
        p = binomtest(won, max(won + lost, 1), alternative="greater").pvalue
        if abs(p - LEVEL) > 0.02:
            decided.append(p < LEVEL)
            assert compare(erm, {1: trial}, chosen=1).is_better == decided[-1], (won, p)
    assert set(decided) == {True, False}


def test_the_gain_is_the_difference_of_the_means() -> None:
    erm, one, two = torch.rand(3, IMAGES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = compare(erm, {4: one, 7: two}, chosen=7, others=3)
    assert found.gain == pytest.approx(float(erm.mean() - two.mean()))
    assert (found.trial, found.images, found.trials) == (7, IMAGES, 5)


def test_the_best_of_many_trials_that_are_no_better_seldom_passes_for_better() -> None:
    """At most 5 % of the time; a test of the best one alone would err much more often."""
    honest, naive = 0, 0
    for seed in range(REPEATS):
        erm, *trials = errors(13, seed=seed)
        honest += best_of(erm, trials).is_better
        best = min(trials, key=lambda one: float(one.float().mean()))
        naive += compare(erm, {1: best}, chosen=1).is_better
    assert honest <= binom_limit(REPEATS, LEVEL)
    assert naive > binom_limit(REPEATS, LEVEL)


def binom_limit(count: int, share: float) -> int:
    """More than that are found in fewer than 1 of 1000 cases."""
    return next(k for k in range(count) if binomtest(k + 1, count, share, alternative="greater").pvalue < 1e-3)


def test_a_much_worse_trial_does_not_hide_a_better_one() -> None:
    erm, good, bad = torch.zeros(3, IMAGES)
    erm[:12], bad[20:] = 1, 1
    alone = compare(erm, {1: good}, chosen=1)
    assert alone.is_better
    together = compare(erm, {1: good, 2: bad}, chosen=1)
    assert together.is_better
    assert together.chance < 1.5 * alone.chance


def test_trials_without_scores_raise_the_bar() -> None:
    erm, trial = torch.zeros(2, IMAGES)
    erm[:8] = 1
    chances = [compare(erm, {1: trial}, chosen=1, others=others).chance for others in (0, 1, 20)]
    assert chances == sorted(chances)
    assert chances[0] < chances[-1]


def test_a_trial_with_the_same_answers_is_no_better_and_the_same_scores_give_the_same_answer() -> None:
    (erm,) = errors(1)
    same = compare(erm, {1: erm}, chosen=1)
    assert (same.gain, same.is_better) == (0.0, False)
    nll = torch.rand(2, IMAGES, generator=torch.Generator().manual_seed(0))
    assert compare(nll[0], {1: nll[1]}, chosen=1) == compare(nll[0], {1: nll[1]}, chosen=1)


def test_scores_that_are_missing_damaged_or_not_finite_are_none(tmp_path: Path) -> None:
    assert read_image_scores(tmp_path, "error") is None
    checkpoint.write(tmp_path / VALIDATION, Checkpoint({"error": torch.ones(3), "nll": torch.tensor([torch.nan])}, {}))
    found = read_image_scores(tmp_path, "error")
    assert found is not None
    assert found.tolist() == [1, 1, 1]
    assert read_image_scores(tmp_path, "nll") is None
    (tmp_path / VALIDATION).write_bytes(b"noise")
    assert read_image_scores(tmp_path, "error") is None
