"""One micro-batch of a Hugging Face trainer: all of `training_step` at θ, only loss and backward at θ + Δ.

A trainer's `training_step` may do more than a pass. TRL's count steps, and generate the completions that they train on;
run again, that would be a pass on other completions. What they have in common is that they call the method that they
override, `Trainer.training_step`, which prepares the inputs, computes the loss and runs backward. So

    at θ         training_step as it is; the inputs are recorded when `Trainer.training_step` computes the loss
    at θ + Δ     `Trainer.training_step` with these inputs; what it changes in the trainer's bookkeeping is undone
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from inspect import currentframe, unwrap
from types import CodeType
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from flatmin.integrations.bookkeeping import Bookkeeping


class RecordedStep:
    """`training_step` of `trainer`, run once, and its loss and backward replayed.

    `before_loss` is called when the inputs are prepared: a replay starts there.
    """

    def __init__(
        self, trainer: Any, training_step: Callable[..., Tensor], *, before_loss: Callable[[], object]
    ) -> None:
        self._trainer = trainer
        self._training_step = training_step
        self._before_loss = before_loss
        self._losses: list[tuple[nn.Module, Any, Any]] = []  # model, inputs, num_items_in_batch
        self._other_backwards = 0
        self._clean_loss: Tensor | None = None
        self.result: Tensor  # of `training_step` at θ, which need not be the loss

    def run(self, *arguments: Any) -> Tensor | None:
        """All of `training_step`, at θ; returns the loss that its backward pass started from."""
        trainer = self._trainer
        compute_loss, backward = trainer.compute_loss, trainer.accelerator.backward

        def recorded_loss(model: nn.Module, inputs: Any, *rest: Any, **named: Any) -> Any:
            if _called_within(Trainer.training_step, until=recorded_loss.__code__):  # not by a loss that calls itself
                self._losses.append((model, copy(inputs), named.get("num_items_in_batch")))  # some losses pop entries
                self._before_loss()
            return compute_loss(model, inputs, *rest, **named)

        def counted_backward(loss: Tensor, *rest: Any, **named: Any) -> None:
            if _called_within(Trainer.training_step, until=RecordedStep.run.__code__):
                self._clean_loss = loss.detach()
            else:
                self._other_backwards += 1
            backward(loss, *rest, **named)

        with (
            _replaced(trainer, "compute_loss", recorded_loss),
            _replaced(trainer.accelerator, "backward", counted_backward),
        ):
            self.result = self._training_step(*arguments)
        return self._clean_loss

    def replay(self) -> Tensor:
        """Loss and backward at θ + Δ; returns the loss."""
        self._check()
        trainer = self._trainer
        ((model, inputs, num_items_in_batch),) = self._losses
        before = (
            Bookkeeping(trainer, shallow=("train_dataset", "eval_dataset")),
            Bookkeeping(trainer.state, shallow=("log_history",)),
        )
        try:
            trainer.replaying = True
            trainer.log = _log_nothing
            trainer._prepare_inputs = _as_they_are
            with getattr(trainer, "maybe_activation_offload_context", nullcontext()):  # TRL's, around training_step
                loss: Tensor = Trainer.training_step(trainer, model, copy(inputs), num_items_in_batch)
                return loss
        finally:
            for bookkeeping in before:  # including the three attributes above
                bookkeeping.put_back()

    def _check(self) -> None:
        if len(self._losses) != 1 or self._other_backwards:
            name = getattr(self._training_step, "__qualname__", self._training_step)
            raise TypeError(
                "AMPTrainer replays Trainer.training_step at θ + Δ, so a trainer's own training_step must call it once "
                f"and leave the backward pass to it, got {name} with {len(self._losses)} such calls and "
                f"{self._other_backwards} other backward passes; let it make the inputs in _prepare_inputs and the "
                "loss in compute_loss, and call super().training_step, or write your own loop with "
                "flatmin.integrations.accelerate.Window"
            )


def _called_within(function: Callable[..., Any], *, until: CodeType) -> bool:
    """Is `function` among the callers of this function's caller, up to the one with the code `until`?"""
    wanted = unwrap(function).__code__
    frame = currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    while frame is not None and frame.f_code is not until:
        if frame.f_code is wanted:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = vars(owner).get(name)  # None: the class's own
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _log_nothing(*_: object, **__: object) -> None:
    """Replaces `Trainer.log`."""


def _as_they_are(inputs: Any) -> Any:
    """Replaces `Trainer._prepare_inputs`: they are already prepared."""
    return inputs
