"""A pass that runs at θ and is replayed at θ + Δ with the same random numbers.

Trainers run each micro-batch as it arrives and step after the last one, so by then other random numbers have been
drawn: by hooks, by the data of the next micro-batch. A replay rewinds torch's, Python's and numpy's generators to
where its pass began; after the last replay of a block they are where they were before the first, so that nothing is
drawn twice. For RMP nothing is restored: its Δ is drawn from the same generator, and would be the same in every step.
"""

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from torch import Tensor

from flatmin.core.random_state import RandomStates
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.telemetry.step_info import mean_of


class RandomState(AbstractContextManager["RandomState"]):
    """The random state of now, restored at the end of a `with` block; of no generator if the optimizer has no model."""

    def __init__(self, optimizer: PerturbedOptimizer) -> None:
        self._optimizer = optimizer
        self.take()

    def take(self) -> None:
        self._states = RandomStates(self._optimizer.devices()) if self._optimizer.shares_clean_state else None

    def put_back(self) -> None:
        if self._states is not None:
            self._states.put_back()

    def __exit__(self, *_: object) -> None:
        self.put_back()


def as_it_is(batch: Any) -> Any:
    """A batch for one pass: dicts and lists are copied, not their tensors, because many losses take the labels out.

    >>> batch = [{"x": 1, "labels": 2}, 3]
    >>> as_it_is(batch)[0].pop("labels"), batch
    (2, [{'x': 1, 'labels': 2}, 3])
    """
    if type(batch) in (list, tuple):
        return type(batch)(map(as_it_is, batch))
    if type(batch) is dict:
        return {key: as_it_is(value) for key, value in batch.items()}
    return copy(batch) if isinstance(batch, MutableMapping | list) else batch


class Replay:
    """`run`, to be called again with the random state of its construction, or of the last `record_random_state()`."""

    def __init__(self, run: Callable[[], Any], optimizer: PerturbedOptimizer) -> None:
        self._run = run
        self._random = RandomState(optimizer)
        self.clean_loss: Tensor | None = None  # at θ

    def record_random_state(self) -> None:
        self._random.take()

    def __call__(self) -> Any:
        self._random.put_back()
        return self._run()


def note_losses(
    optimizer: PerturbedOptimizer, passes: Sequence[Replay], perturbed: Sequence[Tensor | None], *, shares: bool = False
) -> None:
    """Tell the optimizer the losses of a step: those of its micro-batches at θ and in the last block, where both are.

    With `shares`, each micro-batch's loss is its share of the step's.
    """
    both = [(one.clean_loss, loss) for one, loss in zip(passes, perturbed, strict=True)]
    known = [(clean, loss) for clean, loss in both if clean is not None and loss is not None]
    if len(known) == 1:
        optimizer.note_losses(*known[0])
    elif known and len({loss.shape for pair in known for loss in pair}) == 1:
        home = optimizer.devices()[0]
        clean, last = (mean_of([pair[place] for pair in known], home) for place in (0, 1))
        optimizer.note_losses(*((len(known) * clean, len(known) * last) if shares else (clean, last)))
