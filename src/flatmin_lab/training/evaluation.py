"""Evaluation: the logits of a whole split, in eval mode and float32, and their error, NLL and ECE.

Evaluation is at θ, never at θ + Δ, and does not depend on the precision of training. A diverged model is evaluated too:
a row of logits without probabilities counts as wrong.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flatmin import metrics
from flatmin.core.model_state import eval_mode
from flatmin_lab.data.batches import in_order
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.json_data import number
from flatmin_lab.training.captured_forward import EVAL_BATCH_SIZE

MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "error": metrics.error,
    "nll": metrics.nll,
    "ece": metrics.ece,
}
BINS = 15


@torch.no_grad()
def logits_of(
    model: Callable[[Tensor], Tensor],
    split: Split,
    normalise: Normalisation,
    *,
    batch_size: int = EVAL_BATCH_SIZE,
    stop: Callable[[], object] = lambda: None,
) -> Tensor | None:
    """The logits (N, K) of all images in order; None if `stop()` became true meanwhile.

    The model is a module, or a function that sets eval mode itself (`CapturedForward`).
    """
    parts = []
    with eval_mode(model):
        for x, _ in in_order(split, normalise, batch_size=batch_size):
            if stop():
                return None
            parts.append(model(x).float())
    return torch.cat(parts)


def score_logits(logits: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Error, NLL and ECE as numbers; None where one is not finite, which JSON cannot hold.

    >>> score_logits(torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]), torch.tensor([0, 1]))
    {'error': 0.5, 'nll': None, 'ece': None}
    """
    answered = metrics.has_probabilities(logits)
    if not bool(answered.all()):
        wrong = (logits.argmax(dim=1) != labels) | ~answered
        return {**dict.fromkeys(MEASURES), "error": (wrong.sum().float() / len(labels)).item()}
    return {name: number(measure(logits, labels)) for name, measure in MEASURES.items()}


def image_scores(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Error (0 or 1) and NLL of each image; their means are those of `score_logits`.

    >>> image_scores(torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]), torch.tensor([0, 1]))["error"]
    tensor([0, 1], dtype=torch.uint8)
    """
    right = (logits.argmax(dim=1) == labels) & metrics.has_probabilities(logits)
    return {"error": (~right).to(torch.uint8), "nll": cross_entropy(logits, labels, reduction="none")}


def reliability_bins(logits: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """The bins of a reliability diagram as lists, over the rows that have probabilities.

    >>> reliability_bins(torch.tensor([[9.0, 0.0], [torch.nan, 0.0]]), torch.tensor([0, 1]))["number"][-1]
    1
    """
    answered = metrics.has_probabilities(logits)
    if bool(answered.any()):
        parts = metrics.reliability(logits[answered], labels[answered], bins=BINS)
    else:
        parts = metrics.Reliability(torch.zeros(BINS, dtype=torch.int64), torch.zeros(BINS), torch.zeros(BINS))
    return {name: values.tolist() for name, values in parts._asdict().items()}
