"""AMP and RMP in Lightning's Trainer, with one callback:

    Trainer(callbacks=[FlatMinima(epsilon=0.1)])

A step takes N + 1 passes, and Lightning knows only one. If it called the optimizer itself, it would log and count the
perturbed passes too, replay only the last micro-batch of an accumulation, clip the gradient that Δ comes from, and give
a GradScaler an optimizer that had no passes. So the step is taken in the one place that all loops go through: the
`LightningOptimizer`, replaced by a subclass in `trainer.optimizers`. No loop, plugin or strategy is replaced, and of
the module only `log`, during a perturbed pass. (Two methods are, for a while: the strategy's `training_step` until it
is called, to see the random numbers that it starts with; and for Lightning's tuners, which remove all callbacks while
they search, `fit_loop.run` brings this one back.) A step is then

    the clean pass                   Lightning's own, of every micro-batch, with all its hooks and logs
    N perturbed passes               the same micro-batches again: only forward and backward, invisible to the rest
    unscaling, hooks, clipping, step in Lightning's order, once, with the gradient at θ + Δ

Lightning, its callbacks and its loggers see θ, once per step. RMP needs no clean pass, but gets one for their sake.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torchmetrics import Metric  # Lightning depends on it

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ModuleNotFoundError:  # the same package under its older name
    import pytorch_lightning as pl  # type: ignore[no-redef]
    from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder  # type: ignore[assignment]
    from pytorch_lightning.core.optimizer import LightningOptimizer  # type: ignore[assignment]
    from pytorch_lightning.plugins.precision import MixedPrecision, Precision  # type: ignore[assignment]
    from pytorch_lightning.strategies import (  # type: ignore[assignment]
        DDPStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
    )
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from flatmin.ball import Ball, Norm
from flatmin.core.messages import describe
from flatmin.core.model_state import Snapshot
from flatmin.core.tensors import plain
from flatmin.integrations.automatic_radius import (
    check_epsilon,
    check_loss_on_ranks,
    is_auto,
    matched_radius,
    unadjusted,
    validation_loss,
)
from flatmin.integrations.replay import RandomState, Replay, as_it_is, note_losses
from flatmin.integrations.scheduled_radius import ScheduledRadius
from flatmin.optim import AMP, RMP, perturbed
from flatmin.optim.call_checks import check_losses
from flatmin.optim.radius import Growth, MatchedRadius, RadiusSchedule, RadiusScheduler
from flatmin.optim.rmp import Noise
from flatmin.optim.telemetry.step_info import detached_loss
from flatmin.optim.telemetry.step_log import StepLog
from flatmin.optim.wrapper import evaluates_closure, whole_number

__all__ = ["FlatMinima", "PerturbedOptimizer"]

MATCHED = "flatmin_matched_radius"  # in a checkpoint: what an automatic ε has seen since the last validation


class FlatMinima(pl.Callback):
    """Trains a LightningModule into a flat minimum: the optimizers that it configures are wrapped in AMP.

        Trainer(callbacks=[FlatMinima(epsilon=0.1)])

    epsilon     the radius ε; "auto" to adjust it after every validation; None if `configure_optimizers` returns a
                flatmin optimizer itself (one with epsilon="auto" is adjusted too)
    monitor     for "auto": the name under which `validation_step` logs the mean loss
    method      flatmin.AMP or flatmin.RMP
    inner_lr …  the method's other settings; None means its default; `model` is the trainer's
    start, growth, every    ε during training, as in `flatmin.RadiusScheduler`; start=0.5 starts halfway
    log_every   if given, what steps measure goes to the trainer's loggers, as means over this many steps: the numbers
                of `flatmin.StepLog`

    With several optimizers (in manual optimisation) all are wrapped; without epsilon, only those that are flatmin's.
    """

    def __init__(
        self,
        epsilon: float | Literal["auto"] | None = None,
        *,
        method: type[AMP] | type[RMP] = AMP,
        monitor: str = "val_loss",
        inner_lr: float | None = None,
        inner_iter: int | None = None,
        ball: Ball | None = None,
        norm: Norm | None = None,
        sync_perturbation: bool | None = None,
        noise: Noise | None = None,
        generator: torch.Generator | None = None,
        start: float = 0.0,
        growth: Growth = "constant",
        every: int = 1,
        log_every: int | None = None,
        **settings: Any,
    ) -> None:
        self.log_every = None if log_every is None else whole_number("log_every", log_every, least=1)
        self._logs: list[StepLog] = []
        self._radii: list[ScheduledRadius] = []  # one per optimizer, if there is a schedule
        self._matched: list[MatchedRadius] = []  # one per optimizer, if ε is automatic
        self._calls_before = 0  # of what adjusts ε, when the training began
        self._loss_before: Any = None  # the monitored one, when the validation began
        self._matched_states: list[dict[str, Any]] = []  # of a checkpoint, until there are optimizers
        self.monitor = monitor
        self.schedule = RadiusSchedule(start=start, growth=growth, every=every)
        named: dict[str, Any] = {"inner_lr": inner_lr, "inner_iter": inner_iter, "ball": ball, "norm": norm}
        named |= {
            "sync_perturbation": sync_perturbation,
            "noise": noise,
            "generator": generator,
        }  # LightningCLI sees them
        settings |= {name: value for name, value in named.items() if value is not None}
        if not (isinstance(method, type) and issubclass(method, perturbed.PerturbedOptimizer)):
            raise TypeError(f"method must be flatmin.AMP or flatmin.RMP, got {describe(method)}")
        known = [name for name in signature(method).parameters if name not in ("base", "epsilon")]
        for name in settings.keys() - set(known):
            raise TypeError(f"{method.__name__} has no setting {name!r}; choose from epsilon, {', '.join(known)}")
        if epsilon is None and settings:
            raise TypeError(
                f"FlatMinima without epsilon takes no settings, got {', '.join(settings)}; add epsilon=0.1, or give "
                f"them to flatmin.{method.__name__} in configure_optimizers"
            )
        if epsilon is None and self.schedule.moves:
            raise TypeError(
                "FlatMinima without epsilon leaves the radius as it is, got start, growth or every; add epsilon=0.1, "
                "or return a flatmin.RadiusScheduler from configure_optimizers"
            )
        if epsilon is not None:  # wrong values raise now, not when training begins
            check_epsilon(epsilon, method, self.schedule)
            example = SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
            make: Any = method
            make(example, epsilon=epsilon, **{**settings, "model": None})
        self.epsilon, self.method, self.settings = epsilon, method, settings

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._matched = []
        self._matched_states = []  # of a checkpoint that was loaded for another run, such as trainer.test(ckpt_path=…)
        if _has_tuner(trainer):  # it searches in its on_fit_start: ours comes first, and wraps the optimizers
            others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
            trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _check_trainer(trainer, pl_module)
        _check_schedulers(trainer, pl_module)
        if (count := sum(isinstance(callback, FlatMinima) for callback in trainer.callbacks)) > 1:  # type: ignore[attr-defined]
            raise ValueError(f"a Trainer takes one FlatMinima, got {count} of them; keep one")
        optimizers = [self._wrapped(optimizer, trainer) for optimizer in trainer.optimizers]
        if not any(isinstance(optimizer, PerturbedOptimizer) for optimizer in optimizers):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ValueError(
                f"FlatMinima without epsilon expects configure_optimizers to return flatmin.AMP(...), got {names}; "
                "write FlatMinima(epsilon=0.1)"
            )
        if self.schedule.moves:  # then all of them are wrapped here
            ours = [optimizer for optimizer in optimizers if isinstance(optimizer, PerturbedOptimizer)]
            self._radii = [ScheduledRadius(optimizer._optimizer, self.schedule) for optimizer in ours]
        self._match(optimizers, pl_module)
        trainer.optimizers = optimizers  # type: ignore[assignment]  # Lightning keeps a LightningOptimizer as it is
        if _has_tuner(trainer):
            trainer.fit_loop.run = partial(self._run_with_callback, trainer, trainer.fit_loop.run)  # type: ignore[method-assign]

    def _match(self, optimizers: list[Any], module: pl.LightningModule) -> None:
        if module.automatic_optimization:
            found = [matched_radius(getattr(optimizer, "_optimizer", None)) for optimizer in optimizers]
            self._matched = [radius for radius in found if radius is not None]
            self._calls_before = sum(radius.calls for radius in self._matched)
            self._load_matched()
        elif is_auto(self.epsilon):
            raise ValueError(
                'epsilon="auto" takes the losses of the passes that the trainer runs, but this module optimises '
                'manually; return flatmin.AMP(optimizer, epsilon="auto") from configure_optimizers, and call '
                "self.optimizers().radius.step(held_out_loss) in the module"
            )

    def _load_matched(self) -> None:
        for matched, state in zip(self._matched, self._matched_states, strict=False):
            matched.load_state_dict(state)
        self._matched_states = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._loss_before = trainer.callback_metrics.get(self.monitor)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._matched or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics  # with those of earlier validations, if this one did not log them
        is_new = self.monitor in metrics and metrics[self.monitor] is not self._loss_before
        check_loss_on_ranks(self._matched[0], self.monitor, is_there=is_new)
        if is_new or (is_auto(self.epsilon) and self.monitor not in metrics):
            loss = validation_loss(metrics, self.monitor)
            for matched in self._matched:
                matched.step(loss)

    # not a state_dict(): with one, Lightning refuses a second callback in its own words

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._matched:
            checkpoint[MATCHED] = [matched.state_dict() for matched in self._matched]
        for optimizer in trainer.optimizers:  # a signal's handler may save within a perturbed pass
            if isinstance(optimizer, PerturbedOptimizer):
                _put_theta(checkpoint.get("state_dict", {}), optimizer._optimizer.moved())
        for radius, state in zip(self._radii, checkpoint.get("optimizer_states", []), strict=False):
            radius.complete(state.get("param_groups", []))  # there are none on ranks that save nothing

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._matched_states = checkpoint.get(MATCHED, [])
        if self._matched:  # a tuner's search has ended; or a strategy that loads only now
            self._load_matched()

    def _open_logs(self, trainer: pl.Trainer) -> None:
        self._close_logs()  # of a tuner's trial that was aborted
        if self.log_every is None:
            return
        ours = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, PerturbedOptimizer)]
        for number, optimizer in enumerate(ours):
            prefix = "amp/" if len(ours) == 1 else f"amp-{number}/"
            log = StepLog(optimizer._optimizer, *trainer.loggers, every=self.log_every, prefix=prefix)
            log.steps = trainer.global_step // len(trainer.optimizers)  # of a resumed run; it counts those of all
            self._logs.append(log)

    def _close_logs(self) -> None:
        while self._logs:
            self._logs.pop().close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._matched and sum(radius.calls for radius in self._matched) == self._calls_before:
            way_out = "log it in validation_step, and validate more often (check_val_every_n_epoch, val_check_interval)"
            warnings.warn(unadjusted(self.monitor, way_out), RuntimeWarning, stacklevel=2)
        self._end_training()

    def _end_training(self) -> None:
        self._close_logs()
        self._restore_radii()

    def _restore_radii(self) -> None:
        for radius in self._radii:
            radius.restore()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore_radii()  # a hook that skips the rest of an epoch leaves its batch without an end

    def _run_with_callback(self, trainer: pl.Trainer, run: Callable[[], None]) -> None:
        """The fit loop, also for a tuner, which replaces the trainer's callbacks until it is done."""
        if self not in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.append(self)  # type: ignore[attr-defined]  # at the end: the tuner reads the first one
        run()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _uncover_methods(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_training()
        _uncover_methods(trainer)

    def _wrapped(self, optimizer: Optimizer, trainer: pl.Trainer) -> "Optimizer | PerturbedOptimizer":
        if isinstance(optimizer, LightningOptimizer):  # configure_optimizers may return one
            optimizer = optimizer._optimizer
        if not isinstance(optimizer, perturbed.PerturbedOptimizer):
            if self.epsilon is None:
                return optimizer
            settings = {"model": trainer.strategy.model, **self.settings}
            make: Any = self.method
            return PerturbedOptimizer(make(optimizer, epsilon=self.epsilon, **settings), configured=optimizer)
        if self.epsilon is not None:
            raise ValueError(
                f"FlatMinima(epsilon={self.epsilon}) wraps the optimizers of configure_optimizers, but it already "
                f"returned flatmin.{type(optimizer).__name__}; leave out epsilon here, or the wrapping there"
            )
        if optimizer.model is trainer.lightning_module:
            optimizer.model = trainer.strategy.model
        return PerturbedOptimizer(optimizer, configured=optimizer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open_logs(trainer)
        if is_auto(self.epsilon) and not trainer.enable_validation:
            raise ValueError(
                'epsilon="auto" is matched with the loss on validation data, but this training has none; give the '
                "Trainer a validation loader and the module a validation_step, or give epsilon a number"
            )
        if not self.schedule.moves:
            return
        total = trainer.estimated_stepping_batches
        if not 1 <= total < float("inf"):
            raise ValueError(
                "a radius that starts late or grows needs the length of the run, but this one has no end, or data "
                "without a length; give the Trainer max_steps, or max_epochs and a loader with a length"
            )
        # global_step and max_steps count the steps of all optimizers, the estimate from epochs those of one
        self._total_steps = len(trainer.optimizers) * int(total)
        if trainer.max_steps != -1:
            self._total_steps = min(self._total_steps, trainer.max_steps)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for radius in self._radii:
            radius.begin_step(trainer.global_step, self._total_steps)
        # in the last epoch of weight averaging there are no backward passes: all its batches would be kept for nothing
        if pl_module.automatic_optimization and not getattr(trainer.fit_loop, "_skip_backward", False):
            for optimizer in trainer.optimizers:
                assert isinstance(optimizer, PerturbedOptimizer)
                optimizer.remember(batch, batch_idx)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for radius in self._radii:
            radius.end_step()
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, PerturbedOptimizer):
                optimizer.forget()


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


def _uncover_methods(trainer: pl.Trainer) -> None:
    """The classes' own again, where a callback or a batch replaced them."""
    vars(trainer.fit_loop).pop("run", None)
    vars(trainer.strategy).pop("training_step", None)


def _put_theta(weights: dict[str, Any], moved: Iterable[tuple[Tensor, Tensor]]) -> None:
    """In a checkpoint, in place of what a perturbed pass has moved."""
    at_theta = {plain(now).data_ptr(): kept for now, kept in moved}
    for name, value in weights.items():
        if isinstance(value, Tensor) and (kept := at_theta.get(plain(value).data_ptr())) is not None:
            weights[name] = kept if kept.shape == value.shape else value


def _log_nothing(*args: object, **kwargs: object) -> None:
    """In place of `LightningModule.log`."""


def _has_tuner(trainer: pl.Trainer) -> bool:
    """Will Lightning search for a learning rate or batch size? Its `Tuner` does so with these callbacks as well."""
    tuners = LearningRateFinder, BatchSizeFinder
    return any(isinstance(callback, tuners) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _check_trainer(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            f"FlatMinima is a callback for the Trainer of {pl.__name__}, got that of {type(trainer).__module__}; "
            f"write `import {pl.__name__} as pl`"
        )
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    known = Precision.optimizer_step, MixedPrecision.optimizer_step
    averages = getattr(strategy, "_model_averager", None) is not None  # post-local SGD, in DDP's optimizer_step
    if (
        not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy)
        or averages
        or type(plugin).optimizer_step not in known
    ):
        raise ValueError(
            "FlatMinima works on one device, with DDP that averages gradients or with ModelParallelStrategy, and "
            f"with their precision plugins, got {type(strategy).__name__} with {type(plugin).__name__}; for others "
            "write your own loop with flatmin.AMP"
        )
    if module.automatic_optimization and is_param_in_hook_signature(
        module.training_step, "dataloader_iter", explicit=True
    ):
        raise ValueError(
            "training_step(self, dataloader_iter) takes a new batch each time it is called, but a perturbed pass needs "
            "the same one; write training_step(self, batch, batch_idx)"
        )


def _check_schedulers(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Lightning steps schedulers once per epoch, unless told otherwise: a radius would never get to its start."""
    if not module.automatic_optimization or trainer.fast_dev_run:  # stepped by the module; or not to the end anyway
        return
    per_epoch = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "epoch"]
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs  # -1: without a limit
    for scheduler in per_epoch:
        if isinstance(scheduler, RadiusScheduler) and 0 <= epochs < scheduler.total_steps:
            raise ValueError(
                f"this RadiusScheduler has total_steps={scheduler.total_steps}, but Lightning would step it once per "
                f"epoch, {epochs} times; return it from configure_optimizers as "
                '{"scheduler": scheduler, "interval": "step"}'
            )
