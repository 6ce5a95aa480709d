"""Accelerate: the micro-batches of a step run once at θ, and are replayed at θ + Δ.

A step of Accelerate spans the micro-batches up to the one where `accelerator.sync_gradients` holds: a window. Its
gradient is their mean, so Δ must come from all of them, and so must the gradient at θ + Δ:

    at θ         each micro-batch as it arrives, which is kept
    at θ + Δ     all of them again, once the last one has arrived; N times
    then         clip, step, schedule, as in any loop

The loss scale, the accumulation and the exchange between processes are left to Accelerate.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from flatmin.core.messages import describe
from flatmin.integrations.replay import RandomState, Replay, as_it_is, note_losses
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.telemetry.step_info import detached_loss, loss_in

T = TypeVar("T")
_SKIP_HOOKS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


class Window:
    """The passes of a step in an Accelerate loop.

        model, optimizer, loader = accelerator.prepare(model, flatmin.AMP(optimizer, epsilon=0.1, model=model), loader)
        window = Window(accelerator, model, optimizer)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = window.backward(loss_of, x, y)      # loss = loss_of(x, y); accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    Every backward pass of the loop goes through it. All micro-batches of a window are kept until its end, or until
    optimizer.zero_grad() drops them with their gradients (model.zero_grad() does not).
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(
                f"write Window(accelerator, model, optimizer), got {describe(accelerator)} as the accelerator"
            )
        self.accelerator = accelerator
        self.model = model
        self.optimizer = unwrap_optimizer(optimizer)
        self._passes: list[Replay] = []
        self._current: Replay | None = None  # of the micro-batch now running at θ
        self._zeroed = self.optimizer.zeroed
        check_strategy(accelerator)
        if self.optimizer.model is not None:
            self.optimizer.model = model  # the prepared one, which exchanges gradients between processes
        if accelerator.scaler is not None and isinstance(optimizer, AcceleratedOptimizer):
            self._report_skipped_steps(optimizer)

    def backward(self, loss_of: Callable[..., T], *inputs: Any, **named_inputs: Any) -> T:
        """Call `accelerator.backward` on the loss in `loss_of(*inputs, **named_inputs)`, and return its result at θ.

        The result is the loss, or has it as a dict's "loss" or a tuple's first tensor: `loss_of` may be a Hugging Face
        model. It is called again with the same inputs when the window ends, so it must take them as arguments: by then
        the loop's variables are those of the last micro-batch.
        """
        if not callable(loss_of):
            raise TypeError(
                f"window.backward runs a function twice on its inputs, got {describe(loss_of)} as the function; write "
                "window.backward(model, **batch), or window.backward(loss_of, x, y)"
            )

        kept, named_kept = as_it_is(list(inputs)), as_it_is(named_inputs)

        def run(*inputs: Any, **named_inputs: Any) -> T:
            result = loss_of(*inputs, **named_inputs)
            loss = loss_in(result)
            if loss is None:
                raise TypeError(
                    'the function must return the loss as a tensor, a dict\'s "loss" or the first tensor of a tuple, '
                    f"got {describe(result)}"
                )
            self.accelerator.backward(loss)
            return result

        return self.run(
            lambda: run(*inputs, **named_inputs), again=lambda: run(*as_it_is(kept), **as_it_is(named_kept))
        )

    def run(self, run: Callable[[], T], *, again: Callable[[], object] | None = None, shares: bool = False) -> T:
        """Run a micro-batch, forward and backward: now at θ, and with the others at θ + Δ once the window is complete.

        `again` replaces `run` at θ + Δ, if `run` does more than a pass, such as making the inputs. Both return the loss
        if `optimizer.last` is to have it: that of the micro-batch, or with `shares` its share of the window's.
        """
        if self.optimizer.awaits_step:
            raise RuntimeError(
                "a window ends with the micro-batch at which accelerator.sync_gradients holds, and optimizer.step() "
                "must follow, but here the next micro-batch came instead; to accumulate, write `with "
                "accelerator.accumulate(model):` around the loop's body, and Accelerator(gradient_accumulation_steps=n)"
            )
        if self.optimizer.zeroed != self._zeroed:  # earlier ones were dropped, with their gradients
            self._passes, self._zeroed = [], self.optimizer.zeroed
        replay = self._current = Replay(again or run, self.optimizer)
        together = (
            self.optimizer.sync_perturbation or not self.optimizer.perturbs
        )  # else each process ascends its own gradient
        with nullcontext() if together else self._no_sync():
            result = run()
        replay.clean_loss = detached_loss(result)
        self._passes.append(replay)
        if self.accelerator.sync_gradients:
            passes, self._passes = self._passes, []
            note_losses(self.optimizer, passes, self._run_perturbed(passes), shares=shares)
        return result

    def record_random_state(self) -> None:
        """Called within `run`: the pass at θ + Δ repeats the random numbers drawn from here on."""
        assert self._current is not None
        self._current.record_random_state()

    def _run_perturbed(self, passes: list[Replay]) -> list[Tensor | None]:
        """The losses of the last perturbed passes; if there are none, those at θ."""
        losses = [replay.clean_loss for replay in passes]
        if not self.optimizer.perturbs:  # the base's own step follows
            return losses
        for _ in range(self.optimizer.inner_iter):
            drawn = RandomState(self.optimizer)
            with self.optimizer.perturbed(scaler=self.accelerator.scaler), drawn:
                for place, replay in enumerate(passes):
                    with nullcontext() if replay is passes[-1] else self._no_sync():
                        losses[place] = detached_loss(replay())
        return losses

    def _no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return context

    def _report_skipped_steps(self, accelerated: AcceleratedOptimizer) -> None:
        """Accelerate thinks a step was skipped if the scaler did not call it; a perturbed optimizer is always called.

        Without this, a scheduler would step when the optimizer did not.
        """

        def report(optimizer: Any, *_: object) -> None:
            accelerated._accelerate_step_called = not optimizer.last.skipped

        if earlier := _SKIP_HOOKS.pop(self.optimizer, None):  # another window's
            earlier.remove()
        _SKIP_HOOKS[self.optimizer] = self.optimizer.register_step_post_hook(report)


def behind_accelerate(optimizer: Any) -> Any:
    """What `accelerator.prepare` was given."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def unwrap_optimizer(optimizer: Optimizer) -> PerturbedOptimizer:
    """The AMP or RMP inside what `accelerator.prepare` returned."""
    inner = behind_accelerate(optimizer)
    if not isinstance(inner, PerturbedOptimizer):
        raise TypeError(
            "the optimizer must be a flatmin.AMP or flatmin.RMP, prepared by Accelerate or not, got "
            f"{describe(inner)}; write accelerator.prepare(model, flatmin.AMP(optimizer, epsilon=0.1, model=model))"
        )
    return inner


def check_strategy(accelerator: Accelerator) -> None:
    """Can weights that are distributed over processes in this way be perturbed?"""
    strategy = accelerator.distributed_type
    if strategy in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"{strategy.value} steps with its own optimizer, which cannot be perturbed; use DDP")
    if strategy == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP version 1 hides which parameters a process has; use DDP, or fsdp_version=2")
