"""What a model's confidence is worth: the risk of its confident answers, and whether it notices data from outside.

`risk_over_coverage` is of the model's own test set: how often it is wrong if it abstains from what it is less sure of.
`detection` compares the scores of the same test set with those of data from outside the training distribution.

Both read the logits in float64: in float32 the largest probabilities of a trained network are often exactly 1 and tie.
"""

from typing import Any

import torch
from torch import Tensor

from flatmin import metrics
from flatmin.core.tensors import widest_dtype
from flatmin_lab.data.outside import OutsideData
from flatmin_lab.evaluation.resampling import aurc_interval, detection_interval
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.system.json_data import number, numbers
from flatmin_lab.training.evaluation import logits_of

CONFIDENCE_LEVEL, BOOTSTRAP_SAMPLES = 0.95, 1000  # of the intervals
CURVE_POINTS = 100  # of a risk-coverage curve or a ROC curve in a file
TPR = 0.95


def risk_over_coverage(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """AURC with its interval, its excess over the best order, and the curve; the confidence is the largest probability.

    The curve has the risk at every hundredth of the predictions, or at every one of fewer than a hundred.
    """
    exact = logits.to(widest_dtype(logits))
    confidence, wrong = metrics.max_probability(exact), exact.argmax(dim=1) != labels
    interval = aurc_interval(confidence, wrong, samples=BOOTSTRAP_SAMPLES, level=CONFIDENCE_LEVEL)
    curve, count = metrics.risk_coverage(confidence, wrong), len(labels)
    points = min(CURVE_POINTS, count)
    shown = (torch.arange(1, points + 1, device=labels.device) * count + points - 1) // points - 1
    return {
        "aurc": number(interval.value),
        "aurc_interval": [number(interval.low), number(interval.high)],
        "e_aurc": number(metrics.e_aurc(confidence, wrong)),
        "coverage": numbers(curve.coverage[shown]),
        "risk": numbers(curve.risk[shown]),
    }


def detection(subject: Subject, inside: Tensor, outside: OutsideData) -> dict[str, Any]:
    """AUROC and the FPR at 95 % TPR with intervals, and the ROC curve, by score; `inside` are the test set's logits."""
    logits = logits_of(subject.model, outside.split, subject.normalise)
    assert logits is not None
    near, far = _scores(inside), _scores(logits)
    found = detection_interval(near, far, tpr=TPR, samples=BOOTSTRAP_SAMPLES, level=CONFIDENCE_LEVEL)
    values: dict[str, dict[str, Any]] = {name: {} for name in metrics.CONFIDENCE_SCORES}
    for row, kind in enumerate(("auroc", "fpr95")):
        for column, name in enumerate(values):
            value, low, high = (number(end[row, column]) for end in found)
            values[name] |= {kind: value, f"{kind}_interval": [low, high]}
    for column, name in enumerate(values):
        values[name]["roc"] = numbers(roc_curve(near[:, column], far[:, column]))
    return {"pictures": len(logits), "sha256": outside.checksum, "converted_from": outside.converted_from, **values}


def roc_curve(inside: Tensor, outside: Tensor, *, points: int = CURVE_POINTS) -> Tensor:
    """The TPR at each hundredth of the FPR from 0 to 1, the highest where several thresholds have that FPR.

    Between the FPRs of two thresholds the curve is straight, as scores that tie count one half: the area is the AUROC.

    >>> roc_curve(torch.tensor([0.9, 0.6]), torch.tensor([0.6, 0.5]), points=4).tolist()
    [0.5, 0.75, 1.0, 1.0, 1.0]
    """
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    near, far = (_accepted(scores, thresholds) for scores in (inside, outside))
    wanted = torch.arange(points + 1, device=far.device) * len(outside)  # whole numbers, over points · M
    place = torch.searchsorted(points * far, wanted, right=True) - 1
    after = (place + 1).clamp(max=len(far) - 1)
    share = (wanted - points * far[place]) / (points * (far[after] - far[place])).clamp(min=1)
    return (near[place] + share * (near[after] - near[place])) / len(inside)


def _accepted(scores: Tensor, thresholds: Tensor) -> Tensor:
    """How many are accepted by no threshold, and by each one, the highest first."""
    above = len(scores) - torch.searchsorted(scores.sort().values, thresholds)
    return torch.cat([above.new_zeros(1), above])


def _scores(logits: Tensor) -> Tensor:
    """(N, 3), a column a score."""
    exact = logits.to(widest_dtype(logits))
    return torch.stack([score(exact) for score in metrics.CONFIDENCE_SCORES.values()], dim=1)
