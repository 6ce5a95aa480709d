"""The optimizers, and the parts of their step.

amp.py               Δ ← Π(Δ + ζ ∇J(θ + Δ)): Adversarial Model Perturbation
rmp.py               Δ uniform in the ball: Random Model Perturbation
perturbed.py         the step that both share: with one closure, with several, or in `perturbed()` blocks
wrapper.py           an optimizer that wraps another and shares its groups, state, checkpoints and copies
weight_storage.py    where θ, θ + Δ and gradients are stored: in the parameters, or beside them
skip_step.py         a base step that does nothing if a gradient was not finite
grad_scaler.py       fp16: scaled gradients, and the state that a torch.amp.GradScaler keeps about them
accumulation.py      the mean gradient of micro-batches, each with its own Δ
radius/              ε during training: a late start, growth, every k-th step
param_groups.py      which parameters are perturbed
telemetry/           what steps measure: the last one, and many in a log
"""

from flatmin.optim.amp import AMP
from flatmin.optim.param_groups import groups
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.rmp import RMP
from flatmin.optim.telemetry.step_info import Last

__all__ = ["AMP", "RMP", "Last", "PerturbedOptimizer", "groups"]
