"""flatmin trains neural networks into flat minima: Adversarial Model Perturbation for PyTorch.

optimizer = flatmin.AMP(optimizer, epsilon=0.1, model=model)
loss = optimizer.step(closure)
"""

from flatmin import attacks, ball, doctor, flatness, metrics, regularisers, theory
from flatmin.capture.captured_step import captured_step
from flatmin.optim import AMP, RMP, Last, groups

__version__ = "0.1.0"

__all__ = [
    "AMP",
    "RMP",
    "Last",
    "attacks",
    "ball",
    "captured_step",
    "doctor",
    "flatness",
    "groups",
    "metrics",
    "regularisers",
    "theory",
]
