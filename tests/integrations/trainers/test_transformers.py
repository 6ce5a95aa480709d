"""AMPTrainer: a loop written by hand around flatmin.AMP, to the last bit, with all that a Trainer does."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

import flatmin  # noqa: E402
from flatmin.integrations.transformers import AMPTrainer  # noqa: E402
from tests.integrations.trainers.small_transformer import (  # noqa: E402
    Seeds,
    arguments,
    batch,
    sentences,
    small_gpt,
    weights,
    windows,
)
from tests.support.cases import same  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerator")
ROWS = 14  # of batches of 2 and windows of 3, the last window has a single batch


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings in one place for all of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(folder: Path, model: nn.Module | None = None, **settings: Any) -> Any:
    """A trainer that has trained: settings of the perturbation, of the Trainer and of its arguments alike."""
    model = small_gpt() if model is None else model
    own = {"epsilon", "inner_lr", "inner_iter", "ball", "norm", "method", "perturb", "optimizers", "callbacks"}
    own |= {"log_perturbation"}
    trainer = AMPTrainer(
        model=model,
        args=arguments(folder, **{key: value for key, value in settings.items() if key not in own}),
        train_dataset=sentences(ROWS),
        **{"callbacks": [Seeds()], **{key: value for key, value in settings.items() if key in own}},
    )
    trainer.train()
    return trainer


def plain(folder: Path, model: nn.Module, **settings: Any) -> Any:
    rows = sentences(ROWS)
    return transformers.Trainer(
        model=model, args=arguments(folder, **settings), train_dataset=rows, callbacks=[Seeds()]
    )


def by_hand(
    folder: Path, *, accumulation: int, inner_iter: int = 1, epsilon: float = 0.1, bf16: bool = False, clip: float = 1.0
) -> tuple[list[Tensor], list[float]]:
    """The same training without a trainer: weights at the end, and the losses of the clean passes."""
    model = small_gpt()
    steps = windows(sentences(ROWS), 2, accumulation) * 2
    maker = plain(folder, model)  # its optimizer and schedule: decay for matrices alone, a rate that falls
    optimizer = flatmin.AMP(maker.create_optimizer(), epsilon=epsilon, inner_iter=inner_iter, model=model)
    schedule = maker.create_scheduler(len(steps), optimizer)
    losses = []

    def run(window: list[dict[str, Tensor]]) -> float:
        count = sum((micro["labels"][:, 1:] != -100).sum() for micro in window)
        total = 0.0
        for micro in window:
            with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
                loss = model(**micro, num_items_in_batch=count).loss
            loss.backward()
            total += float(loss.detach())
        return total

    model.train()
    for number, window in enumerate(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses.append(run(window))
        for _ in range(inner_iter):
            with optimizer.perturbed():
                run(window)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return weights(model), losses


def logged(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


class Watch:
    """Notes the weights of every forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[dict[str, Tensor]] = []
        self.model = model
        model.register_forward_pre_hook(self.note)

    def note(self, *_: object) -> None:
        self.passes.append({name: param.detach().clone() for name, param in self.model.named_parameters()})

    def moved(self, clean: int, perturbed: int) -> dict[str, Tensor]:
        """Δ between two passes, of the parameters that it moved."""
        moves = {name: self.passes[perturbed][name] - weight for name, weight in self.passes[clean].items()}
        return {name: move for name, move in moves.items() if move.any()}


@pytest.mark.parametrize(("accumulation", "inner_iter"), [(1, 1), (3, 1), (3, 2)])
def test_it_is_a_loop_by_hand_to_the_last_bit(tmp_path: Path, accumulation: int, inner_iter: int) -> None:
    """With dropout, clipping, weight decay, a schedule and a last window that is short."""
    expected, losses = by_hand(tmp_path, accumulation=accumulation, inner_iter=inner_iter)
    trainer = trained(tmp_path, epsilon=0.1, inner_iter=inner_iter, gradient_accumulation_steps=accumulation)
    assert same(weights(trainer.model), expected)
    assert trainer.state.global_step == len(losses)
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-6)  # of the clean passes


