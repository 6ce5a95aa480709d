"""What a trained model is worth: its logits for a whole split, in eval mode and float32, and measures of them.

Evaluation is at θ, never at θ + Δ, and does not depend on the precision that the model was trained in.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatmin import metrics
from flatmin.attacks import evaluating
from flatmin_lab.data.batches import in_order
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation

MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "error": metrics.error,
    "nll": metrics.nll,
    "ece": metrics.ece,
}


@torch.no_grad()
def logits_of(
    model: nn.Module,
    split: Split,
    normalise: Normalisation,
    *,
    batch_size: int = 500,
    stop: Callable[[], object] = lambda: None,
) -> Tensor | None:
    """The logits (N, K) of all pictures in their order; None where `stop()` became true meanwhile."""
    parts = []
    with evaluating(model):
        for x, _ in in_order(split, normalise, batch_size=batch_size):
            if stop():
                return None
            parts.append(model(x).float())
    return torch.cat(parts)


def measured(logits: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Error, NLL and ECE as numbers; None where one is not finite, which JSON cannot say."""
    found = {name: measure(logits, labels).item() for name, measure in MEASURES.items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
