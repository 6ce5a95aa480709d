"""flatmin trains neural networks against the worst weights nearby: Adversarial Model Perturbation for PyTorch.

optimizer = flatmin.AMP(optimizer, epsilon=0.1, model=model)
loss = optimizer.step(closure)

The optimizers are imported immediately, everything else on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatmin import ball
from flatmin.optim import AMP, RMP, Last, groups
from flatmin.optim.radius import MatchedRadius, RadiusScheduler

if TYPE_CHECKING:
    from flatmin import attacks, doctor, flatness, metrics, regularisers, theory
    from flatmin.capture.captured_step import captured_step
    from flatmin.comparison.run_comparison import compare
    from flatmin.optim.telemetry.step_log import StepLog

__version__ = "0.1.0"

__all__ = [
    "AMP",
    "RMP",
    "Last",
    "MatchedRadius",
    "RadiusScheduler",
    "StepLog",
    "attacks",
    "ball",
    "captured_step",
    "compare",
    "doctor",
    "flatness",
    "groups",
    "metrics",
    "regularisers",
    "theory",
]

_MODULES = ("attacks", "capture", "doctor", "flatness", "metrics", "regularisers", "theory")
_OBJECTS = {
    "captured_step": "flatmin.capture.captured_step",
    "compare": "flatmin.comparison.run_comparison",
    "StepLog": "flatmin.optim.telemetry.step_log",
}


def __getattr__(name: str) -> Any:
    if name in _OBJECTS:
        found = getattr(import_module(_OBJECTS[name]), name)
    elif name in _MODULES:
        found = import_module(f"flatmin.{name}")
    else:
        raise AttributeError(f"module 'flatmin' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