def test_bf16_is_a_loop_by_hand_to_the_last_bit(tmp_path: Path) -> None:
    expected, _ = by_hand(tmp_path, accumulation=3, bf16=True)
    assert same(weights(trained(tmp_path, epsilon=0.1, gradient_accumulation_steps=3, bf16=True).model), expected)
    assert not same(expected, by_hand(tmp_path, accumulation=3)[0])


def test_a_schedule_free_optimizer_is_evaluated_at_its_mean_and_trained_where_it_was(tmp_path: Path) -> None:
    """The Trainer changes its mode, which moves the weights, before every evaluation and after it."""
    oracle = pytest.importorskip("pytorch_optimizer")
    by_hand, model = small_gpt(), small_gpt()
    optimizer: Any = flatmin.AMP(oracle.ScheduleFreeSGD(by_hand.parameters(), lr=0.1), epsilon=0.1, model=by_hand)
    for epoch in range(2):
        optimizer.train()
        for number, (micro,) in enumerate(windows(sentences(ROWS), 2, 1)):
            torch.manual_seed(epoch * ROWS // 2 + number)
            optimizer.zero_grad()
            by_hand(**micro).loss.backward()
            with optimizer.perturbed():
                by_hand(**micro).loss.backward()
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
            optimizer.step()
        in_training = weights(by_hand)
        optimizer.eval()
    base = oracle.ScheduleFreeSGD(model.parameters(), lr=0.1)
    trainer = AMPTrainer(
        model=model,
        args=arguments(tmp_path, eval_strategy="epoch", lr_scheduler_type="constant"),
        train_dataset=sentences(ROWS),
        eval_dataset=sentences(4),
        optimizers=(base, None),
        callbacks=[Seeds()],
        epsilon=0.1,
    )
    trainer.train()
    for one, other in zip(weights(model), weights(by_hand), strict=True):
        torch.testing.assert_close(one, other)
    assert not same(weights(by_hand), in_training)


@pytest.mark.parametrize("nothing", [{"epsilon": 0.0}, {"epsilon": 0.1, "inner_iter": 0}])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_radius_or_passes_it_is_the_trainer_to_the_last_bit(
    tmp_path: Path, nothing: dict[str, Any], smoothing: float
) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 3, "label_smoothing_factor": smoothing}
    expected = plain(tmp_path, small_gpt(), **settings)
    expected.train()
    trainer = trained(tmp_path, **nothing, **settings)
    assert same(weights(trainer.model), weights(expected.model))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(trainer, key) == logged(expected, key)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_micro_batches_of_a_window_are_one_large_batch(tmp_path: Path, smoothing: float, norm: str) -> None:
    """Micro-batches with unequal numbers of labels, so that a mean of their means would be another number."""
    settings = {
        "epsilon": 0.01,
        "norm": norm,
        "label_smoothing_factor": smoothing,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    whole = trained(tmp_path, small_gpt(dropout=0), per_device_train_batch_size=6, **settings)
    parts = trained(tmp_path, small_gpt(dropout=0), gradient_accumulation_steps=3, **settings)
    assert whole.state.global_step == parts.state.global_step == 6
    for one, other in zip(weights(whole.model), weights(parts.model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_schedule_and_global_step_are_the_trainers_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    expected = plain(tmp_path, small_gpt(), **settings)
    expected.train()
    trainer = trained(tmp_path, epsilon=0.1, inner_iter=2, **settings)
    assert trainer.state.global_step == expected.state.global_step == 6
    assert logged(trainer, "learning_rate") == logged(expected, "learning_rate")
    assert logged(trainer, "loss")[0] == logged(expected, "loss")[0]  # before the first step: the clean one
    assert logged(trainer, "grad_norm")[0] != logged(expected, "grad_norm")[0]
    assert not same(weights(trainer.model), weights(expected.model))


def test_clipping_is_of_the_last_gradient_alone(tmp_path: Path) -> None:
    """The step is as short as the clipped gradient; Δ, which came from the gradient before, is on the ball's edge."""
    model = small_gpt()
    watch = Watch(model)
    settings: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "weight_decay": 0.0,
        "max_steps": 2,
        "warmup_steps": 0,
    }
    trainer = trained(tmp_path, model, epsilon=0.1, max_grad_norm=1e-3, lr_scheduler_type="constant", **settings)
    delta, step = watch.moved(0, 1), watch.moved(0, 2)
    assert float(flatmin.ball.combine(torch.stack([d.norm() for d in delta.values()]))) == pytest.approx(0.1, rel=1e-4)
    assert math.hypot(*[float(d.norm()) for d in step.values()]) == pytest.approx(1e-3, rel=1e-2)
    assert all(norm > 0.1 for norm in logged(trainer, "grad_norm"))


@pytest.mark.parametrize("at", [2, 3])
def test_a_training_that_goes_on_from_a_checkpoint_ends_at_the_same_bits(tmp_path: Path, at: int) -> None:
    """Within an epoch (of three steps) and between two, with dropout drawn from the generators that were saved."""
    settings: dict[str, Any] = {
        "epsilon": 0.1,
        "gradient_accumulation_steps": 3,
        "save_strategy": "steps",
        "save_steps": at,
    }
    straight = trained(tmp_path, callbacks=[], **settings)
    model = small_gpt()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)  # everything comes from the checkpoint
    again = AMPTrainer(
        model=model,
        args=arguments(tmp_path / "again", gradient_accumulation_steps=3),
        train_dataset=sentences(ROWS),
        epsilon=0.1,
    )
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert again.state.global_step == 6
    assert same(weights(again.model), weights(straight.model))
    assert again.optimizer.param_groups[0]["epsilon"] == 0.1


def test_a_second_training_goes_on_with_the_same_optimizer(tmp_path: Path) -> None:
    trainer = trained(tmp_path, epsilon=0.1, gradient_accumulation_steps=3)
    before, optimizer = weights(trainer.model), trainer.optimizer
    trainer.train()
    assert trainer.optimizer is optimizer
    assert not same(weights(trainer.model), before)


def test_an_optimizer_of_the_users_is_wrapped_and_a_wrapped_one_is_used_as_it_is(tmp_path: Path) -> None:
    runs = []
    for wrapped in (False, True):
        model = small_gpt()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = flatmin.AMP(base, epsilon=0.1, model=model) if wrapped else base
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=3)
        settings: dict[str, Any] = {} if wrapped else {"epsilon": 0.1}
        trainer = trained(tmp_path, model, optimizers=(optimizer, schedule), **settings)
        assert (trainer.optimizer.optimizer is optimizer) == wrapped
        assert trainer.optimizer.optimizer.base is base
        assert trainer.optimizer.param_groups[0]["lr"] == 0.1
        runs.append(weights(model))
    assert same(*runs)


