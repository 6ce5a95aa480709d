"""What an optimizer's steps have measured since its ε was last adjusted: sums on the device, without a host sync."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from flatmin.optim.telemetry.step_info import Last

SUMS = 5  # see StepRecord.sums


class StepRecord:
    """What the steps have measured since ε was last adjusted; it belongs to the optimizer, and is copied with it."""

    def __init__(self, first: Sequence[float], *, automatic: bool) -> None:
        self.first = list(first)  # the radii that it started with
        self.automatic = automatic  # is it that of epsilon="auto"?
        # on the device, of both losses, the steps at an edge, those that were not skipped, and all perturbed ones
        self.sums: Tensor | None = None
        self.lacks_losses = False  # was there a step whose losses the optimizer has not seen?
        self.is_loaded = False  # are the sums those of a checkpoint, without a step since?
        self.calls = 0  # how often it was asked to adjust ε
        self.shares_weights: bool | None = None  # with all ranks, where the optimizer does not know; None: not compared
        self._constants: tuple[Tensor, Tensor, Tensor] | None = None  # a plain number would be copied to the device

    def add(self, last: Last) -> None:
        if last.on_ball is None or last.skipped is None:  # nothing was perturbed
            return
        self.is_loaded = False
        home = last.on_ball.device
        if self.sums is None:
            self.sums = torch.zeros(SUMS, dtype=sum_dtype(home), device=home)
        if self._constants is None or self._constants[0].device != home:
            only_taken = (torch.arange(SUMS, device=home) == SUMS - 1).float()
            self._constants = torch.zeros((), device=home), torch.ones((), device=home), only_taken
        zero, one, only_taken = self._constants
        losses = [loss.reshape(()).to(home) for loss in (last.loss, last.loss_perturbed) if _is_number(loss)]
        if len(losses) < 2:
            self.lacks_losses, losses = True, [zero, zero]
        row = torch.stack([*losses, last.on_ball.ceil(), one, one])
        self.sums = self.sums.to(home) + torch.where(last.skipped, only_taken, row)

    def take(self) -> Tensor | None:
        """The sums, which start again."""
        sums, self.sums, self.lacks_losses = self.sums, None, False
        return sums

    def optimizer_was_loaded(self) -> None:
        """Forget the steps before that, but not what was loaded along with the optimizer: in any order."""
        if not self.is_loaded:
            self.take()
        self.is_loaded = False


def sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _is_number(loss: Tensor | None) -> TypeGuard[Tensor]:
    return loss is not None and loss.numel() == 1
