"""AMP: an optimizer that wraps an optimizer.

Adversarial Model Perturbation (Zheng, Zhang, Mao; CVPR 2021) minimises the worst loss near the weights,

    L_AMP(θ) = max over ‖Δ‖ ≤ ε of L(θ + Δ),

one batch at a time. Its Algorithm 1, with J the loss of the batch:

    Δ ← 0
    N times:  Δ ← Π(Δ + ζ ∇J(θ + Δ))          ascent, then projection onto the ball of radius ε
    θ ← base step at θ with ∇J(θ + Δ)

ε is `epsilon`, ζ is `inner_lr`, N is `inner_iter`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin.ball import Ball, Norm, clamp_, combine, radii, shrink
from flatmin.core.recorded_launches import Results
from flatmin.core.recurring_work import Operands
from flatmin.core.tensors import ORDINARY_TYPES, STRIDED, compute_dtype, has_layout_of, plain, zero_unless_
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.radius.matched import (
    AUTO,
    FIRST_RADIUS,
    MatchedRadius,
    record_steps,
    set_radius_of_new,
    start_recording,
)
from flatmin.optim.radius.schedule import radii_of
from flatmin.optim.telemetry.step_info import Measured
from flatmin.optim.weight_storage import WeightStorage
from flatmin.optim.wrapper import Group, check_call, whole_number


class AMP(PerturbedOptimizer):
    """Adversarial Model Perturbation around any torch optimizer.

        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = AMP(base, epsilon=0.1, model=model)
        loss = optimizer.step(closure)

    epsilon     ε, the radius of the ball; 0.1 is a good start. "auto" starts there, and `optimizer.radius.step(loss)`
                adjusts it to a loss on held-out data: call it after every epoch
    inner_lr    ζ, the learning rate of the ascent
    inner_iter  N, the number of ascent steps; each costs one pass, and 0 perturbs nothing
    ball        what ε bounds: all parameters together ("global"), each "group", or each "tensor"
    norm        "l2", or "linf": the largest absolute entry of Δ
    model       if given, BatchNorm statistics and dropout masks come from the clean pass of each step
    sync_perturbation   on several ranks: one Δ for all, or (False) one per rank, computed from its part of the batch;
                        the latter needs `model`, the DistributedDataParallel module

    ε and ζ are in `param_groups`: a group may have its own values, and schedulers can change them; a group with
    `epsilon=0` is not perturbed. `last` holds what the last step measured. Extra memory: one copy of the parameters
    for N = 1, two for N > 1 (Δ in at least float32).

    >>> weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = AMP(torch.optim.SGD([weight], lr=0.1), epsilon=0.5)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = weight.square().sum() / 2
    ...     loss.backward()
    ...     return loss
    >>> optimizer.step(closure)                # J = ‖θ‖²/2, so ∇J = θ and Δ = ε θ/‖θ‖
    tensor(12.5000, grad_fn=<DivBackward0>)
    >>> weight.data                            # θ − 0.1·(θ + Δ)
    tensor([2.6700, 3.5600])
    >>> optimizer.last.delta_norm, optimizer.last.on_ball
    (tensor(0.5000), tensor(1.))
    """

    starts_clean = True
    _hyperparameters = ("epsilon", "inner_lr")
    _settings = (*PerturbedOptimizer._settings, "sync_perturbation")

    @check_call
    def __init__(
        self,
        base: Optimizer,
        *,
        epsilon: float | Literal["auto"],
        inner_lr: float = 1.0,
        inner_iter: int = 1,
        ball: Ball = "global",
        norm: Norm = "l2",
        model: nn.Module | None = None,
        sync_perturbation: bool = True,
    ) -> None:
        is_auto = isinstance(epsilon, str) and epsilon == AUTO
        first: Any = FIRST_RADIUS if is_auto else epsilon
        super().__init__(
            base,
            {"epsilon": first, "inner_lr": inner_lr},
            inner_iter=whole_number("inner_iter", inner_iter),
            ball=ball,
            norm=norm,
            model=model,
            sync_perturbation=sync_perturbation,
        )
        if is_auto:
            start_recording(self, radii_of(self), automatic=True)

    def _initialise(self, attributes: Mapping[str, Any]) -> None:
        super()._initialise(attributes)
        if self.matching is not None:  # of a copy
            record_steps(self)

    def add_param_group(self, param_group: Group) -> None:
        has_radius = "epsilon" in param_group
        super().add_param_group(param_group)
        optimizer = self.behind_proxy()
        if optimizer.matching is not None and not has_radius:
            set_radius_of_new(optimizer, optimizer.param_groups[-1])

    @property
    def has_automatic_radius(self) -> bool:
        """Was it made with epsilon="auto"?"""
        record = self.behind_proxy().matching
        return record is not None and record.automatic

    @property
    def radius(self) -> MatchedRadius:
        """What adjusts an automatic ε: call `optimizer.radius.step(held_out_loss)` once per epoch or more often."""
        if self.behind_proxy().matching is None:
            raise AttributeError("see __getattr__")
        return MatchedRadius(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "radius" and self.behind_proxy().matching is not None:
                return MatchedRadius(self)  # it has raised an AttributeError of its own: once more, to show it
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                if name != "radius":
                    raise
                raise AttributeError(
                    'only an epsilon="auto" has a radius that is adjusted, got a number; write AMP(base, '
                    'epsilon="auto"), or make a flatmin.MatchedRadius(optimizer), which starts with that number'
                ) from error

    @torch.no_grad()
    def perturb(self, n: int, unscale: float | Tensor, storage: WeightStorage, measured: Measured) -> None:
        """Δ ← Π(Δ + ζ∇J); moves the weights to θ + Δ."""
        if n == 0:
            self._delta.forget()  # the previous step's, or micro-batch's
        steps: list[_Ascent] = []
        params: list[Tensor] = []
        settings: list[float | Tensor] = []
        groups = self.perturbed_groups()
        for group in groups:
            step = self._ascent(group, n, unscale, storage)
            if step.params:
                steps.append(step)
                params += step.params
                settings += (step.rate, step.epsilon)
        if not steps:
            return
        measured.epsilon = groups[0]["epsilon"]
        storage.keep_theta(params)
        is_last = n + 1 == self.inner_iter
        if n == 0 and is_last and self.norm == "l2":  # Δ = rate · factor · ∇J, which is not needed later
            by_kernel = [storage.has_kernel(step.params, step.directions, ball=self.ball) for step in steps]
        else:
            by_kernel = [False] * len(steps)
        ascend = partial(self._ascend, steps, by_kernel, storage, is_last)
        if all(by_kernel) and self.ball != "tensor" and params[0].device == self._home:
            weights, directions = [step.params for step in steps], [step.directions for step in steps]
            operands = Operands(("ascent", self.ball), directions, params=weights, numbers=settings)
            kept, (finite,) = storage.run(ascend, operands)
        else:
            kept, (finite,) = ascend(settings)
        length, delta_norm, on_ball = kept
        if n == 0:
            measured.numbers["grad_norm"] = _times(length, unscale)
        measured.numbers |= {"delta_norm": delta_norm, "on_ball": on_ball}
        measured.finite = finite if measured.finite is None else finite & measured.finite

    def _ascend(
        self,
        steps: Sequence["_Ascent"],
        by_kernel: Sequence[bool],
        storage: WeightStorage,
        is_last: bool,
        settings: Sequence[float | Tensor],
    ) -> Results:
        """The arithmetic of `perturb`, from norms to θ + Δ; `settings` are the rate and ε of each group."""
        home, rates, epsilons = self._home, settings[::2], settings[1::2]
        lengths = [storage.norms_of(step.directions, norm=self.norm).to(home) for step in steps]
        found = storage.compiled(projection)(lengths, rates, epsilons, ball=self.ball, norm=self.norm)
        for step, rate, factor, has_kernel in zip(steps, rates, found.factors, by_kernel, strict=True):
            if has_kernel:
                storage.move(step.params, step.directions, rate * factor, found.finite, ball=self.ball)
            else:
                zero_unless_(step.directions, found.finite)
                self._place(step, factor, storage, is_last=is_last)
        return (found.length, found.delta_norm, found.on_ball), (found.finite,)

    def _ascent(self, group: Group, n: int, unscale: float | Tensor, storage: WeightStorage) -> "_Ascent":
        """Δ + ζ∇J of a group, as rate · directions: at first Δ = 0 and the direction is the gradient itself."""
        rate = _times(group["inner_lr"], unscale)
        params, directions = storage.gradients_of(group["params"])
        if not _are_laid_out_like(directions, params):
            directions = [_in_layout_of(gradient, p) for gradient, p in zip(directions, params, strict=True)]
        if group.get("maximize", self.maximises):  # the base ascends, so the worst case descends
            directions = [-gradient for gradient in directions]
        if n == 0:
            return _Ascent(params, directions, rate, group["epsilon"])
        found = dict(zip(params, directions, strict=True))
        params = [p for p in group["params"] if p in found or p in self._delta]
        for p in params:
            if p not in self._delta:
                plain(self._delta.allocate(p, p, dtype=compute_dtype(p))).zero_()
            if p in found:
                delta = plain(self._delta[p])
                delta.add_(plain(found[p]).to(delta.dtype) * _on(delta.device, rate))
        return _Ascent(params, [self._delta[p] for p in params], 1.0, group["epsilon"])

    def _place(self, step: "_Ascent", factors: Tensor, storage: WeightStorage, *, is_last: bool) -> None:
        """Move a group's weights to θ + Δ, for any dtype, norm and ball; keep Δ if another ascent step follows."""
        multipliers = step.rate * (factors if self.norm == "l2" else torch.ones_like(factors))
        for p, direction, multiplier in zip(step.params, step.directions, multipliers.unbind(), strict=True):
            along = plain(direction)
            kept = None if is_last else plain(self._delta.allocate(p, p, dtype=compute_dtype(p)))
            # in at least float32: bfloat16 would round the multiplier to three digits
            delta = torch.mul(along.to(compute_dtype(along)), multiplier.to(along.device), out=kept)
            if self.norm == "linf":
                clamp_(delta, step.epsilon)
            torch.add(plain(storage.theta_of(p)), delta, out=plain(storage.perturbed(p)))


