"""A batch shared out among ranks: what each computes of a step, so that together it is the step of one process.

Every rank has all data, and the same plan of every epoch; it makes and runs its own part of a batch. Then the ranks
send one another their logits z, a few numbers a picture, and each computes the loss J of the whole batch. Its gradient
flows into a rank's own logits alone, R times, so that the mean that DistributedDataParallel takes is

    (1/R) Σᵣ R · (∂J/∂zᵣ)(∂zᵣ/∂θ) = ∇J,

the whole batch's, also where shares are unequal; and loss and error are the same numbers on all ranks.

    label smoothing, flooding    are functions of these logits: those of the whole batch, |J − b| too
    MixUp                        mixes the whole batch, with the same numbers on every rank, which then takes its part
    adversarial                  moves each picture on its own (in eval mode), so each rank does its share
    BatchNorm                    has the statistics of the share; the running ones that count are the first rank's
    dropout                      has masks of its own on each rank, which follow from the seed
    AMP, RMP                     one Δ for all ranks; for AMP with sync_perturbation=False one a rank

Random numbers are the same on all ranks, and move on alike, but where the model itself draws some.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatmin.capture import StepSpec, rehearsal
from flatmin.core.model_state import random_state, set_random_state
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.rng import drawn_from, seed_generators
from flatmin_lab.training.captured_forward import FULL
from flatmin_lab.training.evaluation import logits_of
from flatmin_lab.training.ranks import Team

Made = tuple[Tensor, Any]  # a batch: inputs, and what the loss compares with


class Shares:
    """One rank's view of the batches."""

    def __init__(self, team: Team, device: torch.device) -> None:
        self.team, self.devices = team, drawn_from(device)
        self.draws = False  # does the model draw random numbers?

    def rehearse(self, spec: StepSpec, index: Tensor, u: Tensor) -> None:
        """A share through batch, model and loss, while an error holds nobody up; nothing is left of it."""
        part = self.team.part(len(index))
        with rehearsal(spec), torch.enable_grad():
            made = spec.make_batch((index[part], u[part]))
            before = self._states()
            with spec.precision():
                result = spec.loss_fn(spec.model, *made)
            spec.loss_of(result).backward()
            self.draws = any(not torch.equal(a, b) for a, b in zip(before, self._states(), strict=True))
            self.x: Tensor = made[0].detach()

    def meet(self, spec: StepSpec) -> DistributedDataParallel:
        """The rehearsed model, as one of several that keep equal.

        DistributedDataParallel sorts gradients into buckets when it has seen a first pass, and in which order ranks
        are added up depends on the bucket: so two passes come first, always, and a training that is gone on with adds
        up as one that was never left.
        """
        self.draws = self.team.any(self.draws)
        replica = DistributedDataParallel(spec.model)
        with rehearsal(spec), torch.enable_grad():
            for _ in range(2):
                replica(self.x).sum().backward()
        del self.x
        return replica

    # ---- a step

    def batch_of(
        self, made: Callable[[Tensor, Tensor], Made], labels: Tensor, *, mixes: bool, asks: nn.Module | None
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Any, slice]]:
        """From a function that makes any batch, one that makes this rank's part, with the target of the whole.

        It may be one that `mixes` pictures, or one that `asks` a model, whose statistics must be the first rank's.
        """

        def batch(index: Tensor, u: Tensor) -> tuple[Tensor, Any, slice]:
            part = self.team.part(len(index))
            if mixes:
                x, target = made(index, u)
                return x[part], target, part
            if asks is not None:
                same_buffers([asks], self.team)
            with self.own_numbers():
                x, _ = made(index[part], u[part])
            return x, labels[index], part

        return batch

    def logits(self, model: nn.Module, x: Tensor, part: slice, count: int) -> Tensor:
        """Of the whole batch, in float32; the gradient goes into this rank's part."""
        with self.own_numbers():
            own: Tensor = model(x).float()
        whole = own.new_zeros((count, *own.shape[1:]))
        whole[part] = own.detach()
        torch.distributed.all_reduce(whole)  # a picture's logits and zeros: exact
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient * self.team.size)
        return torch.cat([whole[: part.start], own, whole[part.stop :]])

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """Random numbers that no other rank has, and that follow from those that all have."""
        if not self.draws:
            yield
            return
        common = self._states()
        text = hashlib.blake2b(self.team.rank.to_bytes(8, "little"), digest_size=8)
        for state in common:
            text.update(state.numpy().data)
        seed_generators(self.devices, int.from_bytes(text.digest(), "little", signed=True))
        try:
            yield
        finally:
            for device, state in zip(self.devices, common, strict=True):
                set_random_state(device, state)
                torch.rand((), device=device)  # all ranks move on by one

    def _states(self) -> list[Tensor]:
        return [random_state(device) for device in self.devices]

    def mean(self, measured: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Over the ranks, of what each measured of a perturbation of its own."""
        numbers = torch.stack([value.float() for value in measured.values()])
        torch.distributed.all_reduce(numbers)
        return dict(zip(measured, (numbers / self.team.size).unbind(), strict=True))


def same_buffers(modules: Iterable[nn.Module], team: Team) -> None:
    """The first rank's statistics on all ranks, before they are used."""
    if team.size > 1:
        for module in modules:
            for buffer in module.buffers():
                torch.distributed.broadcast(buffer, src=0)


def logits_shared(
    model: Callable[[Tensor], Tensor],
    split: Split,
    normalise: Normalisation,
    *,
    team: Team,
    batch_size: int = FULL,
    stop: Callable[[], object] = lambda: None,
) -> Tensor | None:
    """As `logits_of`, each rank with some of the batches; they are the batches of one process, and so are the numbers.

    None on all ranks where `stop()` became true on one.
    """
    if team.size == 1:
        return logits_of(model, split, normalise, batch_size=batch_size, stop=stop)
    batches = team.part(-(-len(split) // batch_size))
    here = slice(batches.start * batch_size, batches.stop * batch_size)
    mine = Split(split.x[here], split.y[here])
    own = logits_of(model, mine, normalise, batch_size=batch_size, stop=stop) if len(mine) else torch.zeros(0)
    parts = team.gathered(None if own is None else own.cpu())
    found = [part for part in parts if part is not None]
    return None if len(found) < len(parts) else torch.cat([part for part in found if len(part)]).to(split.x.device)
