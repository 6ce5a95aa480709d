"""A step in Lightning's Trainer: all passes of a window of micro-batches, then the rest, in Lightning's order.

    the clean pass                   Lightning's own, of every micro-batch, with all its hooks and logs
    N perturbed passes               the same micro-batches again: only forward and backward, invisible to the rest
    unscaling, hooks, clipping, step in Lightning's order, once, with the gradient at θ + Δ

`PerturbedOptimizer` is what Lightning's loops call; `FlatMinima` (lightning.py) puts it in the optimizers' place, and
tells it of every batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torchmetrics import Metric  # Lightning depends on it

from flatmin.core.model_state import Snapshot
from flatmin.integrations.lightning_package import LightningOptimizer, ParallelStrategy, is_param_in_hook_signature, pl
from flatmin.integrations.replay import RandomState, Replay, as_it_is, note_losses
from flatmin.optim import perturbed
from flatmin.optim.call_checks import check_losses
from flatmin.optim.telemetry.step_info import detached_loss
from flatmin.optim.wrapper import evaluates_closure


class PerturbedOptimizer(LightningOptimizer):
    """A flatmin optimizer as Lightning's loops and `self.optimizers()` see it.

    Manual optimisation works as in your own loop; the scaler of 16-mixed precision is passed automatically:

        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with optimizer.perturbed():
            self.manual_backward(self.loss(batch))
        optimizer.step()

    `replaying` is true in a perturbed pass, for a `training_step` that keeps its own statistics.
    """

    _optimizer: perturbed.PerturbedOptimizer
    _strategy: pl.strategies.Strategy

    def __init__(self, optimizer: perturbed.PerturbedOptimizer, *, configured: Optimizer) -> None:
        super().__init__(optimizer)
        self.replaying = False
        self._configured = configured
        self._window: list[Replay] = []  # the passes at θ of this step
        self._stepped = False  # with this batch

    @property
    def optimizer(self) -> Optimizer:
        """What `configure_optimizers` returned: schedulers hold it, LearningRateMonitor searches for it."""
        return self._configured

    def __reduce__(self) -> Any:
        return partial(PerturbedOptimizer, configured=self._configured), (self._optimizer,)

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """One perturbed pass of manual optimisation."""
        with self._optimizer.perturbed(scaler=self._scaler):
            yield

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Does the base unscale its gradients itself? Then Lightning does not, and does not clip them either."""
        return getattr(self._optimizer.base, "_step_supports_amp_scaling", False)

    # ---- a step

    def remember(self, batch: Any, batch_idx: int) -> None:
        """A micro-batch arrives: it runs at θ now, and at θ + Δ when the step is due."""
        if batch_idx % self._module.trainer.accumulate_grad_batches == 0:
            self._window, self._stepped = [], False  # a tuner's last batch may have been too large to finish
        takes_index = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)
        index = (batch_idx,) if takes_index else ()

        def begin() -> Replay:  # hooks may have changed the batch, or drawn random numbers, since it arrived
            kept = as_it_is(batch)
            self._window.append(Replay(lambda: self._train_on(as_it_is(kept), *index), self._optimizer))
            return self._window[-1]

        _record_next_training_step(self._strategy, begin)

    def forget(self) -> None:
        """The batch is finished: one or more steps have been taken, or the window continues."""
        if self._stepped:
            self._window, self._stepped = [], False

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        losses: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run all passes and the step; in manual optimisation without a closure, the step after blocks.

        `losses` as in `flatmin.AMP.step`: those at θ and in the last block.
        """
        if kwargs:
            raise TypeError(f"step() under FlatMinima takes a closure, or losses=, got {', '.join(kwargs)}")
        if losses is not None:
            check_losses(closure, losses)
        if closure is None and self._optimizer.only_makes_state():  # a sharded checkpoint is being loaded
            return self._optimizer.step()
        self._on_before_step()
        if self._stepped and self._window:  # the module steps again with this batch
            self._window[-1].record_random_state()
        self._stepped = True
        if closure is not None and not self._module.automatic_optimization:
            self._window = [Replay(closure, self._optimizer)]
        if closure is not None and evaluates_closure(self._optimizer.base):  # LBFGS, which ε = 0 leaves alone
            plugin = self._strategy.precision_plugin
            result = self._optimizer.step(partial(plugin._wrap_closure, self._module, self, closure))
        else:
            result = None if closure is None else self._run_clean(closure)
            if self._window and not self._module.automatic_optimization:
                self._window[0].clean_loss = detached_loss(result)
            if self._run_perturbed(self._window):
                self._finish(losses)
        if not self._module.automatic_optimization:
            self._window = []
        self._on_after_step()
        return result

    def _run_clean(self, closure: Callable[[], Any]) -> Any:
        one_each = not getattr(self._optimizer, "sync_perturbation", True)  # one Δ per rank, from its own gradient
        with self._in_sync(not self._optimizer.perturbs or not one_each):
            return closure()

    def _run_perturbed(self, window: list[Replay]) -> bool:
        """N blocks, each over the whole window; returns whether there is a gradient to step with."""
        optimizer = self._optimizer
        if not window and not self._module.automatic_optimization:  # it ran its own blocks
            return True
        losses = [replay.clean_loss for replay in window]
        if not optimizer.perturbs:
            note_losses(optimizer, window, losses)
            return optimizer.has_gradients()
        if not window or not optimizer.has_gradients():  # without backward passes, gradients are those of another step
            return False
        try:
            for _ in range(optimizer.inner_iter):
                drawn = RandomState(optimizer)
                with optimizer.perturbed(scaler=self._scaler), drawn, self._without_side_effects():
                    for place, replay in enumerate(window):
                        with self._in_sync(replay is window[-1]):
                            losses[place] = detached_loss(replay())
                    if not optimizer.has_gradients():
                        raise _NoLossError
        except _NoLossError:  # training_step returned None: then there is no step, as in plain training
            return False
        note_losses(optimizer, window, losses)
        return True

    def _finish(self, losses: tuple[Tensor, Tensor] | None) -> None:
        """The rest of the step: what Lightning's MixedPrecision does, or Precision without a scaler."""
        scaler = self._scaler
        if scaler is not None and not self._step_supports_amp_scaling:
            scaler.unscale_(self._optimizer)
        self._strategy.precision_plugin._after_closure(self._module, self)  # on_before_optimizer_step, clipping
        self._optimizer.step(scaler=scaler, losses=losses)
        if scaler is not None:
            scaler.update()

    def _train_on(self, *arguments: Any) -> Tensor | None:
        """`training_step` and backward of one micro-batch, as in Lightning's closure, without the hooks; its loss."""
        trainer = self._module.trainer
        output = self._strategy.training_step(*arguments)
        loss = output["loss"] if isinstance(output, Mapping) else output  # anything else raised in the clean pass
        if loss is not None:
            share = loss / trainer.accumulate_grad_batches
            scaled = share if self._scaler is None else self._scaler.scale(share)
            self._strategy.precision_plugin.backward(scaled, self._module, self)
        elif trainer.world_size > 1:
            raise RuntimeError(
                "training_step returned None in a perturbed pass, but the other ranks wait for its gradient; return "
                "the loss: a step whose gradient is not finite is skipped automatically"
            )
        return None if loss is None else loss.detach()

    @contextmanager
    def _without_side_effects(self) -> Iterator[None]:
        """Nothing logged or counted inside remains, and buffers do not change under RMP (AMP restores them itself)."""
        model = None if self._optimizer.starts_clean else self._optimizer.model
        buffers = None if model is None else Snapshot(model)
        metrics = [(module, vars(module).copy()) for module in self._module.modules() if isinstance(module, Metric)]
        if buffers is not None:
            buffers.take_buffers()
        for metric, _ in metrics:  # they add in place, so give them copies
            for name, value in metric.metric_state.items():
                setattr(metric, name, value.clone() if isinstance(value, Tensor) else list(value))
        self._module.log = _log_nothing  # type: ignore[method-assign]
        self.replaying = True
        try:
            yield
        finally:
            self.replaying = False
            del self._module.log  # uncovers the class's own
            for metric, before in metrics:
                vars(metric).clear()
                vars(metric).update(before)
            if buffers is not None:
                buffers.put_back_buffers()

    def _in_sync(self, wanted: bool) -> AbstractContextManager[Any]:
        """Ranks exchange gradients once, with the last micro-batch of a pass."""
        if wanted or not isinstance(self._strategy, ParallelStrategy):
            return nullcontext()
        out_of_sync: AbstractContextManager[Any] = self._strategy.block_backward_sync()
        return out_of_sync

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    @property
    def _scaler(self) -> GradScaler | None:
        return getattr(self._strategy.precision_plugin, "scaler", None)


class _NoLossError(Exception):
    """No micro-batch of a perturbed pass had a loss."""


def _record_next_training_step(strategy: Any, begin: Callable[[], Replay]) -> None:
    """Replaces the strategy's `training_step` for one call: Lightning has no hook that is called right before it."""
    vars(strategy).pop("training_step", None)  # of a batch whose epoch ended before it ran
    training_step = strategy.training_step

    def first(*args: Any, **kwargs: Any) -> Any:
        vars(strategy).pop("training_step")
        replay = begin()
        output = training_step(*args, **kwargs)
        replay.clean_loss = detached_loss(output)
        return output

    strategy.training_step = first


def _log_nothing(*args: object, **kwargs: object) -> None:
    """In place of `LightningModule.log`."""