class Projection(NamedTuple):
    """The projection of Δ + ζ∇J onto the ball: the factors of each group, one per tensor, and what was measured."""

    factors: list[Tensor]
    length: Tensor  # the norm of all directions together, without the rates
    delta_norm: Tensor
    on_ball: Tensor
    finite: Tensor


def projection(
    lengths: Sequence[Tensor],
    rates: Sequence[float | Tensor],
    epsilons: Sequence[float | Tensor],
    *,
    ball: Ball,
    norm: Norm,
) -> Projection:
    """The factors that project rate · direction onto its ball (for "linf": the largest entry of each tensor).

    `lengths` has one vector per group: the norms of its directions.
    """
    length = combine(torch.cat(list(lengths)), norm=norm)
    lengths = [length * rate for length, rate in zip(lengths, rates, strict=True)]
    finite = combine(torch.cat(lengths), norm=norm).isfinite()
    each: Ball = "tensor" if norm == "linf" else ball  # max |Δᵢ| ≤ ε means the same for all tensors as for each
    out = radii(lengths, ball=each, norm=norm)
    factors = [
        shrink(radius, epsilon).expand(len(length))
        for radius, epsilon, length in zip(out, epsilons, lengths, strict=True)
    ]
    inside = [length * factor for length, factor in zip(lengths, factors, strict=True)]
    delta_norm = combine(torch.cat(inside), norm=norm).nan_to_num(0, 0, 0)  # Δ = 0 where it is not finite
    touched = [(radius > epsilon).view(-1) for radius, epsilon in zip(out, epsilons, strict=True)]
    return Projection(factors, length, delta_norm, torch.cat(touched).to(lengths[0].dtype).mean(), finite)


