"""The gradient at θ + Δ, the step at θ: what AMP and RMP share.

    θ ← base.step(θ, ∇J(θ + Δ))

How Δ is found is the subclass's (`_perturb`); here are the forms of a step. With a closure, `step` runs all passes
itself; with a list of closures, one a micro-batch, each of them climbs on its own. In a loop without one, `perturbed()`
is one pass, and `step` ends what the blocks began. While the weights are at θ + Δ, θ is kept in a copy, and it comes
back by copying, in place: θ + Δ − Δ ≠ θ in floating point. Whatever goes wrong in a pass, the weights end as they were.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from flatmin import lists, ranks
from flatmin.ball import Norm, combine, norms
from flatmin.guard import step_unless
from flatmin.micro_batches import MeanGradient, mean_of
from flatmin.scaling import Owners, check_in_use, inverse_scale, new_gradients_come, step_scaled
from flatmin.shell import Shell, what
from flatmin.snapshot import Snapshot
from flatmin.tensors import Copies


@dataclass(frozen=True, kw_only=True)
class Last:
    """What the last step measured, as tensors on the device: nothing waits for them until they are read.

    `loss` is that of the clean pass and `loss_perturbed` that of the last pass, at θ + Δ (RMP has that pass alone, so
    the two are one); their difference is the sharpness. `grad_norm` is ‖∇J(θ)‖ (RMP: at θ + Δ) and `delta_norm` is ‖Δ‖
    over all balls together, both in the ball's norm. `on_ball` is the share of balls whose edge Δ was brought back to
    (for "linf", of tensors with a clamped number). `skipped` tells that a gradient was not finite and θ stayed as it
    was. None: not measured.
    """

    loss: Tensor | None = None
    loss_perturbed: Tensor | None = None
    grad_norm: Tensor | None = None
    delta_norm: Tensor | None = None
    on_ball: Tensor | None = None
    skipped: Tensor | None = None


@dataclass
class Aside:
    """A step whose weights never move: θ + Δ is written here instead, and gradients come from here.

    So a captured step works. Its passes run with these weights, of the precision that they compute in, and θ needs
    neither a copy nor a way back.
    """

    weights: Mapping[Tensor, Tensor]
    gradients: Mapping[Tensor, Tensor]
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None  # None: to the bit as without a capture


Closure = Callable[[], Any]
Closures = list[Closure] | tuple[Closure, ...]  # one a micro-batch


class Wrapper(Shell, ABC):
    """An optimizer whose base takes its step with the gradient of perturbed passes."""

    last: Last

    # so scaler.step(optimizer) always calls step(), also on overflow, and leaves `grad_scale` and `found_inf` here
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    _starts_clean: ClassVar[bool]  # is there a pass at θ, before the perturbed ones?
    _scaler_of_blocks: GradScaler | None

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
        self._groups: list[Any] | None = None  # of the ranks that share the model, once they have met
        self._is_new = True

    def _forget_step(self) -> None:
        self._theta.forget()
        self._blocks = 0
        self._scaler_of_blocks = None
        self._knows_start = False
        self._sound: Tensor | None = None  # was every gradient that Δ came from finite? None: there was none
        self._measured: dict[str, Tensor] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget_step()
        self._groups, self._is_new = None, True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Outside a pass this also begins a step afresh.

        With `model=`, the random state is remembered here: called right before the forward pass, as loops do, it lets
        the `perturbed()` blocks that follow draw the dropout masks of the clean pass again.
        """
        if not self._in_a_pass:
            self._forget_step()
            if self._at_start is not None:
                self._at_start.take_random(self._devices())
                self._knows_start = True
        self.base.zero_grad(set_to_none)

    # ---- with a closure

    def step(
        self,
        closure: Closure | Closures | None = None,
        *misplaced: object,
        scaler: GradScaler | None = None,
    ) -> Any:
        """One step. Returns what the first call of the closure returned.

        The closure zeroes the gradients, runs forward and backward and returns the loss; it is called once for each
        pass. Without one, this ends what `perturbed()` began. With a `scaler` the closure calls
        `scaler.scale(loss).backward()`, and `scaler.update()` follows the step as usual.

        A list of closures, one a micro-batch, gives each of them a perturbation of its own (m-sharpness) and steps
        with the mean of their gradients; it returns a list. For one perturbation, run all of them in one closure.
        """
        try:
            return self._step(closure, self._checked(closure, misplaced, self._scaler_that_calls() or scaler))
        except BaseException:
            for left_by_the_scaler in ("grad_scale", "found_inf"):
                vars(self).pop(left_by_the_scaler, None)
            raise

    def _step(self, closure: Closure | Closures | None, scaler: GradScaler | None) -> Any:
        if self._in_a_pass:
            raise RuntimeError("step() was called inside a pass: leave the perturbed() block, or the closure, first")
        if closure is None:
            self._step_after_blocks(scaler)
            return None
        if self._blocks:
            raise RuntimeError(
                f"step() ends a step that perturbed() began, and takes no closure then, got one after {self._blocks} "
                "block(s); leave it out, or call zero_grad() to begin afresh"
            )
        if isinstance(closure, list | tuple):
            return self._step_each(closure, scaler)
        if self._is_idle():
            return self._step_plainly(closure, scaler)
        with self._pass(undo=self._at_start):
            first, latest = self._run(closure, scaler)
            self._return_to_theta()
        self._step_base(scaler, loss=_detached_loss(first), loss_perturbed=_detached_loss(latest))
        return first

    def _run(self, closure: Closure, scaler: GradScaler | None) -> tuple[Any, Any]:
        """All passes of a step; the closure's first and last results."""
        self._take(self._at_start)
        with torch.enable_grad():
            if self._starts_clean:
                with self._ascent_pass(is_last=False):
                    first = latest = closure()
                self._check_gradients("the closure")
                self._take(self._at_clean)
            for n in range(self.inner_iter):
                self._move(n, scaler)
                self.base.zero_grad()  # for closures that leave it to the loop: two passes must not add up
                if self._starts_clean and self._at_start is not None:
                    self._at_start.put_back_random()
                with self._ascent_pass(is_last=n + 1 == self.inner_iter):
                    latest = closure()
                if n == 0 and not self._starts_clean:
                    self._check_gradients("the closure")
                    first = latest
        return first, latest

    def _step_each(self, closures: Closures, scaler: GradScaler | None) -> list[Any]:
        """Each micro-batch climbs from θ on its own; the base steps with the mean of their gradients."""
        idle = self._is_idle()
        mean = MeanGradient(p for group in self.param_groups for p in group["params"])
        before = None if self.model is None else Snapshot(self.model)
        self._take(before)
        passes, measured = [], []
        with self._pass(undo=before):
            for closure in closures:
                self.base.zero_grad()
                new_gradients_come(scaler, self._owners)
                self._measured = {}
                passes.append(self._run_plainly(closure) if idle else self._run(closure, scaler))
                self._return_to_theta()
                measured.append(self._measured)
                mean.add()
            mean.leave()
        first, latest = map(list, zip(*passes, strict=True))
        if idle:
            self._step_plainly(None, scaler)
            self.last = replace(self.last, loss=_mean_loss(first))
        else:
            self._measured = {key: mean_of([each[key] for each in measured]) for key in measured[0]}
            self._step_base(scaler, loss=_mean_loss(first), loss_perturbed=_mean_loss(latest))
        return first

    def _run_plainly(self, closure: Closure) -> tuple[Any, Any]:
        with torch.enable_grad():
            result = closure()
        self._check_gradients("the closure")
        return result, result

    # ---- in blocks

    @contextmanager
    def perturbed(self, *misplaced: object, scaler: GradScaler | None = None) -> Iterator[None]:
        """One perturbed pass, for loops without a closure: run forward and backward inside the block.

        Outside the blocks the weights are θ. Before the first block of an AMP step comes a backward pass at θ; after
        `inner_iter` blocks (RMP: one) comes `step()`. The gradients left for it are those of the last block.
        """
        scaler = self._checked(None, misplaced, scaler)
        self._check_block(scaler)
        idle = self._is_idle()
        # ε = 0 is the base's step bit for bit, so with the gradients of the clean pass: they are kept aside
        # (with a perturbation a rank, those were not synchronised: the block's, also at θ, are)
        clean = idle and self._starts_clean and self.sync_perturbation
        aside = [p for group in self.param_groups for p in group["params"]] if clean else []
        gradients = [p.grad for p in aside]
        with self._pass(undo=self._at_clean):
            if self._blocks == 0:
                self._take(self._at_clean)
            if not idle:
                self._move(self._blocks, scaler)
            self.base.zero_grad()
            if self._starts_clean and self._knows_start and self._at_start is not None:
                self._at_start.put_back_random()
            with self._ascent_pass(is_last=self._blocks + 1 == self.inner_iter):
                yield
            self._check_gradients("the perturbed() block")
            self._return_to_theta()
        for param, gradient in zip(aside, gradients, strict=True):
            param.grad = gradient
        self._blocks += 1
        self._scaler_of_blocks = scaler

    def _check_block(self, scaler: GradScaler | None) -> None:
        if self._in_a_pass:
            raise RuntimeError("perturbed() blocks follow one another: leave the pass you are in first")
        if self._blocks >= self.inner_iter:
            raise RuntimeError(
                f"inner_iter={self.inner_iter} asks for {self.inner_iter} perturbed() block(s) a step, and they are "
                "done; call step() next"
            )
        self._check_same_scaler(scaler)
        if self._starts_clean and not self._has_gradients():
            raise RuntimeError("perturbed() climbs along the gradient, and no parameter has one; call backward() first")

    def _check_same_scaler(self, scaler: GradScaler | None) -> None:
        if self._blocks and scaler is not self._scaler_of_blocks:
            raise RuntimeError(
                "a GradScaler goes to all calls of a step, or to none: `with optimizer.perturbed(scaler=scaler):` for "
                "every block, then optimizer.step(scaler=scaler)"
            )

    def _step_after_blocks(self, scaler: GradScaler | None) -> None:
        idle = self._is_idle()
        if self._blocks == 0 and not idle and not self._only_makes_state():
            raise TypeError(
                f"{type(self).__name__}.step needs a closure that zeroes gradients, runs forward and backward, and "
                "returns the loss; without one, use `with optimizer.perturbed():` (zero_grad() discards earlier blocks)"
            )
        if 0 < self._blocks < self.inner_iter:
            raise RuntimeError(
                f"inner_iter={self.inner_iter} asks for {self.inner_iter} perturbed() blocks before step(), "
                f"got {self._blocks}; add the rest, or call zero_grad() to begin afresh"
            )
        self._check_same_scaler(scaler)
        if idle or self._blocks == 0:
            self._step_plainly(None, scaler)
        else:
            self._step_base(scaler)

    def _only_makes_state(self) -> bool:
        """Is this the step with which torch.distributed.checkpoint makes a new optimizer's state, to load into it?"""
        return not self.state and all(float(group.get("lr", 1)) == 0 for group in self.param_groups)

    # ---- in both

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
        return nullcontext() if is_last or self.sync_perturbation else ranks.without_sync(self.model)

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
            snapshot.take_random(self._devices())
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
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        check_in_use(scaler)
        self._compare_gradients()
        skip = self._must_skip([p.grad for p in params], scaler)
        measured = self._measured
        try:
            step_unless(skip, self._owners, params, self._theta, scaler)
        finally:
            self._forget_step()
        self._is_new = False
        self.last = Last(skipped=skip, **measured, **losses)

    def _must_skip(self, gradients: Sequence[Tensor], scaler: GradScaler | None) -> Tensor:
        """Was some gradient of the step not finite, these of the last pass among them?"""
        skip: Tensor
        length, skip = self._fast(_judged)(self._lengths(gradients), self._sound, norm=self.norm)
        if not self.sync_perturbation:  # else the gradients, and so the flags, are the same everywhere
            skip = ranks.on_any(skip, self._groups or [])
        if "grad_norm" not in self._measured:  # RMP, or nothing to perturb had a gradient in the clean pass
            self._measured["grad_norm"] = length * inverse_scale(scaler, self._owners, self._home)
        return skip

    def _rooms(self) -> list[Tensor]:
        """The memory that a step may keep θ or Δ in."""
        return list(self._theta.rooms())

    def _shares_a_step(self) -> bool:
        """Are buffers and masks of all passes those of the clean one?"""
        return self.model is not None and self._starts_clean

    # ---- where θ, θ + Δ and the gradients lie: in the parameters, or aside

    def _gradient_of(self, param: Tensor) -> Tensor | None:
        return param.grad if self._aside is None else self._aside.gradients.get(param)

    def _lengths(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of each of these gradients, or other directions."""
        may_be_fast = self._aside is not None and self._aside.compiled is not None and self.norm == "l2"
        if may_be_fast and lists.measurable(tensors):
            return lists.lengths(tensors)
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

    def _step_plainly(self, closure: Closure | None, scaler: GradScaler | None) -> Any:
        """No pass, or no radius: the base optimizer itself."""
        self._forget_step()
        skipped = None
        if scaler is None:
            result = self.base.step() if closure is None else self.base.step(closure)
        else:
            with torch.enable_grad():
                result = None if closure is None else closure()
            check_in_use(scaler)
            sound = torch.zeros((), dtype=torch.bool, device=self._home)
            skipped = step_scaled(sound, self._owners, [], scaler)
        self.last = Last(loss=_detached_loss(result), skipped=skipped)
        return result

    @property
    def _owners(self) -> Owners:
        return self, self.base

    def _devices(self) -> list[torch.device]:
        """Those of the parameters, each once, in the order of the groups."""
        return list({p.device: None for group in self.param_groups for p in group["params"]})

    @property
    def _home(self) -> torch.device:
        """The device where a step's few numbers (lengths, flags) come together."""
        params = (p for group in self.param_groups for p in group["params"])
        return next((p.device for p in params), torch.device("cpu"))

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.param_groups for p in group["params"])

    def _check_gradients(self, where: str) -> None:
        if not self._has_gradients():
            raise RuntimeError(f"no parameter got a gradient in {where}; call backward() inside it")

    # ---- among several ranks

    def _meet_ranks(self) -> None:
        """At the first step: one perturbation a rank needs replicas, and all ranks need the same settings."""
        params = [p for group in self.param_groups for p in group["params"]]
        groups = ranks.groups_of(self.model, params)
        if not self.sync_perturbation:
            ranks.check_replicated(self.model, params)
        names = ("inner_iter", "ball", "norm", "sync_perturbation")
        settings = {
            **{key: [float(group[key]) for group in self.param_groups] for key in self._hyperparameters},
            **{name: getattr(self, name) for name in names},
        }
        ranks.compare(settings, groups, way_out="give every rank the same settings")
        self._groups = groups

    def _compare_gradients(self) -> None:
        """In the first step: a parameter that has a gradient on one rank alone would hold up all the others."""
        if not (self._is_new and self._groups):
            return
        names = {} if self.model is None else {param: name for name, param in self.model.named_parameters()}
        params = [p for group in self.param_groups for p in group["params"]]
        missing = [names.get(p, f"number {place}") for place, p in enumerate(params) if p.grad is None]
        ranks.compare(
            {"parameters without a gradient": missing},
            self._groups,
            way_out="use the same parameters in every rank's loss, or freeze them on every rank",
        )

    def _scaler_that_calls(self) -> GradScaler | None:
        """The scaler of the blocks, if this is `scaler.step(optimizer)` and not `optimizer.step(scaler=scaler)`."""
        if "found_inf" not in vars(self):
            return None
        if self._scaler_of_blocks is None:
            raise RuntimeError(
                "scaler.step(optimizer) ends a step whose blocks had the scaler, and there were none; write "
                "`with optimizer.perturbed(scaler=scaler):`, or optimizer.step(closure, scaler=scaler)"
            )
        return self._scaler_of_blocks

    def _checked(self, closure: object, misplaced: tuple[object, ...], scaler: GradScaler | None) -> GradScaler | None:
        """The door of all forms: the scaler that counts, None if it is switched off."""
        closures = closure if isinstance(closure, list | tuple) else [] if closure is None else [closure]
        if isinstance(closure, list | tuple) and not closure:
            raise ValueError("step takes a closure, or a list of one a micro-batch, got an empty list")
        if misplaced or not all(map(callable, closures)):
            wrong = misplaced[0] if misplaced else next(one for one in closures if not callable(one))
            raise TypeError(
                f"{type(self).__name__} takes a closure by position and a GradScaler by keyword, got {what(wrong)} by "
                "position; write step(closure, scaler=scaler) or perturbed(scaler=scaler)"
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {what(scaler)}")
        self._check_groups()
        if self._groups is None:
            self._meet_ranks()
        return scaler if scaler is not None and scaler.is_enabled() else None


def _judged(lengths: Tensor, sound: Tensor | None, *, norm: Norm) -> tuple[Tensor, Tensor]:
    """The length of the whole; and whether it, or something before, is not finite."""
    length = combine(lengths, norm=norm)
    return length, ~(length.isfinite() if sound is None else length.isfinite() & sound)


def loss_in(result: object) -> Tensor | None:
    """The loss in what a closure returned: the tensor itself, a dict's "loss", the first tensor of a tuple or list."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, tuple | list):
        result = next((item for item in result if isinstance(item, Tensor)), None)
    return result if isinstance(result, Tensor) else None


def _detached_loss(result: object) -> Tensor | None:
    loss = loss_in(result)
    return None if loss is None else loss.detach()


def _mean_loss(results: Sequence[object]) -> Tensor | None:
    """Of micro-batches."""
    losses = [loss for loss in map(_detached_loss, results) if loss is not None]
    return mean_of(losses) if len(losses) == len(results) else None
