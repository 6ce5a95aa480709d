"""AMPTrainer before trainers that do more than a pass in a step, as TRL's do.

They generate what they train on, count steps and tokens, and log metrics of their own. A perturbed pass trains on the
inputs of the clean pass, and leaves nothing in their logs.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

import flatmin  # noqa: E402
from flatmin.integrations.transformers import AMPTrainer  # noqa: E402
from tests.integrations.trainers.small_transformer import (  # noqa: E402
    LENGTH,
    WORDS,
    arguments,
    sentences,
    small_gpt,
    weights,
)
from tests.support.cases import same  # noqa: E402

Trainer: Any = transformers.Trainer


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings in one place for all of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(kind: Any, folder: Path, *, epsilon: float | None = 0.1, **settings: Any) -> Any:
    """A trainer of this kind that has trained; with ε = None it is used without AMP."""
    own = {key: settings.pop(key) for key in ("inner_iter", "method") if key in settings}
    args = arguments(folder, **{"max_steps": 3, **settings})
    rows: Any = sentences(20)
    if epsilon is None:
        trainer = kind(model=small_gpt(), args=args, train_dataset=rows)
    else:
        mixed = kind if issubclass(kind, AMPTrainer) else type("Mixed", (AMPTrainer, kind), {})
        trainer = mixed(model=small_gpt(), args=args, train_dataset=rows, epsilon=epsilon, **own)
    trainer.seen = Seen()
    torch.manual_seed(0)
    trainer.train()
    return trainer


class Seen:
    """What the losses of a training were given; an object, so that a trainer's bookkeeping does not reach it."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.random: list[Tensor] = []
        self.replaying: list[bool] = []
        self.generations = 0

    def note(self, trainer: Any, inputs: dict[str, Tensor]) -> None:
        self.inputs.append(inputs["input_ids"].clone())
        self.random.append(torch.get_rng_state())
        self.replaying.append(getattr(trainer, "replaying", False))


def completions(trainer: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random ones, which depend on the weights too."""
    trainer.seen.generations += 1
    shift = int(trainer.model.transformer.wte.weight.detach().sum() * 1e4)
    words = (torch.randint(0, WORDS, (len(inputs["input_ids"]), LENGTH)) + shift) % WORDS
    return {"input_ids": words, "labels": words.clone()}


class Noting(Trainer):  # type: ignore[misc]
    seen: Seen

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        self.seen.note(self, inputs)
        return super().compute_loss(model, inputs, *rest, **named)


class Buffering(Noting):
    """As GRPO and RLOO: one generation serves a window, and the trainer counts micro-batches to find its part."""

    _step = 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._step += 1
        return loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Any:
        inputs = super()._prepare_inputs(inputs)
        parts = self.args.gradient_accumulation_steps
        if self._step % parts == 0:
            self._buffered = [completions(self, inputs) for _ in range(parts)]
        return self._buffered[self._step % parts]


class Replacing(Noting):
    """As GKD: training_step itself generates, in place of the inputs that it was given."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs.update(completions(self, inputs))
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss


class Below(AMPTrainer, Noting):
    """A subclass of AMPTrainer may generate too."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Any:
        return completions(self, super()._prepare_inputs(inputs))


@pytest.mark.parametrize("kind", [Buffering, Replacing, Below])
@pytest.mark.parametrize(("accumulation", "inner_iter"), [(1, 1), (2, 1), (2, 2)])
def test_the_perturbed_pass_trains_on_what_was_generated_for_the_clean_one(
    tmp_path: Path, kind: Any, accumulation: int, inner_iter: int
) -> None:
    """Generated once, and with the dropout masks of the clean pass, though generation drew random numbers before it."""
    trainer = trained(kind, tmp_path, inner_iter=inner_iter, gradient_accumulation_steps=accumulation)
    seen, passes = trainer.seen, 1 + inner_iter
    assert seen.generations == 3 * accumulation
    assert len(seen.inputs) == 3 * accumulation * passes
    for start in range(0, len(seen.inputs), accumulation * passes):
        clean = slice(start, start + accumulation)
        for number in range(1, passes):
            again = slice(start + number * accumulation, start + (number + 1) * accumulation)
            assert same(seen.inputs[again], seen.inputs[clean])
            assert same(seen.random[again], seen.random[clean])
    assert not torch.equal(seen.inputs[0], seen.inputs[-1])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainers_own_step_counter_counts_micro_batches(tmp_path: Path, accumulation: int) -> None:
    plain = trained(Buffering, tmp_path, epsilon=None, gradient_accumulation_steps=accumulation)
    trainer = trained(Buffering, tmp_path, gradient_accumulation_steps=accumulation)
    assert trainer._step == plain._step == 3 * accumulation
    assert trainer.seen.generations == plain.seen.generations
    assert same(trainer.seen.inputs[:accumulation], plain.seen.inputs[:accumulation])


# ---- metrics


class Counting(Noting):
    """As SFT and DPO: metrics are stored in the loss, and logged with the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._total_tokens = 0

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *rest, **named)
        self._total_tokens += inputs["input_ids"].numel()
        self.state.num_input_tokens_seen += inputs["input_ids"].numel()
        self._metrics["train"]["weight"].append(float(model.transformer.wte.weight.detach().sum()))  # type: ignore[union-attr, operator, arg-type]
        self._metrics["train"]["num_tokens"] = [self._total_tokens]
        self.log({"in_the_loss": 1.0})
        return loss

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        if "loss" in logs:
            logs.update({name: sum(values) / len(values) for name, values in self._metrics["train"].items()})
            self._metrics["train"].clear()
        super().log(logs, *rest)


