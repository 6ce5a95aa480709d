"""A pass that is run at θ, and again at θ + Δ, with the random numbers that it had.

Trainers run each micro-batch when it comes and step when the last one has come, so others have drawn in between. RMP's
own numbers are among those: put back, its Δ would be the same in every step.
"""

from collections.abc import Callable
from typing import Any

from flatmin.core.model_state import Snapshot
from flatmin.optim.perturbed import PerturbedOptimizer


class Again:
    """`run`, to be called again, with the random numbers of the moment when it was made, or of the last `begin()`.

    They are put back where the optimizer knows its model, as in a step of its own.
    """

    def __init__(self, run: Callable[[], Any], optimizer: PerturbedOptimizer) -> None:
        self._run = run
        self._devices = optimizer._devices()
        model = optimizer.model if optimizer._starts_clean else None
        self._random = None if model is None else Snapshot(model)
        self.begin()

    def begin(self) -> None:
        if self._random is not None:
            self._random.take_random(self._devices)

    def __call__(self) -> None:
        if self._random is not None:
            self._random.put_back_random()
        self._run()
