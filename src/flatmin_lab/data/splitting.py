"""Dividing pictures that come without a test set."""

import torch
from torch import Tensor


def stratified(labels: Tensor, *, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of two parts in their old order; the second has that share of every class, rounded."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[: round(share * len(members))]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
