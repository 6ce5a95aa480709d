"""The exponential moving average of weights and buffers: ē ← d·ē + (1 − d)·θ after every step, from the first θ on.

torch's `AveragedModel` with two changes. That class copies its step count to the device in every step, which makes the
host wait; and it makes nan of buffers that are not finite, such as a mask with −∞: here these stay as they are.
"""

from collections import defaultdict
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatmin_lab.models.weights import constant_buffers


class EMA(AveragedModel):
    """`module` is the averaged model; `update_parameters(model)` adds the model's current weights.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> ema = EMA(model, decay=0.75)
    >>> for value in (1.0, 5.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     ema.update_parameters(model)
    >>> ema.module.weight.item()
    2.0
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self.decayed = get_ema_multi_avg_fn(decay)
        self.constants = constant_buffers(self.module)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        own = chain(self.module.named_parameters(), self.module.named_buffers())
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for (name, mine), theirs in zip(own, chain(model.parameters(), model.buffers()), strict=True):
            if name in self.constants:
                continue
            averages, values = kinds[mine.dtype]
            averages.append(mine)
            values.append(theirs)
        for averages, values in kinds.values():
            if self.n_averaged == 0:  # the counter is on the CPU
                torch._foreach_copy_(averages, values)
            else:
                self.decayed(averages, values, self.n_averaged)
        self.n_averaged += 1