@dataclass(frozen=True)
class _Ascent:
    """One group's part of Δ + ζ∇J: rate · directions, one direction per parameter."""

    params: list[Tensor]
    directions: list[Tensor]
    rate: float | Tensor
    epsilon: float | Tensor


def _are_laid_out_like(gradients: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Are these ordinary tensors with the parameters' strides, as nearly all gradients are?"""
    return (
        ORDINARY_TYPES.issuperset(map(type, params))
        and {Tensor}.issuperset(map(type, gradients))
        and STRIDED.issuperset(map(attrgetter("layout"), gradients))
        and list(map(Tensor.stride, gradients)) == list(map(Tensor.stride, params))
    )


def _in_layout_of(gradient: Tensor, param: Tensor) -> Tensor:
    """The gradient, sharded across ranks like its parameter, and with its strides if the layout is the same.

    In a dimension of size 1 any stride will do (a 1×1 convolution in channels-last), but not for torch's fused kernels.
    """
    if gradient.is_sparse:
        raise ValueError(
            f"a perturbation needs dense gradients, got a sparse one for a parameter of shape {tuple(param.shape)}; "
            "use sparse=False in the embedding, or put the parameter in a group with epsilon=0"
        )
    placements = getattr(param, "placements", None)
    if placements is not None and gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    if type(gradient) in ORDINARY_TYPES and gradient.stride() != param.stride() and has_layout_of(gradient, param):
        gradient = gradient.as_strided(param.shape, param.stride())
    return gradient


def _times(number: Any, unscale: float | Tensor) -> Any:
    """Saves a launch if there is nothing to unscale."""
    return number * unscale if isinstance(unscale, Tensor) else number


def _on(device: torch.device, number: float | Tensor) -> float | Tensor:
    return number.to(device) if isinstance(number, Tensor) else number