def test_rmp_takes_the_gradient_at_a_random_point(tmp_path: Path) -> None:
    model = small_gpt()
    watch = Watch(model)
    trainer = trained(tmp_path, model, method=flatmin.RMP, epsilon=0.1, max_steps=1)
    norm = math.hypot(*[float(move.norm()) for move in watch.moved(0, 1).values()])
    assert 0.05 < norm <= 0.1 * (1 + 1e-5)
    assert not trainer.optimizer.optimizer.last.skipped


def test_it_is_a_mixin_for_other_trainers(tmp_path: Path) -> None:
    """Also for one that takes things out of its inputs: the replay finds them whole."""

    class Own(transformers.Seq2SeqTrainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: nn.Module, inputs: dict[str, Any], *rest: Any) -> Tensor:
            inputs = {"input_ids": inputs.pop("input_ids"), "labels": inputs.pop("labels")}
            loss: Tensor = super().training_step(model, inputs, *rest)
            return loss

    class AMPOwn(AMPTrainer, Own):
        pass

    expected, _ = by_hand(tmp_path, accumulation=3)
    model, rows = small_gpt(), sentences(ROWS)
    args = arguments(tmp_path, gradient_accumulation_steps=3).to_dict()
    args = transformers.Seq2SeqTrainingArguments(**{**args, "accelerator_config": None})
    trainer = AMPOwn(model=model, args=args, train_dataset=rows, epsilon=0.1, callbacks=[Seeds()])
    trainer.train()
    assert same(weights(model), expected)


