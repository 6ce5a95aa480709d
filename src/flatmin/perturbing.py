"""The parts of a step with perturbed passes: what AMP and RMP share, and every form of a step is made of.

to θ + Δ        `_move`, with the subclass's `_perturb`; θ is kept in a copy
a pass there    `_pass`: whatever goes wrong in it, weights, buffers and random states end as they were
back to θ       `_return_to_theta`: by copying, in place, because θ + Δ − Δ ≠ θ in floating point
the step        `_step_base`: the base's, at θ, with ∇J(θ + Δ); or `_step_plainly` where nothing is perturbed
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from flatmin.ball import Norm, combine, norms
from flatmin.core import distributed, multi_tensor
from flatmin.core.model_state import Snapshot
from flatmin.core.tensors import Copies
from flatmin.guard import step_unless
from flatmin.last import Last, detached_loss
from flatmin.scaling import Owners, check_in_use, inverse_scale, new_gradients_come, step_scaled
from flatmin.shell import Shell

Closure = Callable[[], Any]


@dataclass
class Aside:
    """A step whose weights never move: θ + Δ is written here instead, and gradients come from here.

    So a captured step works. Its passes run with these weights, of the precision that they compute in, and θ needs
    neither a copy nor a way back.
    """

    weights: Mapping[Tensor, Tensor]
    gradients: Mapping[Tensor, Tensor]
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None  # None: to the bit as without a capture


class Perturbing(Shell, ABC):
    """An optimizer whose base takes its step with the gradient of perturbed passes."""

    last: Last

    _starts_clean: ClassVar[bool]  # is there a pass at θ, before the perturbed ones?
    _same_on_all_ranks: ClassVar[tuple[str, ...]] = ("inner_iter", "ball", "norm", "sync_perturbation")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.last = Last()
        self._theta: Copies[Tensor] = Copies()  # θ of the parameters that are, or may have to be, put back
        self._in_a_pass = False
        self._aside: Aside | None = None
        self._forget_step()

    def _meet(self, model: nn.Module | None) -> None:
        # With `model=`, buffers and random states at two moments. Before the step: there an exception in step(closure)
        # leads back to, and from there the extra passes draw their masks. After the clean pass (RMP: before the block):
        # so a step ends, and there an exception in a block leads back to.
        self._at_start = None if model is None else Snapshot(model)
        self._at_clean = None if model is None else Snapshot(model)
        self._replicas = distributed.replicas_in(model)
        self._process_groups: list[Any] | None = None  # of the ranks that share the model, once they have met
        self._is_new = True

    def _forget_step(self) -> None:
        self._theta.forget()
        self._sound: Tensor | None = None  # was every gradient that Δ came from finite? None: there was none
        self._measured: dict[str, Tensor] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget_step()
        self._process_groups, self._is_new = None, True

    @abstractmethod
    def _perturb(self, n: int, unscale: float | Tensor) -> None:
        """Keep θ of the parameters to move in `_theta`, and move them to θ + Δ for the n-th perturbed pass."""

    @contextmanager
    def _pass(self, *, undo: Snapshot | None) -> Iterator[None]:
        """Whatever goes wrong inside, θ comes back, and the buffers and random states in `undo` with it."""
        self._in_a_pass = True
        try:
            yield
        except BaseException:
            self._put_back_theta()
            if undo is not None:
                undo.put_back_buffers()
                undo.put_back_random()
            self._forget_step()
            raise
        finally:
            self._in_a_pass = False

    def _ascent_pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around a pass: all but the last are the ascent's, where each rank may keep its own gradient."""
        return nullcontext() if is_last or self.sync_perturbation else distributed.without_sync(self._replicas)

    def _move(self, n: int, scaler: GradScaler | None) -> None:
        unscale: float | Tensor = 1.0
        if self._starts_clean:
            check_in_use(scaler)
            unscale = inverse_scale(scaler, self._owners, self._home)
            if n == 0 and self.sync_perturbation:
                self._compare_gradients()
        self._perturb(n, unscale)
        torch.clear_autocast_cache()  # where autocast is around the step, it would go on with the old weights
        new_gradients_come(scaler, self._owners)

    def _take(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            since = self._at_start if snapshot is self._at_clean and self._starts_clean else None
            snapshot.take_random(self._devices(), since=since)
            snapshot.take_buffers()

    def _return_to_theta(self) -> None:
        self._put_back_theta()
        if self._at_clean is not None and self._starts_clean:
            self._at_clean.put_back_buffers()
            self._at_clean.put_back_random()

    def _put_back_theta(self) -> None:
        self._theta.put_back({param: param for param in self._theta})
        torch.clear_autocast_cache()

    @torch.no_grad()
    def _step_base(self, scaler: GradScaler | None, **losses: Tensor | None) -> None:
        """The base's step at θ with the gradient of the last pass, unless some gradient of the step was not finite."""
        gradients = {p: p.grad for p in self._params() if p.grad is not None}
        try:  # whatever goes wrong, this θ is not the next step's
            check_in_use(scaler)
            self._compare_gradients()
            skip = self._must_skip(list(gradients.values()), scaler)
            measured = self._measured
            step_unless(skip, self._owners, list(gradients), self._theta, scaler)
        finally:
            self._forget_step()
        self._is_new = False
        self.last = Last(skipped=skip, **measured, **losses)

    def _must_skip(self, gradients: Sequence[Tensor], scaler: GradScaler | None) -> Tensor:
        """Was some gradient of the step not finite, these of the last pass among them?"""
        skip: Tensor
        length, skip = self._fast(_judged)(self._lengths(gradients), self._sound, norm=self.norm)
        if not self.sync_perturbation:  # else the gradients, and so the flags, are the same everywhere
            skip = distributed.on_any(skip, self._process_groups or [])
        if "grad_norm" not in self._measured:  # RMP, or nothing to perturb had a gradient in the clean pass
            self._measured["grad_norm"] = length * inverse_scale(scaler, self._owners, self._home)
        return skip

    def _rooms(self) -> list[Tensor]:
        """The memory that a step may keep θ or Δ in."""
        return list(self._theta.rooms())

    def _shares_a_step(self) -> bool:
        """Are buffers and masks of all passes those of the clean one?"""
        return self.model is not None and self._starts_clean

    def _step_plainly(self, closure: Closure | None, scaler: GradScaler | None, *, skip: Tensor | None = None) -> Any:
        """No pass, or no radius: the base optimizer itself. `skip`: for a scaler that has not seen all gradients."""
        self._forget_step()
        skipped = None
        if scaler is None:
            result = self.base.step() if closure is None else self.base.step(closure)
        else:
            with torch.enable_grad():
                result = None if closure is None else closure()
            check_in_use(scaler)
            skip = torch.zeros((), dtype=torch.bool, device=self._home) if skip is None else skip
            skipped = step_scaled(skip, self._owners, [], scaler)
        self.last = Last(loss=detached_loss(result), skipped=skipped)
        return result

    # ---- where θ, θ + Δ and the gradients lie: in the parameters, or aside

    def _gradient_of(self, param: Tensor) -> Tensor | None:
        return param.grad if self._aside is None else self._aside.gradients.get(param)

    def _lengths(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of each of these gradients, or other directions."""
        may_be_fast = self._aside is not None and self._aside.compiled is not None and self.norm == "l2"
        if may_be_fast and multi_tensor.measurable(tensors):
            return multi_tensor.lengths(tensors)
        return norms(tensors, norm=self.norm).to(self._home)

    def _fast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a few numbers, compiled where that is welcome."""
        return function if self._aside is None or self._aside.compiled is None else self._aside.compiled(function)

    def _keep_theta(self, params: Iterable[Tensor]) -> None:
        if self._aside is None:
            self._theta.take({p: p for p in params if p not in self._theta})

    def _theta_of(self, param: Tensor) -> Tensor:
        return self._theta[param] if self._aside is None else param

    def _moved(self, param: Tensor) -> Tensor:
        """Where θ + Δ is written."""
        return param if self._aside is None else self._aside.weights[param]

    # ---- among several ranks

    def _meet_ranks(self) -> None:
        """At the first step: one perturbation a rank needs replicas, and all ranks need the same settings."""
        distributed.check_layout(self._replicas, self._params(), sync_perturbation=self.sync_perturbation)
        groups = distributed.groups_of(self._replicas, self._params())
        if groups:  # reading ε may wait for the device
            settings = {
                **{key: [float(group[key]) for group in self.param_groups] for key in self._hyperparameters},
                **{name: getattr(self, name) for name in self._same_on_all_ranks},
            }
            distributed.compare(settings, groups, device=self._home, way_out="give every rank the same settings")
        self._process_groups = groups

    def _compare_gradients(self) -> None:
        """In the first step: a parameter that has a gradient on one rank alone would hold up all the others."""
        if not (self._is_new and self._process_groups):
            return
        named = [] if self.model is None else self.model.named_parameters()
        names: dict[Tensor, str] = {param: name for name, param in named}
        missing = [names.get(p, f"number {place}") for place, p in enumerate(self._params()) if p.grad is None]
        distributed.compare(
            {"parameters without a gradient": missing},
            self._process_groups,
            device=self._home,
            way_out="use the same parameters in every rank's loss, or freeze them on every rank",
        )
        if self._replicas:
            gradients = [p.grad for p in self._params() if p.grad is not None]
            length = float(combine(self._lengths(gradients), norm=self.norm))
            distributed.compare(
                {"‖∇J‖": f"{length:.9g}"},  # in digits: nan is nan
                self._process_groups,
                device=self._home,
                way_out="run the passes outside no_sync() (or use sync_perturbation=False), and only parameters of the "
                "DistributedDataParallel model",
            )

    # ---- facts

    @property
    def _owners(self) -> Owners:
        return self, self.base

    def _devices(self) -> list[torch.device]:
        """Those of the parameters, each once, in the order of the groups."""
        return list({p.device: None for p in self._params()})

    @property
    def _home(self) -> torch.device:
        """The device where a step's few numbers (lengths, flags) come together."""
        params = (p for group in self.param_groups for p in group["params"])
        return next((p.device for p in params), torch.device("cpu"))

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._params())

    def _check_gradients(self, where: str) -> None:
        if self._has_gradients():
            return
        if self.model is not None and {id(p) for p in self._params()}.isdisjoint(map(id, self.model.parameters())):
            raise RuntimeError(
                f"no parameter got a gradient in {where}, because the optimizer's are the model's no more; make the "
                "optimizer last, after fully_shard(), .to() and the like"
            )
        raise RuntimeError(f"no parameter got a gradient in {where}; call backward() inside it")


def _judged(lengths: Tensor, sound: Tensor | None, *, norm: Norm) -> tuple[Tensor, Tensor]:
    """The length of the whole; and whether it, or something before, is not finite."""
    length = combine(lengths, norm=norm)
    return length, ~(length.isfinite() if sound is None else length.isfinite() & sound)
