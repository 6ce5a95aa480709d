"""Data parallelism: each rank computes its shard of a batch, and together they take the step of one process.

Every rank has all data and the same plan of every epoch; it makes and runs its own shard of a batch. Then the ranks
exchange their logits z, a few numbers per image, and each computes the loss J of the whole batch. Its gradient flows
into a rank's own logits alone, R times, so that the mean that DistributedDataParallel takes is

    (1/R) Σᵣ R · (∂J/∂zᵣ)(∂zᵣ/∂θ) = ∇J,

the whole batch's, also where shards are unequal; and loss and error are the same numbers on all ranks.

    label smoothing, flooding    are functions of these logits: those of the whole batch, |J − b| too
    MixUp                        mixes the whole batch, with the same numbers on every rank, which then takes its shard
    adversarial                  moves each image on its own (in eval mode), so each rank does its shard
    BatchNorm                    has the statistics of the shard; the running ones that count are the first rank's
    dropout                      has its own masks on each rank, which follow from the seed
    AMP, RMP                     one Δ for all ranks; for AMP with sync_perturbation=False one per rank

Random states are the same on all ranks and advance alike, except where the model itself draws.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatmin.capture import StepSpec, rehearsal
from flatmin.core.random_state import random_state, set_random_state
from flatmin.doctor.finding import first_few
from flatmin_lab.data.dataset import Split
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.rng import generator_devices, seed_generators
from flatmin_lab.training.captured_forward import EVAL_BATCH_SIZE
from flatmin_lab.training.evaluation import logits_of
from flatmin_lab.training.ranks import RankGroup

Batch = tuple[Tensor, Any]  # inputs, and the targets of the loss


class BatchSharding:
    """One rank's shard of the batches."""

    def __init__(self, ranks: RankGroup, device: torch.device) -> None:
        self.ranks, self.devices = ranks, generator_devices(device)
        self.draws = False  # does the model draw random numbers?

    def rehearse(self, spec: StepSpec, index: Tensor, u: Tensor) -> None:
        """Run a shard through batch, model and loss, where an error blocks no other rank; then undo it."""
        part = self.ranks.shard(len(index))
        with rehearsal(spec), torch.enable_grad():
            made = spec.make_batch((index[part], u[part]))
            before = self._generator_states()
            with spec.precision():
                result = spec.loss_fn(spec.model, *made)
            spec.loss_of(result).backward()
            self.draws = any(not torch.equal(a, b) for a, b in zip(before, self._generator_states(), strict=True))
            self.x: Tensor = made[0].detach()
            _check_all_are_used(spec.model)

    def replicate(self, spec: StepSpec) -> DistributedDataParallel:
        """The rehearsed model in DistributedDataParallel, which keeps the ranks' copies equal.

        DistributedDataParallel sorts gradients into buckets after its first pass, and the order in which ranks are
        summed depends on the bucket. So two passes always come first, and a resumed run sums as an uninterrupted one.
        """
        self.draws = self.ranks.any(self.draws)
        replica = DistributedDataParallel(spec.model)
        with rehearsal(spec), torch.enable_grad():
            for _ in range(2):
                replica(self.x).sum().backward()
        del self.x
        return replica

    # ---- a step

    def batch_of(
        self, made: Callable[[Tensor, Tensor], Batch], labels: Tensor, *, is_mixup: bool, attacked: nn.Module | None
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Any, slice]]:
        """From a function that makes a batch, one that makes this rank's shard, with the targets of the whole batch.

        `is_mixup`: it mixes images, so it makes the whole batch on every rank. `attacked`: the model that it attacks,
        whose statistics must be the first rank's.
        """

        def batch(index: Tensor, u: Tensor) -> tuple[Tensor, Any, slice]:
            part = self.ranks.shard(len(index))
            if is_mixup:
                x, target = made(index, u)
                return x[part], target, part
            if attacked is not None:
                broadcast_buffers([attacked], self.ranks)
            with self.own_random_numbers():
                x, _ = made(index[part], u[part])
            return x, labels[index], part

        return batch

    def logits(self, model: nn.Module, x: Tensor, part: slice, count: int) -> Tensor:
        """The logits of the whole batch, in float32; the gradient goes into this rank's shard."""
        with self.own_random_numbers():
            own: Tensor = model(x).float()
        whole = own.new_zeros((count, *own.shape[1:]))
        whole[part] = own.detach()
        torch.distributed.all_reduce(whole)  # one rank's logits plus zeros: exact
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient * self.ranks.size)
        return torch.cat([whole[: part.start], own, whole[part.stop :]])

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Random numbers of this rank alone, derived from the state that all ranks share."""
        if not self.draws:
            yield
            return
        common = self._generator_states()
        text = hashlib.blake2b(self.ranks.rank.to_bytes(8, "little"), digest_size=8)
        for state in common:
            text.update(state.numpy().data)
        seed_generators(self.devices, int.from_bytes(text.digest(), "little", signed=True))
        try:
            yield
        finally:
            for device, state in zip(self.devices, common, strict=True):
                set_random_state(device, state)
                torch.rand((), device=device)  # all ranks advance by one draw

    def _generator_states(self) -> list[Tensor]:
        return [random_state(device) for device in self.devices]

    def mean(self, measured: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean over ranks of what each measured of its own perturbation."""
        numbers = torch.stack([value.float() for value in measured.values()])
        torch.distributed.all_reduce(numbers)
        return dict(zip(measured, (numbers / self.ranks.size).unbind(), strict=True))


def _check_all_are_used(model: nn.Module) -> None:
    """DistributedDataParallel waits for the gradient of every parameter that requires one."""
    unused = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    if unused:
        raise ValueError(
            f"with several processes, every parameter needs a gradient, but the loss has none for {first_few(unused)}; "
            "leave them out of the model, freeze them (requires_grad_(False)), or train in one process"
        )


def broadcast_buffers(modules: Iterable[nn.Module], ranks: RankGroup) -> None:
    """Copy the main rank's buffers to all ranks, before they are used."""
    if ranks.size > 1:
        for module in modules:
            for buffer in module.buffers():
                torch.distributed.broadcast(buffer, src=0)


def sharded_logits(
    model: Callable[[Tensor], Tensor],
    split: Split,
    normalise: Normalisation,
    *,
    ranks: RankGroup,
    batch_size: int = EVAL_BATCH_SIZE,
    stop: Callable[[], object] = lambda: None,
) -> Tensor | None:
    """As `logits_of`, each rank with some of the batches: the same batches as in one process, so the same numbers.

    None on all ranks where `stop()` became true on one.
    """
    if ranks.size == 1:
        return logits_of(model, split, normalise, batch_size=batch_size, stop=stop)
    batches = ranks.shard(-(-len(split) // batch_size))
    here = slice(batches.start * batch_size, batches.stop * batch_size)
    mine = Split(split.x[here], split.y[here])
    own = logits_of(model, mine, normalise, batch_size=batch_size, stop=stop) if len(mine) else torch.zeros(0)
    parts = ranks.all_gather(None if own is None else own.cpu())
    found = [part for part in parts if part is not None]
    return None if len(found) < len(parts) else torch.cat([part for part in found if len(part)]).to(split.x.device)
