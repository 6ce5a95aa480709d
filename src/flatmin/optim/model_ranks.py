"""The ranks that share an optimizer's model: found and compared in its first step.

A setting that differs between ranks, a parameter with a gradient on only some of them, replicas whose gradients were
not synchronised: each becomes an error on every rank, where it would have been a deadlock, or weights that drift apart.
Within join(), where ranks may be absent, nothing is compared until the first step after it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin.ball import Norm, combine, norms
from flatmin.core import distributed


class ModelRanks:
    """The ranks of a model; a step reads the three attributes, and calls a method only where there is something to do.

    are_unchecked   have the settings not been compared yet?
    are_new         nor the gradients of a first step?
    groups          the process groups of the ranks that share the model: none with one rank, or before the first step
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._replicas = distributed.replicas_in(model)
        self.are_unchecked = self.are_new = True
        self.groups: Sequence[Any] = ()

    def find_groups(self, params: Sequence[Tensor]) -> Sequence[Any]:
        """The process groups, also before the first step."""
        return self.groups or distributed.process_groups_of(self._replicas, params)

    def without_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes leave each rank its own gradient."""
        return distributed.without_sync(self._replicas)

    def check_join(self, base: Optimizer, *, sync_perturbation: bool) -> None:
        """The messages of a step must be those that join() answers."""
        distributed.check_join(self._replicas, base, sync_perturbation=sync_perturbation)

    def compare_settings(
        self,
        params: Sequence[Tensor],
        settings: Callable[[], Mapping[str, object]],
        *,
        device: torch.device,
        sync_perturbation: bool,
    ) -> None:
        """Find the ranks. Their settings must be the same, and a perturbation per rank needs replicas."""
        distributed.check_layout(self._replicas, params, sync_perturbation=sync_perturbation)
        groups = distributed.process_groups_of(self._replicas, params)
        within_join = bool(groups) and distributed.is_joining(self._replicas)
        if groups and not within_join:  # only then: reading ε may wait for the device
            distributed.check_same(settings(), groups, device=device, way_out="give every rank the same settings")
        self.groups, self.are_unchecked = groups, within_join  # after an error they are compared again

    def compare_gradients(self, params: Sequence[Tensor], *, norm: Norm, device: torch.device, ascends: bool) -> None:
        """A parameter with a gradient on only some ranks would make the others wait forever."""
        if not self.groups or self.are_unchecked:
            return
        distributed.check_missing_gradients(params, self._model, self.groups, device=device)
        if self._replicas:
            gradients = [p.grad for p in params if p.grad is not None]
            length = float(combine(norms(gradients, norm=norm), norm=norm))
            distributed.check_gradient_norms(length, self.groups, device=device, ascends=ascends)

    def have_stepped(self) -> None:
        self.are_new = self.are_unchecked