def test_the_model_may_come_from_model_init(tmp_path: Path) -> None:
    """As in a search for hyper-parameters, where each trial has a new model and a new optimizer."""
    expected, _ = by_hand(tmp_path, accumulation=3)
    args, rows = arguments(tmp_path, gradient_accumulation_steps=3), sentences(ROWS)

    def new() -> nn.Module:
        return small_gpt()

    trainer = AMPTrainer(model_init=new, args=args, train_dataset=rows, epsilon=0.1, callbacks=[Seeds()])
    for _ in range(2):
        trainer.train()
        assert same(weights(trainer.model), expected)


def test_activation_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    has_new_name = hasattr(transformers.TrainingArguments, "activation_checkpointing")  # since 5.23
    name = "activation_checkpointing" if has_new_name else "gradient_checkpointing"
    without = trained(tmp_path, epsilon=0.1)
    settings: dict[str, Any] = {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    checkpointed = trained(tmp_path, epsilon=0.1, **settings)
    assert same(weights(without.model), weights(checkpointed.model))


def test_what_steps_measure_is_logged_beside_the_loss_and_changes_no_bit(tmp_path: Path) -> None:
    without = trained(tmp_path, epsilon=0.1)
    found = trained(tmp_path, epsilon=0.1, log_perturbation=True, logging_steps=2)
    assert same(weights(without.model), weights(found.model))
    assert len(logged(found, "amp/delta_norm")) == len(logged(found, "loss")) > 2
    assert logged(found, "amp/delta_norm") == pytest.approx([0.1] * len(logged(found, "loss")), rel=1e-4)
    assert set(logged(found, "amp/skipped")) == {0}
    assert not [key for line in without.state.log_history for key in line if key.startswith("amp/")]
    found.train()  # once more, with a log of its own
    assert len(logged(found, "amp/epsilon")) == len(logged(found, "loss"))


# ---- which parameters


def test_a_tied_weight_is_perturbed_once_and_stays_tied(tmp_path: Path) -> None:
    model = small_gpt()
    watch = Watch(model)
    trained(tmp_path, model, epsilon=0.1, max_steps=1)
    delta = watch.moved(0, 1)
    assert "transformer.wte.weight" in delta
    assert "lm_head.weight" not in delta
    assert model.lm_head.weight is model.transformer.wte.weight  # type: ignore[union-attr]
    assert math.hypot(*[float(move.norm()) for move in delta.values()]) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    "perturb",
    [
        lambda name, param: "ln_" in name,
        lambda name, param: not name.endswith("bias"),
        lambda name, param: "lm_head" in name,  # the second name of a tied weight
    ],
    ids=["norms", "no-biases", "tied"],
)
def test_only_what_is_chosen_is_perturbed_and_all_is_trained(
    tmp_path: Path, perturb: Callable[[str, nn.Parameter], bool]
) -> None:
    model = small_gpt()
    watch = Watch(model)
    trainer = trained(tmp_path, model, epsilon=0.1, perturb=perturb, max_steps=2)
    chosen = {name for name, _ in model.named_parameters(remove_duplicate=False) if perturb(name, nn.Parameter())}
    chosen = {"transformer.wte.weight" if name == "lm_head.weight" else name for name in chosen}
    assert set(watch.moved(0, 1)) == chosen
    assert set(watch.moved(0, 2)) == {name for name, _ in model.named_parameters()}
    decays = {(group["epsilon"] > 0, group["weight_decay"]) for group in trainer.optimizer.param_groups}
    assert {decay for _, decay in decays} == {0.1, 0.0}  # matrices decay, chosen or not


