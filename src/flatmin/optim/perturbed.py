"""The gradient at θ + Δ, the step at θ: what AMP and RMP share.

    θ ← base.step(θ, ∇J(θ + Δ))

With a closure, `step` runs all passes itself; with a list of closures, one a micro-batch, each of them climbs on its
own. In a loop without one, `perturbed()` is one pass, and `step` ends what the blocks began. Every form is made of

    to θ + Δ        `_move`, with the subclass's `_perturb`; θ is kept in a copy
    a pass there    `_pass`: whatever goes wrong in it, weights, buffers and random states end as they were
    back to θ       `_return_to_theta`: by copying, in place, because θ + Δ − Δ ≠ θ in floating point
    the step        `_step_base`: the base's, at θ, with ∇J(θ + Δ); or `_step_plainly` where nothing is perturbed
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS

from flatmin.ball import Norm, combine
from flatmin.core import distributed
from flatmin.core.model_state import Snapshot
from flatmin.core.tensors import Copies, plain
from flatmin.optim.accumulation import Gradients, MeanGradient
from flatmin.optim.grad_scaler import Owners, check_in_use, inverse_scale, new_gradients_come, step_as_told, step_scaled
from flatmin.optim.skip_step import step_unless
from flatmin.optim.step_info import Last, detached_loss, mean_loss, mean_of
from flatmin.optim.weight_storage import InPlace, WeightStorage
from flatmin.optim.wrapper import OptimizerWrapper, what

Closure = Callable[[], Any]
Closures = list[Closure] | tuple[Closure, ...]  # one a micro-batch


class PerturbedOptimizer(OptimizerWrapper, ABC):
    """An optimizer whose base takes its step with the gradient of perturbed passes.

    Its step takes a closure, several, or none after `perturbed()` blocks.
    """

    last: Last

    # so scaler.step(optimizer) always calls step(), also on overflow, and leaves `grad_scale` and `found_inf` here
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    _starts_clean: ClassVar[bool]  # is there a pass at θ, before the perturbed ones?
    _same_on_all_ranks: ClassVar[tuple[str, ...]] = ("inner_iter", "ball", "norm", "sync_perturbation")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.last = Last()
        self._theta: Copies[Tensor] = Copies()  # θ of the parameters that are, or may have to be, put back
        self._in_a_pass = False
        self._store_in_place()
        self._forget_step()

    def _attach_model(self, model: nn.Module | None) -> None:
        # With `model=`, buffers and random states at two moments. Before the step: there an exception in step(closure)
        # leads back to, and from there the extra passes draw their masks. After the clean pass (RMP: before the block):
        # so a step ends, and there an exception in a block leads back to.
        self._at_start = None if model is None else Snapshot(model)
        self._at_clean = None if model is None else Snapshot(model)
        self._replicas = distributed.replicas_in(model)
        self._process_groups: list[Any] | None = None  # of the ranks that share the model, once they have met
        self._is_new = True

    def _store_in_place(self) -> None:
        """θ + Δ goes into the parameters, as in every step that is not captured."""
        self._storage: WeightStorage = InPlace(self._theta)

    def _lengths(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of each of these gradients, or other directions."""
        return self._storage.norms_of(tensors, norm=self.norm).to(self._home)

    def _forget_step(self) -> None:
        self._theta.forget()
        self._sound: Tensor | None = None  # was every gradient that Δ came from finite? None: there was none
        self._measured: dict[str, Tensor] = {}
        self._blocks = 0
        self._scaler_of_blocks: GradScaler | None = None
        self._knows_start = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget_step()
        self._process_groups, self._is_new = None, True

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

    @abstractmethod
    def _perturb(self, n: int, unscale: float | Tensor) -> None:
        """Keep θ of the parameters to move in `_theta`, and move them to θ + Δ for the n-th perturbed pass."""

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
            scaler = self._checked(closure, misplaced, self._scaler_of_blocks if self._scaler_calls() else scaler)
            if self._scaler_calls() and self._scaler_of_blocks is None:
                return self._step_as_told()
            return self._step(closure, scaler)
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
        self._step_base(scaler, loss=detached_loss(first), loss_perturbed=detached_loss(latest))
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
                self._check_gradients("the closure")  # in every call: those before the step were for the first alone
                if n == 0 and not self._starts_clean:
                    first = latest
        return first, latest

    def _step_each(self, closures: Closures, scaler: GradScaler | None) -> list[Any]:
        """Each micro-batch climbs from θ on its own; the base steps with the mean of their gradients."""
        idle = self._is_idle()
        if isinstance(self.base, LBFGS):
            raise TypeError(f"LBFGS evaluates its closure itself and takes one, got a list of {len(closures)}")
        mean = MeanGradient(self._params())
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
            losses = {"loss": mean_loss(first, self._home), "loss_perturbed": mean_loss(latest, self._home)}
        if idle:
            # the scaler may know of the last micro-batch alone
            skip = None if scaler is None else ~mean.is_finite(self._home)
            self._step_plainly(None, scaler, skip=skip)
            self.last = replace(self.last, loss=losses["loss"])
        else:
            known = {key: [each[key] for each in measured if key in each] for each in measured for key in each}
            self._measured = {key: mean_of(numbers, self._home) for key, numbers in known.items()}
            self._step_base(scaler, **losses)
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
        synced = self.sync_perturbation or not self._process_groups
        aside = Gradients(self._params(), scaler, self._owners) if idle and self._starts_clean and synced else None
        with self._pass(undo=self._at_clean):
            if self._blocks == 0:
                self._take(self._at_clean)
            if not idle:
                self._move(self._blocks, scaler)
            self.base.zero_grad()
            new_gradients_come(scaler, self._owners)
            if self._starts_clean and self._knows_start and self._at_start is not None:
                self._at_start.put_back_random()
            with self._ascent_pass(is_last=self._blocks + 1 == self.inner_iter):
                yield
            self._check_gradients("the perturbed() block")
            self._return_to_theta()
        if aside is not None:
            aside.put_back()
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
                "returns the loss; without one, use `with optimizer.perturbed():` (zero_grad() discards earlier "
                "blocks), and in a trainer what flatmin.integrations has for it"
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
        if self.state or any(float(group.get("lr", 1)) != 0 for group in self.param_groups):
            return False
        return not any(plain(p.grad).any() for p in self._params() if p.grad is not None)

    # ---- the parts of a step

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
        length, skip = self._storage.compiled(_judged)(self._lengths(gradients), self._sound, norm=self.norm)
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
        distributed.compare_missing_gradients(self._params(), self.model, self._process_groups, device=self._home)
        if self._replicas:
            gradients = [p.grad for p in self._params() if p.grad is not None]
            length = float(combine(self._lengths(gradients), norm=self.norm))
            distributed.compare_gradient_norms(length, self._process_groups, device=self._home)

    # ---- the door

    def _scaler_calls(self) -> bool:
        """Is this `scaler.step(optimizer)`, not `optimizer.step(scaler=scaler)`?"""
        return "found_inf" in vars(self)

    def _step_as_told(self) -> None:
        """`scaler.step(optimizer)` without blocks before it: the base's own step, if nothing is to be perturbed."""
        if not self._is_idle():
            raise RuntimeError(
                "scaler.step(optimizer) ends a step whose blocks had the scaler, and there were none; write "
                "`with optimizer.perturbed(scaler=scaler):`, or optimizer.step(closure, scaler=scaler)"
            )
        self._forget_step()
        step_as_told(self.base, self.grad_scale, self.found_inf)
        self.last = Last(skipped=self.found_inf > 0)

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
        if self._process_groups is None:
            self._meet_ranks()
        return scaler if scaler is not None and scaler.is_enabled() else None

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