def logged(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


@pytest.mark.parametrize("method", [{}, {"inner_iter": 2}, {"method": flatmin.RMP}])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_metrics_are_those_of_the_clean_passes(tmp_path: Path, accumulation: int, method: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "include_num_input_tokens_seen": "all"}
    plain = trained(Counting, tmp_path, epsilon=None, **settings)
    trainer = trained(Counting, tmp_path, **method, **settings)
    assert logged(trainer, "num_tokens") == logged(plain, "num_tokens")
    assert logged(trainer, "weight")[0] == logged(plain, "weight")[0]  # at θ, where both begin
    assert logged(trainer, "in_the_loss") == [1.0] * 3 * accumulation
    assert trainer.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
    assert trainer._total_tokens == plain._total_tokens


def test_a_loss_can_ask_whether_it_is_replayed(tmp_path: Path) -> None:
    trainer = trained(Noting, tmp_path, gradient_accumulation_steps=2, inner_iter=2, max_steps=2)
    assert trainer.seen.replaying == ([False] * 2 + [True] * 4) * 2
    assert not trainer.replaying


def test_nothing_of_a_replay_remains_after_an_exception(tmp_path: Path) -> None:
    class Failing(Counting):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.seen.replaying[-1]:
                raise KeyboardInterrupt
            return loss

    failed: list[Any] = []

    class Kept(AMPTrainer, Failing):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            failed.append(self)
            return super().train(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        trained(Kept, tmp_path)
    (trainer,) = failed
    assert not trainer.replaying
    assert trainer._total_tokens == 2 * LENGTH
    assert not {"log", "compute_loss", "_prepare_inputs"} & vars(trainer).keys()
    assert "backward" not in vars(trainer.accelerator)


# ---- what cannot be replayed


class WithoutTheTrainers(Noting):
    """As online DPO: loss and backward are its own."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Twice(Noting):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        super().training_step(model, inputs, num_items_in_batch)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss


class WithAnotherLoss(Noting):
    """As adversarial training of the embeddings, with a second backward pass."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.accelerator.backward(model(**inputs).loss)
        return loss


@pytest.mark.parametrize(
    ("kind", "calls", "others"), [(WithoutTheTrainers, 0, 1), (Twice, 2, 0), (WithAnotherLoss, 1, 1)]
)
def test_a_training_step_that_cannot_be_replayed_is_told(tmp_path: Path, kind: Any, calls: int, others: int) -> None:
    message = (
        rf"must call it once and leave the backward pass to it, got {kind.__name__}\.training_step with {calls} such "
        rf"calls and {others} other backward passes; let it make the inputs in _prepare_inputs"
    )
    with pytest.raises(TypeError, match=message):
        trained(kind, tmp_path)
    plain = trained(kind, tmp_path, epsilon=None)
    assert same(weights(trained(kind, tmp_path, epsilon=0.0).model), weights(plain.model))  # where nothing is replayed


def test_a_loss_may_run_backward_and_call_itself(tmp_path: Path) -> None:
    """All of it is replayed."""

    class InTwoParts(Noting):
        def compute_loss(self, model: nn.Module, inputs: Any, *rest: Any, part: bool = False, **named: Any) -> Any:
            if part:
                return super().compute_loss(model, inputs, *rest, **named)
            self.accelerator.backward(self.compute_loss(model, inputs, *rest, part=True, **named))
            return self.compute_loss(model, inputs, *rest, part=True, **named)

    assert len(trained(InTwoParts, tmp_path).seen.inputs) == 3 * 2 * 2


def test_a_loss_that_was_set_on_the_trainer_is_replayed_and_stays(tmp_path: Path) -> None:
    trainer: Any = AMPTrainer(small_gpt(), arguments(tmp_path, max_steps=2), train_dataset=sentences(8), epsilon=0.1)
    passes = []

    def compute_loss(model: nn.Module, inputs: Any, **named: Any) -> Any:
        passes.append(trainer.replaying)
        return Trainer.compute_loss(trainer, model, inputs, **named)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert passes == [False, True] * 2
    assert trainer.compute_loss is compute_loss
