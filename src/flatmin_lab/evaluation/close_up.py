"""A network close up: its predictions for wrong labels, the loss around its weights, its calibration.

For a run on nine tenths of the training set. The held-out tenth, with correct labels, fits the temperature T of

    p = softmax(z / T),

one number that changes how confident a network is, but none of its predictions. The test set only measures the effect.
"""

from dataclasses import replace
from typing import Any

import torch

from flatmin import metrics
from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.evaluation import landscapes
from flatmin_lab.evaluation.load_run import TrainedRun, subject_of
from flatmin_lab.evaluation.measurements import NO_TEMPERATURE
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.training.build import prepare_data
from flatmin_lab.training.evaluation import logits_of, score_logits

SHOWN_IMAGES = 12  # with a wrong label
LINE_POINTS, LINE_IMAGES = 41, 359  # images: as many as the digits' test set has


def close_up(run: TrainedRun, data: Dataset) -> dict[str, Any]:
    """All three, as JSON; the run has a validation split."""
    held_out = subject_of(run, data, use_ema=False, device=torch.device("cpu"))
    subject = replace(held_out, test=data.test, split_name="test")
    line = landscapes.landscape(subject, points=LINE_POINTS, images=LINE_IMAGES, lines_only=True)
    return {
        "train": len(subject.train),
        "held_out": len(held_out.test),
        "digits": _digits(run, data, subject),
        "calibration": calibration(subject, held_out.test),
        "landscape": line,
    }


def _digits(run: TrainedRun, data: Dataset, subject: Subject) -> list[dict[str, Any]]:
    """The first training digits with a wrong label, in the order in which the seed drew them, and the predictions."""
    ready = prepare_data(run.recipe, data, run.seed)
    index = ready.wrong[:SHOWN_IMAGES]
    if not len(index):
        return []
    shown = ready.data.train.at(index)
    true = data.held_out(run.seed).train.y[index]
    probabilities = _logits(subject, shown).softmax(dim=1)
    confidence, answers = probabilities.max(dim=1)
    return [
        {"pixels": x[0].tolist(), "given": int(given), "true": int(y), "answer": int(answer), "confidence": float(sure)}
        for x, given, y, answer, sure in zip(shown.x, shown.y, true, answers, confidence, strict=True)
    ]


def calibration(subject: Subject, held_out: Split) -> dict[str, Any]:
    """Scores on the test digits as they are, and divided by the temperature of the held-out ones."""
    test = _logits(subject, subject.test)
    found: dict[str, Any] = {"plain": score_logits(test, subject.test.y), "temperature": None, "scaled": None}
    try:
        temperature = metrics.temperature(_logits(subject, held_out), held_out.y)
    except ValueError:  # the network has diverged
        return found
    if temperature > NO_TEMPERATURE:
        found |= {"temperature": float(temperature), "scaled": score_logits(test / temperature, subject.test.y)}
    return found


def _logits(subject: Subject, split: Split) -> torch.Tensor:
    logits = logits_of(subject.model, split, subject.normalise)
    assert logits is not None
    return logits
