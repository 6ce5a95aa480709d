"""Hugging Face's Trainer: a step's micro-batches are replayed at θ + Δ before the Trainer clips and steps.

The Trainer runs `training_step` for each micro-batch of an accumulation window, then clips, steps, schedules and logs.
`AMPTrainer` wraps the optimizer that the Trainer creates, and passes the micro-batches to a `Window`; the rest is left
to the Trainer. The loss it reports is that of the clean passes, the gradient norm that of the step, at θ + Δ.
"""

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from flatmin.integrations.accelerate import Window, behind_accelerate, check_strategy, unwrap_optimizer
from flatmin.integrations.automatic_radius import check_epsilon, is_auto, matched_radius, unadjusted, validation_loss
from flatmin.integrations.recorded_step import RecordedStep
from flatmin.integrations.scheduled_radius import ScheduledRadius
from flatmin.optim import AMP, RMP
from flatmin.optim.param_groups import groups
from flatmin.optim.perturbed import PerturbedOptimizer
from flatmin.optim.radius import Growth, MatchedRadius, RadiusSchedule
from flatmin.optim.telemetry.step_log import StepLog

MAX_LOGGED_STEPS = 10_000  # whose numbers are kept for the Trainer's next log, if it ever logs
MATCHED = "matched_radius"  # in a checkpoint: what an automatic ε has seen since the last evaluation