def test_adapters_alone_are_perturbed_and_frozen_weights_keep_every_bit(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain_model = small_gpt()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    model = peft.get_peft_model(plain_model, config)
    frozen = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    watch = Watch(model)
    trained(tmp_path, model, epsilon=0.1, gradient_accumulation_steps=3)
    assert set(watch.moved(3, -1)) == {name for name, param in model.named_parameters() if param.requires_grad}
    assert watch.moved(0, 3)
    assert all("lora_" in name for name in watch.moved(0, 3))
    after = dict(model.named_parameters())
    assert frozen
    assert same(frozen.values(), [after[name] for name in frozen])


# ---- fp16


class Overflow(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Spoils the loss of one forward pass."""

    def __init__(self, model: nn.Module, number: int) -> None:
        self.left = number
        model.register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, args: object, output: Any) -> None:
        if self.left == 0:
            output.loss = output.loss * float("inf")
        self.left -= 1


def with_scaler(trainer: Any) -> GradScaler:
    """What Accelerate makes for fp16 on a GPU, on the CPU: its own code all the same from here on."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
    trainer.accelerator.state._mixed_precision = "fp16"
    return scaler


def scaled_training(folder: Path, *, spoilt: int | None, epsilon: float = 0.1, clip: float = 1.0) -> tuple[Any, Any]:
    model = small_gpt()
    if spoilt is not None:
        Overflow(model, spoilt)
    args = arguments(
        folder, gradient_accumulation_steps=2, max_steps=3, max_grad_norm=clip, logging_nan_inf_filter=False
    )
    trainer = AMPTrainer(model=model, args=args, train_dataset=sentences(ROWS), epsilon=epsilon, callbacks=[Seeds()])
    scaler = with_scaler(trainer)
    trainer.train()
    return trainer, scaler


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_scaled_training_is_nearly_the_plain_one(tmp_path: Path, clip: float) -> None:
    expected = trained(tmp_path, epsilon=0.1, gradient_accumulation_steps=2, max_steps=3, max_grad_norm=clip)
    trainer, scaler = scaled_training(tmp_path, spoilt=None, clip=clip)
    assert scaler.get_scale() == 2.0**10
    for key in ("loss", "grad_norm"):
        assert logged(trainer, key) == pytest.approx(logged(expected, key), rel=0.01)  # passes in half precision
    assert logged(trainer, "loss") != logged(expected, "loss")


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("epsilon", "spoilt"), [(0.1, 4), (0.1, 5), (0.1, 6), (0.1, 7), (0.0, 2), (0.0, 3)])
def test_an_overflow_in_any_pass_skips_the_step_and_lowers_the_scale(
    tmp_path: Path, epsilon: float, spoilt: int, clip: float
) -> None:
    """The second step, in either micro-batch of either pass; the learning rate stays where it was."""
    trainer, scaler = scaled_training(tmp_path, spoilt=spoilt, epsilon=epsilon, clip=clip)
    assert scaler.get_scale() == 2.0**9
    rates = logged(trainer, "learning_rate")
    assert rates[1] == rates[2] < rates[0]
    assert all(weight.isfinite().all() for weight in weights(trainer.model))
    assert trainer.state.global_step == 3


@pytest.mark.cuda
def test_fp16_trains_on_a_gpu(tmp_path: Path) -> None:
    trainer = trained(tmp_path, epsilon=0.1, gradient_accumulation_steps=3, fp16=True, use_cpu=False)
    assert trainer.accelerator.scaler is not None
    assert not trainer.optimizer.optimizer.last.skipped
    assert all(weight.isfinite().all() for weight in weights(trainer.model))


# ---- what goes wrong


def test_an_exception_at_the_perturbed_weights_leaves_them_as_they_were(tmp_path: Path) -> None:
    model = small_gpt()
    theta, passes = weights(model), 0

    def fail(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 5:
            assert not same(weights(model), theta)
            raise KeyboardInterrupt

    model.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, model, epsilon=0.1, gradient_accumulation_steps=3)
    assert same(weights(model), theta)


class StopWithinAWindow(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Once, after a micro-batch that is not the last of its step."""

    done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop, self.done = not self.done, True


def test_a_training_that_stopped_within_a_window_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    model = small_gpt()
    watch = Watch(model)
    settings: dict[str, Any] = {"epsilon": 0.1, "gradient_accumulation_steps": 3, "max_steps": 1}
    trainer = trained(tmp_path, model, callbacks=[StopWithinAWindow()], **settings)
    assert (len(watch.passes), trainer.state.global_step) == (1, 0)
    assert same(weights(model), weights(small_gpt()))
    trainer.train()
    assert (len(watch.passes), trainer.state.global_step) == (1 + 3 + 3, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"needs epsilon.* write AMPTrainer\(\.\.\., epsilon=0\.1\)"),
        ({"epsilon": -1}, "epsilon must be a finite number of at least 0, got -1"),
        ({"epsilon": 0.1, "ball": "round"}, "unknown ball 'round'; choose from global"),
        ({"epsilon": 0.1, "inner_iter": 1.5}, "inner_iter must be a whole number of at least 0, got 1.5"),
        ({"epsilon": 0.1, "perturb": lambda name, param: False}, "perturb must select at least one parameter"),
    ],
)
def test_wrong_settings_are_told(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        trained(tmp_path, **settings)


def test_settings_beside_a_wrapped_optimizer_are_told(tmp_path: Path) -> None:
    model = small_gpt()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"has its own settings, got epsilon, norm beside it; leave them out"):
        trained(tmp_path, model, optimizers=(flatmin.AMP(base, epsilon=0.1), None), epsilon=0.2, norm="linf")
    with pytest.raises(ValueError, match=r"create that one with flatmin.groups\(model, perturb=perturb\)"):
        trained(tmp_path, model, optimizers=(base, None), epsilon=0.2, perturb=lambda name, param: True)


def test_a_batch_is_what_the_collator_makes_of_sentences(tmp_path: Path) -> None:
    """What the loop by hand takes for granted."""
    trainer = plain(tmp_path, small_gpt())
    first = next(iter(trainer.get_train_dataloader()))
    assert same(first.values(), batch(sentences(2)).values())


class WithItsOwnOptimizer(AMPTrainer):
    wraps = True

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        return super().create_optimizer() if self.wraps else self.optimizer


class Unwrapped(WithItsOwnOptimizer):
    wraps = False


def test_a_subclass_may_make_the_optimizer(tmp_path: Path) -> None:
    models = small_gpt(), small_gpt()
    rows, args = sentences(ROWS), arguments(tmp_path, gradient_accumulation_steps=2)
    WithItsOwnOptimizer(models[0], args, train_dataset=rows, callbacks=[Seeds()], epsilon=0.1).train()
    given = torch.optim.SGD(models[1].parameters(), lr=0.05)
    AMPTrainer(models[1], args, train_dataset=rows, callbacks=[Seeds()], epsilon=0.1, optimizers=(given, None)).train()
    assert same(weights(models[0]), weights(models[1]))
    with pytest.raises(
        TypeError, match=r"create_optimizer of Unwrapped left its optimizer unwrapped.*return super\(\)"
    ):
        Unwrapped(small_gpt(), args, train_dataset=rows, epsilon=0.1).train()


# ---- a search


@pytest.mark.parametrize("settings", [{"epsilon": 0.05}, {"epsilon": 0.05, "inner_iter": 2}])
def test_a_search_trains_with_the_values_that_it_draws(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("optuna")
    used: list[dict[str, float]] = []

    class Used(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            amp = optimizer.optimizer
            rate = amp.param_groups[0]["initial_lr"]
            used.append(
                {"epsilon": amp.param_groups[0]["epsilon"], "inner_iter": amp.inner_iter, "learning_rate": rate}
            )

    trainer = AMPTrainer(
        model_init=lambda: small_gpt(dropout=0.0),
        args=arguments(tmp_path, num_train_epochs=1, log_level="warning"),
        train_dataset=sentences(4),
        eval_dataset=sentences(4),
        callbacks=[Used()],
        **settings,
    )
    drawn: list[dict[str, float]] = []

    def space(trial: Any) -> dict[str, float]:
        """One value under another name and scale than it was drawn with."""
        values = {"epsilon": 10 ** trial.suggest_float("exponent", -2, 0), "inner_iter": trial.suggest_int("n", 1, 3)}
        values["learning_rate"] = trial.suggest_float("learning_rate", 1e-3, 1e-2)
        if not drawn or drawn[-1] != values:
            drawn.append(values)
        return values

    with caplog.at_level("WARNING", logger="transformers"):
        trainer.hyperparameter_search(space, lambda found: found["eval_loss"], n_trials=3, backend="optuna")
    assert used == drawn
    assert len({values["epsilon"] for values in used}) == 3
    assert "no corresponding field" not in caplog.text
