"""The optimizers, and the parts of their step.

amp.py               Δ ← Π(Δ + ζ ∇J(θ + Δ)): Adversarial Model Perturbation
rmp.py               Δ uniform in the ball: Random Model Perturbation
perturbed.py         the step that both share: with one closure, with several, or in `perturbed()` blocks
wrapper.py           an optimizer that wraps another and shares its groups, state, checkpoints and copies
call_checks.py       what a step may be called with, and what a pass must leave behind
model_ranks.py       the ranks that share the model, compared in the first step
pass_start.py        where the clean pass began, so that blocks draw the same dropout masks
weight_storage.py    where θ, θ + Δ and gradients are stored: in the parameters, or beside them
update/              the gradient that the base steps with, and whether it steps
radius/              ε during training: a late start, growth, every k-th step, or adjusted to held-out data
param_groups.py      which parameters are perturbed
telemetry/           what steps measure: the last one, and many in a log
"""

from flatmin.optim.amp import AMP
from flatmin.optim.param_groups import groups
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.rmp import RMP
from flatmin.optim.telemetry.step_info import Last

__all__ = ["AMP", "RMP", "Last", "PerturbedOptimizer", "groups"]
