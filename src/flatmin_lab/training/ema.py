"""The running average of a model's weights and buffers: ē ← d·ē + (1 − d)·θ after every step, starting at the first θ.

Torch's `AveragedModel`, but for one thing: that one copies its count of steps to the device in every step, and so makes
the host wait for it.
"""

from collections import defaultdict
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMA(AveragedModel):
    """`module` is the average; `update_parameters(model)` takes the model's present weights in.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = EMA(model, decay=0.75)
    >>> for value in (1.0, 5.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     average.update_parameters(model)
    >>> average.module.weight.item()
    2.0
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self.decayed = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        own = chain(self.module.parameters(), self.module.buffers())
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for mine, theirs in zip(own, chain(model.parameters(), model.buffers()), strict=True):
            averages, values = kinds[mine.dtype]
            averages.append(mine)
            values.append(theirs)
        for averages, values in kinds.values():
            if self.n_averaged == 0:  # it lies on the CPU
                torch._foreach_copy_(averages, values)
            else:
                self.decayed(averages, values, self.n_averaged)
        self.n_averaged += 1
