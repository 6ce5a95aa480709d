"""What an optimizer's steps have measured since its ε was last adjusted: sums on the device, without a host sync."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from flatmin.optim.telemetry.step_info import Last


class StepRecord:
    """What the steps have measured since ε was last adjusted; it belongs to the optimizer, and is copied with it."""

    def __init__(self, first: Sequence[float], *, automatic: bool) -> None:
        self.first = list(first)  # the radii that it started with
        self.automatic = automatic  # is it that of epsilon="auto"?
        self.sums: Tensor | None = None  # of both losses, the steps at an edge, and all steps, on the device
        self.lacks_losses = False  # was there a step whose losses the optimizer has not seen?
        self.calls = 0  # how often it was asked to adjust ε
        self._zero_one: tuple[Tensor, Tensor] | None = None  # on the device: a plain number would be copied there

    @torch.no_grad()
    def add(self, last: Last) -> None:
        if last.on_ball is None or last.skipped is None:  # nothing was perturbed
            return
        home = last.on_ball.device
        if self.sums is None:
            self.sums = torch.zeros(4, dtype=sum_dtype(home), device=home)
        if self._zero_one is None or self._zero_one[0].device != home:
            self._zero_one = torch.zeros((), device=home), torch.ones((), device=home)
        zero, one = self._zero_one
        losses = [loss.reshape(()).to(home) for loss in (last.loss, last.loss_perturbed) if _is_number(loss)]
        if len(losses) < 2:
            self.lacks_losses, losses = True, [zero, zero]
        row = torch.stack([*losses, last.on_ball.ceil(), one])
        self.sums = self.sums.to(home) + torch.where(last.skipped, zero, row)

    def take(self) -> Tensor | None:
        """The sums, which start again."""
        sums, self.sums, self.lacks_losses = self.sums, None, False
        return sums


def sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _is_number(loss: Tensor | None) -> TypeGuard[Tensor]:
    return loss is not None and loss.numel() == 1
