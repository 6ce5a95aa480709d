"""RMP: the gradient at a random point of the ball.

    Δ uniform in {‖Δ‖ ≤ ε},   θ ← base step at θ with ∇J(θ + Δ)

The paper's baseline for AMP: how much of the gain comes from perturbing at all, and how much from being
adversarial?

The published code instead draws each entry of Δ uniformly from [−√(ε/d), √(ε/d)], where d is the number of entries in
the tensor. Then ‖Δ‖ ≈ √(ε/3) per tensor: 0.18 for ε = 0.1. That is `noise="cube"` with `ball="tensor"`.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from flatmin.ball import Ball, Norm, combine, cube_factors, fill_with_noise, norms, uniform_factors
from flatmin.core.tensors import compute_dtype, plain
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.telemetry.step_info import Measured
from flatmin.optim.weight_storage import WeightStorage
from flatmin.optim.wrapper import check_call

Noise = Literal["ball", "cube"]
NOISES: tuple[Noise, ...] = get_args(Noise)


class RMP(PerturbedOptimizer):
    """Random Model Perturbation: the gradient is taken at a point drawn uniformly in the ball of radius ε around θ.

    The paper's baseline (there with ε = 0.1): what remains of AMP when Δ is not adversarial. One closure call per
    step. In high dimensions nearly all of a ball is near its edge: ‖Δ‖ = ε·u^(1/d) with u uniform in [0, 1].

    With `noise="cube"` each entry is instead uniform in [−√(ε/d), √(ε/d)], where d is the dimension of its ball, as in
    the paper's published code. Then ‖Δ‖ ≈ √(ε/3), which exceeds ε for ε below 1/3.

    >>> weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = RMP(torch.optim.SGD([weight], lr=0.1), epsilon=0.5)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = weight.square().sum() / 2
    ...     loss.backward()
    ...     return loss
    >>> loss = optimizer.step(closure)
    >>> bool(optimizer.last.delta_norm <= 0.5)
    True
    """

    starts_clean = False
    _hyperparameters = ("epsilon",)
    _settings = (*PerturbedOptimizer._settings, "noise", "generator")
    _shown = ("ball", "norm", "noise")

    @check_call
    def __init__(
        self,
        base: Optimizer,
        *,
        epsilon: float,
        ball: Ball = "global",
        norm: Norm = "l2",
        noise: Noise = "ball",
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if noise not in NOISES:
            raise ValueError(f"unknown noise {noise!r}; choose from {', '.join(NOISES)}")
        if noise == "cube" and norm != "l2":
            raise ValueError(
                f"noise='cube' needs norm='l2', got {norm!r}, whose ball is already a cube; leave out noise"
            )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
        self.noise, self.generator = noise, generator
        super().__init__(base, {"epsilon": epsilon}, inner_iter=1, ball=ball, norm=norm, model=model)

    @torch.no_grad()
    def perturb(self, n: int, unscale: float | Tensor, storage: WeightStorage, measured: Measured) -> None:
        """Draw Δ uniformly from its ball or cube, in the weights' own memory, and move them to θ + Δ."""
        groups = [group for group in self.perturbed_groups() if any(p.requires_grad for p in group["params"])]
        if not groups:
            return
        params = [[p for p in group["params"] if p.requires_grad] for group in groups]
        everything = [p for here in params for p in here]
        if any(map(is_lazy, everything)):
            raise RuntimeError(
                "RMP moves the weights before the first pass, but some have no shape yet (lazy modules); run the model "
                "once before training"
            )
        storage.keep_theta(everything)
        moved = [storage.perturbed(p) for p in everything]
        drawn: Norm = "linf" if self.noise == "cube" else self.norm
        fill_with_noise(moved, like=everything, norm=drawn, generator=self.generator)
        lengths = [norms([storage.perturbed(p) for p in here], norm=self.norm).to(self._home) for here in params]
        epsilons = [group["epsilon"] for group in groups]
        measured.epsilon = self.perturbed_groups()[0]["epsilon"]
        if self.noise == "cube":
            factors = cube_factors(lengths, params, epsilons, ball=self.ball)
        else:
            factors = uniform_factors(
                lengths, params, epsilons, ball=self.ball, norm=self.norm, generator=self.generator
            )
        for here, scale in zip(params, factors, strict=True):
            for p, factor in zip(here, scale.unbind(), strict=True):
                noise = plain(storage.perturbed(p))
                torch.add(plain(storage.theta_of(p)), noise.to(compute_dtype(noise)) * factor.to(p.device), out=noise)
        inside = torch.cat([length * scale for length, scale in zip(lengths, factors, strict=True)])
        measured.numbers["delta_norm"] = combine(inside, norm=self.norm)
        measured.numbers["on_ball"] = torch.zeros((), device=self._home)
