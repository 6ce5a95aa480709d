"""The gradient at θ + Δ, the step at θ: what AMP and RMP share.

    θ ← base.step(θ, ∇J(θ + Δ))

With a closure, `step` runs all passes itself; with a list of closures, one per micro-batch, each micro-batch has its
own perturbation. In a loop without a closure, a `perturbed()` block is one pass, and `step` follows the blocks. Each
form consists of

    to θ + Δ        `_move`, with the subclass's `perturb`; a copy of θ is kept
    a pass there    `_pass`: if it raises, weights, buffers and random states are restored
    back to θ       `_return_to_theta`: by copying, in place, because θ + Δ − Δ ≠ θ in floating point
    the step        `_step_base`: the base's, at θ, with ∇J(θ + Δ); or `_step_plainly` if nothing is perturbed
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from flatmin.ball import Norm, combine
from flatmin.core import distributed
from flatmin.core.copies import Copies
from flatmin.core.model_state import Snapshot
from flatmin.core.random_state import HostWatch
from flatmin.core.recorded_launches import Results
from flatmin.core.recurring_work import Operands
from flatmin.core.tensors import plain
from flatmin.optim.call_checks import (
    check_ascent,
    check_losses,
    check_still_of_model,
    gradient_error,
    usable_scaler,
)
from flatmin.optim.model_ranks import ModelRanks
from flatmin.optim.pass_start import ForwardHook, PassStart
from flatmin.optim.telemetry.step_info import Last, Measured, detached_loss, mean_loss, mean_of, whole
from flatmin.optim.update.accumulation import GradientSnapshot, MeanGradient
from flatmin.optim.update.grad_scaler import (
    Owners,
    check_scaler_used,
    forget_unscaled,
    inverse_scale,
    step_scaled,
    step_with_grad_scale,
)
from flatmin.optim.update.skip_step import skips_by_itself, step_unless
from flatmin.optim.weight_storage import InPlace, WeightStorage
from flatmin.optim.wrapper import Arguments, Group, OptimizerWrapper, evaluates_closure

if TYPE_CHECKING:
    from flatmin.optim.radius.step_record import StepRecord

Result = TypeVar("Result")
Closure = Callable[[], Any]
Closures = list[Closure] | tuple[Closure, ...]  # one per micro-batch

READ_AT_ONCE = ("cpu",)  # devices whose numbers the host reads without waiting
_TO_DISABLE: list[Callable[[], None]] = []  # see `untraced`


def untraced(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates what torch.compile must run as it is, outside of its graphs: a step moves weights and catches errors.

    `torch.compiler.disable` would import the compiler along with flatmin. torch imports it for the first optimizer,
    and then it is called here too (`_keep_untraced`).
    """
    outside = [method]

    def disable() -> None:
        outside[0] = torch.compiler.disable(method)

    _TO_DISABLE.append(disable)

    @wraps(method)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return outside[0](*args, **kwargs)

    return run


def _keep_untraced() -> None:
    """Called for every new optimizer, because torch.compile cannot do it while it traces."""
    while _TO_DISABLE:
        _TO_DISABLE.pop()()


