"""What is said of a model's confidence is what the library measures of its logits, in float64."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from flatmin import metrics
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.outside import OutsideData
from flatmin_lab.evaluation import measurements
from flatmin_lab.evaluation.confidence import detection, risk_over_coverage, roc_curve
from flatmin_lab.evaluation.subject import Subject, user_subject
from tests.support.small_runs import tiny_data


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    return user_subject(model, tiny_data(), normalised=True, device=torch.device("cpu"))


def inverted(subject: Subject) -> OutsideData:
    return OutsideData("inverted", Split(255 - subject.test.x, torch.zeros_like(subject.test.y)))


def test_the_risk_over_coverage_is_that_of_the_largest_probability(subject: Subject) -> None:
    logits, labels = measurements.logits_on_test(subject), subject.test.y
    found = measurements.calibration(subject)["selective"]
    confidence, wrong = metrics.max_probability(logits.double()), logits.argmax(dim=1) != labels
    assert found["aurc"] == pytest.approx(metrics.aurc(confidence, wrong).item(), abs=1e-12)
    assert found["e_aurc"] == pytest.approx(metrics.e_aurc(confidence, wrong).item(), abs=1e-12)
    assert found["aurc_interval"][0] <= found["aurc"] <= found["aurc_interval"][1]
    assert found["risk"] == pytest.approx(metrics.risk_coverage(confidence, wrong).risk.tolist(), abs=1e-6)
    assert found["risk"][-1] == pytest.approx(metrics.error(logits, labels).item(), abs=1e-6)


@pytest.mark.parametrize("count", [1, 30, 100, 101, 359, 1000])
def test_a_curve_has_at_most_a_hundred_points_and_ends_with_all(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    logits, labels = torch.randn(count, 3, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    found = risk_over_coverage(logits, labels)
    assert len(found["coverage"]) == len(found["risk"]) == min(count, 100)
    assert found["coverage"] == sorted(set(found["coverage"]))
    assert found["coverage"][-1] == 1
    steps = [k / min(count, 100) for k in range(1, min(count, 100) + 1)]
    assert all(-1e-6 < here - wanted < 1 / count + 1e-6 for here, wanted in zip(found["coverage"], steps, strict=True))


def test_confidences_that_are_one_in_float32_are_told_apart() -> None:
    """The wrong answer is the least certain of five, by the logits; in float32 all five tie."""
    logits = torch.zeros(5, 2)
    logits[:, 0] = torch.tensor([20.0, 22.0, 24.0, 26.0, 28.0])
    labels = torch.tensor([1, 0, 0, 0, 0])
    assert bool((metrics.max_probability(logits) == 1).all())
    assert risk_over_coverage(logits, labels)["risk"] == pytest.approx([0, 0, 0, 0, 0.2])


def test_detection_compares_the_scores_of_both_sets(subject: Subject) -> None:
    outside, inside = inverted(subject), measurements.logits_on_test(subject)
    found = detection(subject, inside, outside)
    with torch.no_grad():
        logits = subject.model(subject.normalise(outside.split.x))
    assert (found["pictures"], found["sha256"]) == (30, outside.checksum)
    for name, score in metrics.CONFIDENCE_SCORES.items():
        pair = score(inside.double()), score(logits.double())
        assert found[name]["auroc"] == pytest.approx(metrics.auroc(*pair).item(), abs=1e-6)
        assert found[name]["fpr95"] == pytest.approx(metrics.fpr_at_tpr(*pair).item(), abs=1e-6)
        curve = roc_curve(*pair)
        assert found[name]["roc"] == pytest.approx(curve.tolist(), abs=1e-6)
        assert (len(curve), curve[-1].item()) == (101, 1.0)
        for part in ("auroc", "fpr95"):
            low, high = found[name][f"{part}_interval"]
            assert 0 <= low <= found[name][part] <= high <= 1


def by_brute_force(inside: list[float], outside: list[float], wanted: Fraction) -> Fraction:
    """The highest TPR at this FPR; else on the line between the nearest thresholds below and above."""
    points = [(Fraction(0), Fraction(0))]
    for threshold in sorted({*inside, *outside}, reverse=True):
        far, near = (Fraction(sum(x >= threshold for x in side), len(side)) for side in (outside, inside))
        points.append((far, near))
    if at := [near for far, near in points if far == wanted]:
        return max(at)
    (x, y), (right, top) = max(p for p in points if p[0] < wanted), min(p for p in points if p[0] > wanted)
    return y + (top - y) * (wanted - x) / (right - x)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 5), (7, 3), (12, 20)])
@pytest.mark.parametrize("levels", [1, 2, 5, 1000])  # few levels: many ties
def test_the_roc_curve_is_that_of_all_thresholds(sizes: tuple[int, int], levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    inside, outside = (torch.randint(0, levels, (size,), generator=generator).double() / levels for size in sizes)
    found = roc_curve(inside, outside, points=12)
    expected = [by_brute_force(inside.tolist(), outside.tolist(), Fraction(k, 12)) for k in range(13)]
    assert found.tolist() == pytest.approx([float(one) for one in expected], abs=1e-6)
    fine = roc_curve(inside.float(), outside.float(), points=20_000)  # its area is the AUROC
    assert fine.mean().item() == pytest.approx(metrics.auroc(inside, outside).item(), abs=1e-3)


def test_outside_data_without_probabilities_are_named(subject: Subject) -> None:
    inside, outside = measurements.logits_on_test(subject), inverted(subject)
    subject.model[1].bias.data.fill_(math.nan)  # type: ignore[index]
    with pytest.raises(ValueError, match="30 such rows of 30"):
        detection(subject, inside, outside)