class AMPTrainer(Trainer):
    """`transformers.Trainer` with Adversarial Model Perturbation.

        trainer = AMPTrainer(model=model, args=args, train_dataset=data, epsilon=0.1)

    epsilon     and the other settings of `method`: inner_lr, inner_iter, ball, norm …; "auto" adjusts ε after every
                evaluation
    monitor     for "auto": the metric of the evaluation that is the mean loss
    method      flatmin.AMP, or flatmin.RMP (where the clean passes run too, only for the loss)
    perturb     if given, perturb(name, parameter) selects the parameters to perturb; the others are trained as usual
    start, growth, every    ε during training, as in `flatmin.RadiusScheduler`; start=0.5 starts halfway
    log_perturbation        log what steps measure with the Trainer's loss, as `flatmin.StepLog` does: amp/delta_norm …

    An optimizer in `optimizers=` is wrapped, or used as it is if it already is a flatmin.AMP or flatmin.RMP; then it
    keeps its own settings (an ε that is "auto" is adjusted there too). Listed before another subclass of Trainer, it
    works as a mixin:

        class AMPSeq2SeqTrainer(AMPTrainer, Seq2SeqTrainer): ...

    `replaying` is true in a perturbed pass, for a `compute_loss` that keeps statistics outside the trainer.
    """

    hp_space: Any  # of a search: what a trial draws
    _step_log: StepLog | None
    optimizer: Any  # None, then the Trainer's or the user's, wrapped, then as Accelerate prepared it

    def __init__(
        self,
        *args: Any,
        epsilon: float | Literal["auto"] | None = None,
        method: type[AMP] | type[RMP] = AMP,
        monitor: str = "eval_loss",
        perturb: Callable[[str, nn.Parameter], bool] | None = None,
        start: float = 0.0,
        growth: Growth = "constant",
        every: int = 1,
        log_perturbation: bool = False,
        **kwargs: Any,
    ) -> None:
        self._log_perturbation, self._step_log = log_perturbation, None
        self._schedule = RadiusSchedule(start=start, growth=growth, every=every)
        settings = {name: kwargs.pop(name) for name in _settings_of(method) & kwargs.keys()}
        self._is_auto, self._monitor = is_auto(epsilon), monitor
        check_epsilon(epsilon, method, self._schedule)
        if epsilon is not None:
            settings["epsilon"] = epsilon
        named = signature(super().__init__).bind_partial(*args, **kwargs).arguments
        given = (named.get("optimizers") or (None, None))[0]
        self._check_settings(given, settings, perturb)
        if matched_radius(given) is not None:
            check_epsilon("auto", method, self._schedule)
        if not isinstance(given, PerturbedOptimizer):  # wrong values raise now, not when training begins
            method(SGD([nn.Parameter(torch.zeros(1))], lr=0.0), **settings)
        self._method, self._settings, self._perturb = method, settings, perturb
        self._radius: ScheduledRadius | None = None  # if there is a schedule
        self._window: Window | None = None
        self.replaying = False
        super().__init__(*args, **kwargs)
        check_strategy(self.accelerator)
        if self._schedule.moves:
            self.add_callback(_AfterStep(self._end_step))

    @staticmethod
    def _check_settings(given: Optimizer | None, settings: dict[str, Any], perturb: object) -> None:
        if isinstance(given, PerturbedOptimizer) and settings:
            raise ValueError(
                f"a {type(given).__name__} in optimizers= has its own settings, got {', '.join(sorted(settings))} "
                "beside it; leave them out, or give the optimizer inside it, `optimizer.base`"
            )
        if not isinstance(given, PerturbedOptimizer) and "epsilon" not in settings:
            raise TypeError("AMPTrainer needs epsilon, the radius of the ball; write AMPTrainer(..., epsilon=0.1)")
        if given is not None and perturb is not None:
            raise ValueError(
                "perturb splits the groups of the optimizer that the Trainer creates, got one in optimizers=; "
                "create that one with flatmin.groups(model, perturb=perturb)"
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """The Trainer's optimizer, or the user's, wrapped. Each `train()` calls this first."""
        made = self.optimizer is None
        optimizer: Optimizer = super().create_optimizer(*args, **kwargs)
        self._window = None
        if self._radius is not None:
            self._radius.restore()  # auto_find_batch_size starts over without leaving train()
        if getattr(optimizer, "_is_accelerate_prepared", False) or isinstance(optimizer, PerturbedOptimizer):
            self._radius = self._scheduled(optimizer)
            return optimizer  # of an earlier train(), or the user's
        if made and self._perturb is not None:
            optimizer.param_groups = groups(self.model, perturb=self._perturb, among=optimizer.param_groups)
        self.optimizer = wrapped = self._method(optimizer, model=self.model, **self._settings)
        self._radius = self._scheduled(wrapped)
        return wrapped

    def _scheduled(self, optimizer: Optimizer) -> ScheduledRadius | None:
        return ScheduledRadius(unwrap_optimizer(optimizer), self._schedule) if self._schedule.moves else None

    @property
    def _matched(self) -> MatchedRadius | None:
        """What adjusts ε, if it is automatic."""
        return matched_radius(behind_accelerate(self.optimizer))

    def _check_wrapped(self) -> None:
        try:
            unwrap_optimizer(self.optimizer)
        except TypeError as error:
            raise TypeError(
                f"create_optimizer of {type(self).__name__} left its optimizer unwrapped; let it set self.optimizer, "
                "and end with `return super().create_optimizer()`"
            ) from error

    def _hp_search_setup(self, trial: Any) -> None:
        """Apply a trial's settings of the perturbation; the Trainer knows only its own arguments."""
        if self.hp_search_backend is None or trial is None:
            super()._hp_search_setup(trial)
            return
        space = self.hp_space
        drawn = dict(space(trial) if self.hp_search_backend == HPSearchBackend.OPTUNA else trial)
        ours = {name: drawn.pop(name) for name in _settings_of(self._method) & drawn.keys()}
        if self._is_auto and "epsilon" in ours:
            raise ValueError('epsilon="auto" is not searched for; leave epsilon out of hp_space, or give it a number')
        self._settings = {**self._settings, **ours}
        try:
            self.hp_space = lambda _: drawn
            super()._hp_search_setup(trial if self.hp_search_backend == HPSearchBackend.OPTUNA else drawn)
        finally:
            self.hp_space, self._trial = space, trial

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's own; with a training loss, also what the steps since the last one measured."""
        if self._step_log is not None and "loss" in logs:
            logs = {**logs, **{f"amp/{name}": value for name, value in self._step_log.read().items() if name != "lr"}}
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; afterwards the optimizer has its radius again."""
        if self._is_auto and self.args.eval_strategy == "no":
            raise ValueError(
                'epsilon="auto" is matched with the loss of evaluations during the training, but there are none; '
                'write TrainingArguments(eval_strategy="epoch") and an eval_dataset, or give epsilon a number'
            )
        record, calls = self._adjustments()
        try:
            result = super().train(*args, **kwargs)
            present, now = self._adjustments()
            if present is not None and now == (calls if present is record else 0):
                way_out = 'write TrainingArguments(eval_strategy="epoch"), and name the loss: monitor="…"'
                warnings.warn(unadjusted(self._monitor, way_out), RuntimeWarning, stacklevel=2)
            return result
        finally:
            if self._radius is not None:
                self._radius.restore()
            if self._step_log is not None:
                self._step_log.close()
                self._step_log = None

    def _adjustments(self) -> tuple[object, int]:
        """The record of the present optimizer (one with `model_init` is another in each training), and its calls."""
        matched = self._matched
        return (None, 0) if matched is None else (matched.optimizer.matching, matched.calls)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The Trainer's own evaluations during a training, of all data sets; those of callbacks do not come here."""
        metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        if (matched := self._matched) is not None and (self._is_auto or self._monitor in metrics):
            matched.step(validation_loss(metrics, self._monitor))
        return metrics

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with nullcontext() if self._radius is None else self._radius.completed():
            super()._save_optimizer_and_scheduler(output_dir)
        if (matched := self._matched) is not None:
            file = _matched_file(output_dir, self.args.process_index)
            file.parent.mkdir(parents=True, exist_ok=True)  # the first process may not have come to it yet
            file.write_text(json.dumps(matched.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if (matched := self._matched) is None or checkpoint is None:
            return
        files = [_matched_file(checkpoint, index) for index in (self.args.process_index, 0)]  # 0: of fewer processes
        if file := next((file for file in files if file.is_file()), None):
            matched.load_state_dict(json.loads(file.read_text()))

    def _end_step(self) -> None:
        if self._radius is not None:
            self._radius.end_step()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """A micro-batch at θ; after the last one of a window, loss and backward of all of them at θ + Δ."""
        if self._window is None:
            self._check_wrapped()
            self._window = Window(self.accelerator, model, self.optimizer)
        if self._log_perturbation and self._step_log is None:
            self._step_log = StepLog(self._window.optimizer, every=MAX_LOGGED_STEPS)
        if self._radius is not None:
            self._radius.begin_step(self.state.global_step, self.state.max_steps)
        recorded = RecordedStep(self, super().training_step, before_loss=self._window.record_random_state)
        # each loss is divided by the number of micro-batches, or by that of all tokens of the window
        self._window.run(partial(recorded.run, model, inputs, num_items_in_batch), again=recorded.replay, shares=True)
        return recorded.result


class _AfterStep(TrainerCallback):  # type: ignore[misc]
    """Calls a function after each step of the optimizer, before the Trainer logs, evaluates and saves."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._call()


def _matched_file(checkpoint: str, process: int) -> Path:
    """One per process, like the Trainer's random states: each has measured its own part of the data."""
    return Path(checkpoint, f"{MATCHED}_{process}.json" if process else f"{MATCHED}.json")


def _settings_of(method: type[AMP] | type[RMP]) -> set[str]:
    return signature(method).parameters.keys() - {"base", "model"}
