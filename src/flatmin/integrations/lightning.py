"""AMP and RMP in Lightning's Trainer, with one callback:

    Trainer(callbacks=[FlatMinima(epsilon=0.1)])

A step takes N + 1 passes, and Lightning knows only one. If it called the optimizer itself, it would log and count the
perturbed passes too, replay only the last micro-batch of an accumulation, clip the gradient that Δ comes from, and give
a GradScaler an optimizer that had no passes. So the step is taken in the one place that all loops go through: the
`LightningOptimizer`, replaced by a subclass in `trainer.optimizers`. No loop, plugin or strategy is replaced, and of
the module only `log`, during a perturbed pass. (Two methods are, for a while: the strategy's `training_step` until it
is called, to see the random numbers that it starts with; and for Lightning's tuners, which remove all callbacks while
they search, `fit_loop.run` brings this one back.)

Lightning, its callbacks and its loggers see θ, once per step. RMP needs no clean pass, but gets one for their sake.

lightning.py           the callback: wraps the optimizers, schedules and matches ε, saves θ
lightning_step.py      a step: the optimizer that Lightning's loops call
lightning_checks.py    what cannot be done with a Trainer, said before the training begins
lightning_package.py   Lightning's names, from whichever package is installed
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from flatmin.ball import Ball, Norm
from flatmin.core.messages import describe
from flatmin.core.tensors import plain
from flatmin.integrations.automatic_radius import (
    check_epsilon,
    check_loss_on_ranks,
    is_auto,
    matched_radius,
    unadjusted,
    validation_loss,
)
from flatmin.integrations.lightning_checks import check_schedulers, check_trainer
from flatmin.integrations.lightning_package import BatchSizeFinder, LearningRateFinder, LightningOptimizer, pl
from flatmin.integrations.lightning_step import PerturbedOptimizer
from flatmin.integrations.scheduled_radius import ScheduledRadius
from flatmin.optim import AMP, RMP, perturbed
from flatmin.optim.radius import Growth, MatchedRadius, RadiusSchedule
from flatmin.optim.rmp import Noise
from flatmin.optim.telemetry.step_log import StepLog
from flatmin.optim.wrapper import whole_number

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
        check_trainer(trainer, pl_module)
        check_schedulers(trainer, pl_module)
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


def _has_tuner(trainer: pl.Trainer) -> bool:
    """Will Lightning search for a learning rate or batch size? Its `Tuner` does so with these callbacks as well."""
    tuners = LearningRateFinder, BatchSizeFinder
    return any(isinstance(callback, tuners) for callback in trainer.callbacks)  # type: ignore[attr-defined]