class PerturbedBlock(ContextDecorator):
    """What `perturbed()` returns: torch.compile enters and leaves it outside of its graphs."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    @untraced
    def __enter__(self) -> None:
        self._context = self._make()
        self._context.__enter__()

    @untraced
    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


class PerturbedOptimizer(OptimizerWrapper, ABC):
    """An optimizer whose base takes its step with the gradient of perturbed passes.

    Its step takes one closure, several closures, or, after `perturbed()` blocks, none.
    """

    last: Last

    # so scaler.step(optimizer) always calls step(), even on overflow, and leaves `grad_scale` and `found_inf` here
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    starts_clean: ClassVar[bool]  # is there a pass at θ, before the perturbed ones?
    matching: "StepRecord | None" = None  # what steps have measured for a MatchedRadius, if there is one
    same_on_ranks: ClassVar[tuple[str, ...]] = ("inner_iter", "ball", "norm", "sync_perturbation", "radius_schedule")

    def _make_step_state(self) -> None:
        _keep_untraced()
        self.last = Last()
        self._theta: Copies[Tensor] = Copies()  # θ of the parameters that are, or may have to be, restored
        self._delta: Copies[Tensor] = Copies()  # Δ between two ascent steps; stays empty for N = 1
        self._storage = InPlace(self._theta)
        self._in_a_pass = False
        self.zeroed = 0  # how many steps zero_grad() has started: earlier gradients are gone
        self._set_to_none = True  # as zero_grad() was last called: the same holds between the passes of a step
        self._has_stepped = False
        self._checked: list[Any] | None = None  # the settings that passed the last check
        self.forget_step()

    def _attach_model(self, model: nn.Module | None) -> None:
        # With `model=`, buffers and random states are saved at two moments. Before a step with a closure: restored
        # after an exception in it, and the extra passes draw their masks from there (in blocks: `PassStart`). After the
        # clean pass (RMP: before the block): restored at the end of a step, and after an exception in a block.
        watch = HostWatch() if self.starts_clean else None
        self._at_start = None if model is None else Snapshot(model, watch=watch)
        self._at_clean = None if model is None else Snapshot(model, watch=watch)
        self._pass_start = None if model is None or not self.starts_clean else PassStart(model, watch)
        self._watch_forward(model)
        self._ranks = ModelRanks(model)

    def _watch_forward(self, model: nn.Module | None) -> None:
        """With None there is no hook: a closure shows where its passes begin. A TorchScript model takes none."""
        if (earlier := vars(self).get("_hook")) is not None:
            earlier.remove()
        self._hook = None
        if model is not None and self.starts_clean and not isinstance(model, torch.jit.ScriptModule):
            self._hook = ForwardHook(model, self._forward_begins)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of its base alone, which leaves ε and ζ as they are."""
        super().load_state_dict(state_dict)
        optimizer = self.behind_proxy()
        optimizer.forget_step()
        optimizer._ranks = ModelRanks(optimizer.model)  # to be compared again: have all loaded the same?
        if optimizer.matching is not None:
            optimizer.matching.optimizer_was_loaded()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Outside a pass this also starts a new step, whether before or after its forward pass."""
        if "_itself" not in self.__dict__:
            self.behind_proxy().zero_grad(set_to_none)
            return
        if not self._in_a_pass:
            self._begin_step()
        self._set_to_none = set_to_none
        self.base.zero_grad(set_to_none)

    @untraced  # torch 2.11 cannot trace what it sets
    def _begin_step(self) -> None:
        self.forget_step()
        self.zeroed += 1
        if self._pass_start is not None:
            self._pass_start.zero_grad(self.devices())

    def _forward_begins(self) -> None:
        if self._pass_start is None:
            return
        if self._in_a_pass:
            self._pass_start.forward_begins_in_block()
        else:
            self._pass_start.forward_begins(self.devices, has_gradients=self.has_gradients)

    # ---- for the captured step, the doctor and the integrations

    @property
    def perturbs(self) -> bool:
        """Will the next step perturb anything? If N = 0 or every ε = 0, it is the base's own step: one pass."""
        return self.inner_iter > 0 and bool(self.perturbed_groups())

    @property
    def awaits_step(self) -> bool:
        """Have all `perturbed()` blocks of a step been run, so that step() or zero_grad() must follow?"""
        return 0 < self.inner_iter <= self._blocks

    def only_makes_state(self) -> bool:
        """Is this the step with which torch.distributed.checkpoint creates a new optimizer's state, to load into?"""
        if self._blocks or self.state or any(float(group.get("lr", 1)) != 0 for group in self.param_groups):
            return False
        return not any(plain(p.grad).any() for p in self._params() if p.grad is not None)

    def note_losses(self, loss: Tensor, loss_perturbed: Tensor) -> None:
        """The losses of the passes of this step, which blocks do not see: at θ, and in the last block."""
        self._measured.numbers |= {"loss": whole(loss), "loss_perturbed": whole(loss_perturbed)}

    @property
    def step_settings(self) -> tuple[Any, ...]:
        """What a step depends on besides the groups: the passes, the ball, the model, RMP's noise."""
        return tuple(getattr(self, name) for name in self._settings if name not in ("base", "sync_perturbation"))

    @property
    def shares_clean_state(self) -> bool:
        """Do all passes of a step use the buffers and dropout masks of the clean pass?"""
        return self.model is not None and self.starts_clean

    @property
    def process_groups(self) -> Sequence[Any]:
        """The process groups of the ranks that share the model."""
        return self._ranks.find_groups(self._params())

    @property
    def owners(self) -> Owners:
        """The optimizers under whose ids a GradScaler may know this one."""
        return self, self.base

    def perturbed_groups(self) -> list[Group]:
        groups = self.base.param_groups
        return [group for group in groups if isinstance(group["epsilon"], Tensor) or group["epsilon"] > 0]

    @abstractmethod
    def perturb(self, n: int, unscale: float | Tensor, storage: WeightStorage, measured: Measured) -> None:
        """Save θ of the parameters to move, and move them to θ + Δ for the n-th perturbed pass, all in `storage`."""

    def must_skip(
        self,
        gradients: Sequence[Tensor],
        scaler: GradScaler | None,
        storage: WeightStorage,
        measured: Measured,
        *,
        drop: bool = False,
    ) -> Tensor:
        """Was any gradient of the step, including these of the last pass, not finite? With `drop`, zero these if so."""
        finite, home = measured.finite, self._home
        measures = "grad_norm" not in measured.numbers  # RMP, or nothing to perturb had a gradient in the clean pass

        def check(_: object) -> Results:
            lengths = storage.norms_of(gradients, norm=self.norm).to(home)
            length, skip = storage.compiled(_check_lengths)(lengths, finite, norm=self.norm)
            if drop:
                storage.zero_unless(gradients, ~skip)
            return (length, skip) if measures else (skip,), (skip,)

        if self.norm == "l2" and gradients and gradients[0].device == home:
            flags = [] if finite is None else [finite]
            kept, (skip,) = storage.run(check, Operands(("check", drop, measures), [gradients], flags=flags))
        else:
            kept, (skip,) = check(())
        measured.skipped = kept[-1]
        if not self.sync_perturbation:  # else the gradients, and so the flags, are the same on all ranks
            skip = measured.skipped = distributed.any_rank(kept[-1], self._ranks.groups)
        if measures:
            measured.numbers["grad_norm"] = kept[0] * inverse_scale(scaler, self.owners, self._home)
        return skip

    def devices(self) -> list[torch.device]:
        """The devices of the parameters, each once, in the order of the groups; not "meta", which has no numbers."""
        return list({p.device: None for group in self.base.param_groups for p in group["params"] if not p.is_meta})

    def _drop_gradients(self) -> None:
        """The base's zero_grad(), without the overhead of torch's own; in place if the loop's are zeroed in place."""
        if not self._set_to_none:
            self.base.zero_grad(set_to_none=False)
            return
        if getattr(self.base.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            self.base.zero_grad()
            return
        for group in self.base.param_groups:
            for p in group["params"]:
                p.grad = None

    def has_gradients(self) -> bool:
        return self._first_gradient() is not None

    def moved(self) -> list[tuple[Tensor, Tensor]]:
        """What a pass at θ + Δ has changed until it ends, weights and buffers, each with what it is at θ."""
        if not self._in_a_pass:
            return []
        weights = [(param, self._theta[param]) for param in self._theta]
        return weights + self._at_clean.taken_buffers() if weights and self._at_clean is not None else weights

    def memory(self) -> list[Tensor]:
        """The memory in which a step may keep θ or Δ."""
        return [*self._theta.memory(), *self._delta.memory()]

    def release_theta(self) -> None:
        """Free the memory that holds θ: captured steps do not need it."""
        self._theta.release()

    def forget_step(self) -> None:
        """Start over: discard what the step has measured and saved so far."""
        self._theta.forget()
        self._measured = Measured()
        self._blocks = 0
        self._scaler_of_blocks: GradScaler | None = None
        self._replays = False  # does the current pass draw the same numbers as the clean one?

    # ---- with a closure

    @untraced
    def step(
        self,
        closure: Closure | Closures | None = None,
        *misplaced: object,
        scaler: GradScaler | None = None,
        ascent: Closure | None = None,
        losses: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Take one step, and return what the first call of the closure returned.

        The closure zeroes the gradients, runs forward and backward, and returns the loss; it is called once per pass.
        Without a closure, this is the step that follows the `perturbed()` blocks. With a `scaler`, the closure calls
        `scaler.scale(loss).backward()`, and `scaler.update()` follows the step as usual.

        With a list of closures, one per micro-batch, each micro-batch has its own perturbation (m-sharpness); the step
        uses the mean of their gradients and returns a list. For a single perturbation, run all of them in one closure.

        With `ascent`, a closure on less data (part of the batch, smaller images), AMP takes Δ from its gradient and
        calls `closure` once, at θ + Δ. The passes then draw their own random numbers, BatchNorm's statistics are those
        of the first ascent pass, at θ, and `last.loss` is None, because no pass at θ had all the data.

        After `perturbed()` blocks, `losses` are the losses at θ and in the last block: only then does `last` have them,
        and only from there can a `MatchedRadius` and a `StepLog` take them.
        """
        from_scaler = "found_inf" in vars(self)  # scaler.step(optimizer), not optimizer.step(scaler=scaler)
        try:
            scaler = self._check_arguments(closure, misplaced, self._scaler_of_blocks if from_scaler else scaler)
            if ascent is not None:
                check_ascent(type(self).__name__, closure, ascent, ascends=self.starts_clean)
            if losses is not None:
                check_losses(closure, losses)
            result = None
            if from_scaler and self._scaler_of_blocks is None:
                self._step_from_scaler(closure, losses)
            else:
                result = self._step(closure, scaler, ascent, losses)
            if closure is None and self._pass_start is not None:
                self._pass_start.step_ends()
            self._has_stepped = True
            return result
        except BaseException:
            for left_by_the_scaler in ("grad_scale", "found_inf"):
                vars(self).pop(left_by_the_scaler, None)
            raise

    def _step(
        self,
        closure: Closure | Closures | None,
        scaler: GradScaler | None,
        ascent: Closure | None,
        losses: tuple[Tensor, Tensor] | None,
    ) -> Any:
        if self._in_a_pass:
            raise RuntimeError("step() was called inside a pass: leave the perturbed() block, or the closure, first")
        if closure is None:
            self._step_after_blocks(scaler, losses)
            return None
        if self._blocks:
            raise RuntimeError(
                f"step() takes no closure after perturbed() blocks, got one after {self._blocks} block(s); leave it "
                "out, or call zero_grad() to start over"
            )
        if self._hook is not None and self._pass_start is not None:
            self._watch_forward(None)
            self._pass_start.step_ends()
        if isinstance(closure, list | tuple):
            return self._step_each(closure, scaler)
        if not self.perturbs:
            return self._step_plainly(closure, scaler)
        with self._pass(undo=self._at_start):
            first, latest = self._run(closure, scaler, ascent)
            self._return_to_theta(as_drawn=ascent is not None)
        found = [r.detach() if type(r) is Tensor else detached_loss(r) for r in (first, latest)]
        self._step_base(scaler, loss=found[0] if ascent is None else None, loss_perturbed=found[1])
        return first if ascent is None else latest

    def _run(self, closure: Closure, scaler: GradScaler | None, ascent: Closure | None = None) -> tuple[Any, Any]:
        """Run all passes of a step; returns the results of the first and the last."""
        start, clean = self._at_start, self._at_clean
        devices = [] if start is None else self.devices()
        if start is not None:
            start.take(devices)
            self._replays = ascent is None
        with torch.enable_grad():
            if self.starts_clean:
                with self._ascent_pass(is_last=False):
                    first = latest = (ascent or closure)()
                self._check_gradients("the closure" if ascent is None else "the ascent")
                if clean is not None:
                    clean.take(devices, since=start)
            for n in range(self.inner_iter):
                self._move(n, scaler)
                if n > 0 and self.starts_clean and clean is not None:
                    clean.put_back_buffers()  # every pass starts with those of the clean one
                self._drop_gradients()  # for closures that leave this to the loop: passes must not add up
                if self.starts_clean and start is not None and ascent is None:
                    start.put_back_random()
                is_last = n + 1 == self.inner_iter
                with self._ascent_pass(is_last=is_last):
                    latest = closure() if is_last or ascent is None else ascent()
                self._check_gradients("the closure" if is_last or ascent is None else "the ascent")  # in every call
                if n == 0 and not self.starts_clean:
                    first = latest
        return first, latest

    def _step_each(self, closures: Closures, scaler: GradScaler | None) -> list[Any]:
        """Each micro-batch has its own ascent from θ; the base steps with the mean of their gradients."""
        idle = not self.perturbs
        if evaluates_closure(self.base):
            name = type(self.base).__name__
            raise TypeError(f"{name} evaluates its closure itself and takes only one, got {len(closures)}")
        mean = MeanGradient(self._params())
        before = None if self.model is None else Snapshot(self.model)
        if before is not None:
            before.take(self.devices())
        passes, measured = [], []
        with self._pass(undo=before):
            for place, closure in enumerate(closures):
                if place > 0 or self._has_stepped:  # before that, how the loop zeroes them is not known
                    self._drop_gradients()
                forget_unscaled(scaler, self.owners)
                finite = self._measured.finite  # in memory that the next ascent writes to
                finite = None if finite is None else finite.clone()
                self._measured = Measured(finite, epsilon=self._measured.epsilon)
                passes.append(self._run_plainly(closure) if idle else self._run(closure, scaler))
                if not idle:
                    self._return_to_theta()
                measured.append(self._measured.numbers)
                mean.add()
            mean.write_mean()
            first, latest = map(list, zip(*passes, strict=True))
            losses = {"loss": mean_loss(first, self._home), "loss_perturbed": mean_loss(latest, self._home)}
        if idle:
            # the scaler may have seen only the last micro-batch
            skip = None if scaler is None else ~mean.is_finite(self._home)
            self._step_plainly(None, scaler, skip=skip)
            self.last = replace(self.last, loss=losses["loss"])
        else:
            known = {key: [each[key] for each in measured if key in each] for each in measured for key in each}
            self._measured.numbers = {key: mean_of(numbers, self._home) for key, numbers in known.items()}
            self._step_base(scaler, **losses)
        return first

    def _run_plainly(self, closure: Closure) -> tuple[Any, Any]:
        with torch.enable_grad():
            result = closure()
        self._check_gradients("the closure")
        return result, result

    # ---- in blocks

    @untraced
    def perturbed(self, *misplaced: object, scaler: GradScaler | None = None) -> PerturbedBlock:
        """One perturbed pass, for loops without a closure: run forward and backward inside the block.

        A step of AMP is a backward pass at θ, `inner_iter` blocks, and `step()`, which uses the gradients of the last
        block; a step of RMP is one block, and `step()`. Outside the blocks the weights are θ.
        """
        return PerturbedBlock(partial(self.behind_proxy()._block, misplaced, scaler))

    @contextmanager
    def _block(self, misplaced: tuple[object, ...], scaler: GradScaler | None) -> Iterator[None]:
        scaler = self._check_arguments(None, misplaced, scaler)
        self._check_block(scaler)
        if self._hook is None:
            self._watch_forward(self.model)
        idle = not self.perturbs
        # with ε = 0 the step is the base's, bit for bit, so it uses the gradients of the clean pass, saved here
        # (with one perturbation per rank those were not synchronised; the block's, also at θ, are)
        synced = self.sync_perturbation or not self._ranks.groups
        saved = GradientSnapshot(self._params(), scaler, self.owners) if idle and self.starts_clean and synced else None
        with self._pass(undo=self._at_clean):
            if self._blocks == 0 and self._at_clean is not None:
                start = None if self._pass_start is None else self._pass_start.known
                self._at_clean.take_random(self.devices(), since=start)
                self._at_clean.take_buffers()
                if self._pass_start is not None:
                    self._pass_start.clean_pass_ended(self._at_clean)
            if not idle:
                self._move(self._blocks, scaler)
            self._drop_gradients()
            forget_unscaled(scaler, self.owners)
            if self._pass_start is not None:
                self._pass_start.block_begins()
                self._replays = self._pass_start.known is not None
            with self._ascent_pass(is_last=self._blocks + 1 == self.inner_iter):
                yield
            self._check_gradients("the perturbed() block")
            self._return_to_theta()
        if saved is not None:
            saved.put_back()
        self._blocks += 1
        self._scaler_of_blocks = scaler

    def _check_block(self, scaler: GradScaler | None) -> None:
        if self._in_a_pass:
            raise RuntimeError("perturbed() blocks cannot be nested: leave the current pass first")
        if self._blocks >= self.inner_iter:
            raise RuntimeError(
                f"inner_iter={self.inner_iter} means {self.inner_iter} perturbed() block(s) per step, and all of them "
                "have run; call step() next"
            )
        self._check_same_scaler(scaler)
        if self.starts_clean and not self.has_gradients():
            check_still_of_model(self._params(), self.model, "before perturbed()")
            raise RuntimeError("perturbed() follows the gradient, but no parameter has one; call backward() first")

    def _check_same_scaler(self, scaler: GradScaler | None) -> None:
        if self._blocks and scaler is not self._scaler_of_blocks:
            raise RuntimeError(
                "pass the GradScaler to all calls of a step, or to none: `with optimizer.perturbed(scaler=scaler):` "
                "for every block, then optimizer.step(scaler=scaler)"
            )

    def _step_after_blocks(self, scaler: GradScaler | None, losses: tuple[Tensor, Tensor] | None) -> None:
        idle = not self.perturbs
        if self._blocks == 0 and not idle and not self.only_makes_state():
            raise TypeError(
                f"{type(self).__name__}.step needs a closure that zeroes gradients, runs forward and backward, and "
                "returns the loss; without one, use `with optimizer.perturbed():` (zero_grad() discards earlier "
                "blocks), or in a trainer its integration from flatmin.integrations"
            )
        if 0 < self._blocks < self.inner_iter:
            raise RuntimeError(
                f"inner_iter={self.inner_iter} means {self.inner_iter} perturbed() blocks before step(), "
                f"got {self._blocks}; run the rest, or call zero_grad() to start over"
            )
        self._check_same_scaler(scaler)
        if losses is not None:
            self.note_losses(*losses)
        if idle or self._blocks == 0:
            self._step_plainly(None, scaler)
        else:
            self._step_base(scaler)

    # ---- the parts of a step

    @contextmanager
    def _pass(self, *, undo: Snapshot | None) -> Iterator[None]:
        """If the block raises, θ is restored, and so are the buffers and random states in `undo`."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a step needs gradients, but torch.inference_mode() is on, which disables them; take the step outside "
                "of it (torch.no_grad() is fine)"
            )
        try:
            self._in_a_pass = True
            yield
        except BaseException:
            self._put_back_theta()
            distributed.drop_gathered_weights(self.model)
            if undo is not None:
                undo.put_back()
            if self._pass_start is not None:
                self._pass_start.step_ends()
            self.forget_step()
            raise
        finally:
            self._in_a_pass = False

    def _ascent_pass(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of a pass: in ascent passes, all but the last, each rank may keep its own gradient."""
        return nullcontext() if is_last or self.sync_perturbation else self._ranks.without_sync()

    def _move(self, n: int, scaler: GradScaler | None) -> None:
        unscale: float | Tensor = 1.0
        if self.starts_clean:
            if scaler is not None:
                check_scaler_used(scaler)
                unscale = inverse_scale(scaler, self.owners, self._home)
            if n == 0 and self.sync_perturbation and self._ranks.are_new:
                self._ranks.compare_gradients(self._params(), norm=self.norm, device=self._home, ascends=True)
        self.perturb(n, unscale, self._storage, self._measured)
        torch.clear_autocast_cache()  # with autocast around the step, passes would use casts of the old weights
        if scaler is not None:
            forget_unscaled(scaler, self.owners)

    def _return_to_theta(self, *, as_drawn: bool = False) -> None:
        """Restore weights and buffers as they were at θ; random states too, unless `as_drawn`."""
        self._put_back_theta()
        if self._at_clean is not None and self.starts_clean:
            if self._replays:
                self._at_clean.check_replay()
            if as_drawn:
                self._at_clean.put_back_buffers()
            else:
                self._at_clean.put_back()

    def _put_back_theta(self) -> None:
        if not self._theta.put_back_again(list(self._theta)):
            self._theta.put_back({param: param for param in self._theta})
        torch.clear_autocast_cache()

    @torch.no_grad()
    def _step_base(self, scaler: GradScaler | None, **losses: Tensor | None) -> None:
        """The base's step at θ with the gradient of the last pass, unless any gradient of the step was not finite."""
        params, gradients = self._storage.gradients_of(self._params())
        try:  # even if this raises, the next step must not restore this θ
            if scaler is not None:
                check_scaler_used(scaler)
            if self._ranks.are_new:
                self._ranks.compare_gradients(self._params(), norm=self.norm, device=self._home, ascends=False)
            measured = self._measured
            reads_at_once = self._home.type in READ_AT_ONCE
            drop = not (reads_at_once or scaler is not None or skips_by_itself(self.base)) and self.sync_perturbation
            skip = self.must_skip(gradients, scaler, self._storage, measured, drop=drop)
            if scaler is None and reads_at_once and not skip:
                self.base.step()
            else:
                step_unless(skip, self.owners, params, self._theta, scaler, dropped=drop)
        finally:
            self.forget_step()
        if self._ranks.are_new:
            self._ranks.have_stepped()
        self.last = Last(epsilon=measured.epsilon, skipped=measured.skipped, **{**measured.numbers, **losses})

    def _step_plainly(self, closure: Closure | None, scaler: GradScaler | None, *, skip: Tensor | None = None) -> Any:
        """N = 0 or ε = 0: the base optimizer itself. `skip`: for a scaler that has not seen all gradients."""
        noted = self._measured.numbers.get("loss")
        self.forget_step()
        skipped = None
        if scaler is None:
            result = self.base.step() if closure is None else self.base.step(closure)
        else:
            with torch.enable_grad():
                result = None if closure is None else closure()
            check_scaler_used(scaler)
            skip = torch.zeros((), dtype=torch.bool, device=self._home) if skip is None else skip
            skipped = step_scaled(skip, self.owners, [], scaler)
        self.last = Last(loss=noted if closure is None else detached_loss(result), skipped=skipped, epsilon=0.0)
        return result

    # ---- calls and their arguments

    def _step_from_scaler(self, closure: Closure | Closures | None, losses: tuple[Tensor, Tensor] | None) -> None:
        """`scaler.step(optimizer)` without blocks before it: the base's own step, if nothing is perturbed."""
        if closure is not None:
            raise TypeError(
                "scaler.step(optimizer) takes no closure, because it checks the gradients before the closure makes "
                "them; write optimizer.step(closure, scaler=scaler)"
            )
        if self.perturbs:
            raise RuntimeError(
                "scaler.step(optimizer) must follow perturbed() blocks that had the scaler, but there were none; write "
                "`with optimizer.perturbed(scaler=scaler):`, or optimizer.step(closure, scaler=scaler)"
            )
        if losses is not None:
            self.note_losses(*losses)
        noted = self._measured.numbers.get("loss")
        self.forget_step()
        step_with_grad_scale(self.base, self.grad_scale, self.found_inf)
        self.last = Last(loss=noted, skipped=self.found_inf > 0, epsilon=0.0)

    def _check_arguments(
        self, closure: object, misplaced: tuple[object, ...], scaler: GradScaler | None
    ) -> GradScaler | None:
        """Check the arguments of any form of a step; returns the scaler, or None if it is disabled."""
        if misplaced or scaler is not None or not (closure is None or callable(closure)):
            scaler = usable_scaler(type(self).__name__, closure, misplaced, scaler)
        settings = [group.get(key) for group in self.base.param_groups for key in self._hyperparameters]
        kinds = list(map(type, settings))
        compared = Tensor not in kinds and NoneType not in kinds  # not tensors: the host might wait for the device
        if not compared or [self.ball, *settings, *kinds] != self._checked:
            self.check_groups()
            self._checked = [self.ball, *settings, *kinds] if compared else None
        if self._ranks.are_unchecked:
            self._ranks.compare_settings(
                self._params(), self._rank_settings, device=self._home, sync_perturbation=self.sync_perturbation
            )
        if self._ranks.groups and self.starts_clean and self.perturbs:
            self._ranks.check_join(self.base, sync_perturbation=self.sync_perturbation)
        return scaler

    def _rank_settings(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        in_groups = {key: [float(group[key]) for group in self.param_groups] for key in self._hyperparameters}
        return {**in_groups, **{name: getattr(self, name) for name in self.same_on_ranks}}

    # ---- parameters and devices

    @property
    def _home(self) -> torch.device:
        """The device on which a step's scalars (norms, flags) are combined."""
        for group in self.base.param_groups:
            for p in group["params"]:
                device: torch.device = p.device
                return device
        return torch.device("cpu")

    def _params(self) -> list[Tensor]:
        return [p for group in self.base.param_groups for p in group["params"]]

    def _first_gradient(self) -> Tensor | None:
        for group in self.base.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradient: Tensor = p.grad
                    return gradient
        return None

    def _check_gradients(self, where: str) -> None:
        first = self._first_gradient()
        if first is None or first.requires_grad:
            raise gradient_error(first, self._params(), self.model, where)


def _check_lengths(lengths: Tensor, finite: Tensor | None, *, norm: Norm) -> tuple[Tensor, Tensor]:
    """The overall norm, and whether it is not finite, or an earlier gradient was not (`finite`)."""
    length = combine(lengths, norm=norm)
    return length, ~(length.isfinite() if finite is None else length.isfinite() & finite)
