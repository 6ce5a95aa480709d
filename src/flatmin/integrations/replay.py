"""A pass that runs at θ and is replayed at θ + Δ with the same random numbers.

Trainers run each micro-batch as it arrives and step after the last one, so by then other random numbers have been
drawn. For RMP nothing is restored: its Δ is drawn from the same generator, and would be the same in every step.
"""

from collections.abc import Callable
from typing import Any

from flatmin.core.model_state import Snapshot
from flatmin.optim.perturbed import PerturbedOptimizer


class Replay:
    """`run`, to be called again with the random state of its construction, or of the last `record_random_state()`.

    The state is restored only if the optimizer has a model, as in its own steps.
    """

    def __init__(self, run: Callable[[], Any], optimizer: PerturbedOptimizer) -> None:
        self._run = run
        self._devices = optimizer.devices()
        model = optimizer.model if optimizer.starts_clean else None
        self._random = None if model is None else Snapshot(model)
        self.record_random_state()

    def record_random_state(self) -> None:
        if self._random is not None:
            self._random.take_random(self._devices)

    def __call__(self) -> None:
        if self._random is not None:
            self._random.put_back_random()
        self._run()
