"""The gradient at θ + Δ, the step at θ: the forms of a step.

    θ ← base.step(θ, ∇J(θ + Δ))

With a closure, `step` runs all passes itself; with a list of closures, one a micro-batch, each of them climbs on its
own. In a loop without one, `perturbed()` is one pass, and `step` ends what the blocks began. The parts are those of
`perturbing`; how Δ is found is the subclass's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import LBFGS

from flatmin.core.model_state import Snapshot
from flatmin.core.tensors import plain
from flatmin.kept_gradients import Gradients, MeanGradient
from flatmin.last import Last, detached_loss, mean_loss, mean_of
from flatmin.perturbing import Closure, Perturbing
from flatmin.scaling import new_gradients_come, step_as_told
from flatmin.shell import what

Closures = list[Closure] | tuple[Closure, ...]  # one a micro-batch


class Wrapper(Perturbing):
    """An optimizer whose step takes a closure, several, or none after `perturbed()` blocks."""

    # so scaler.step(optimizer) always calls step(), also on overflow, and leaves `grad_scale` and `found_inf` here
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    _scaler_of_blocks: GradScaler | None

    def _forget_step(self) -> None:
        super()._forget_step()
        self._blocks = 0
        self._scaler_of_blocks = None
        self._knows_start = False

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
