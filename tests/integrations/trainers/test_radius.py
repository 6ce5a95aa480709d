"""The radius over a training, in trainers: as in a loop by hand, and one pass where it is 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset

import flatmin
from tests.support.cases import same

pytest.importorskip("lightning", reason="needs Lightning: pip install 'flatmin[lightning]'")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from transformers import TrainerCallback

from flatmin.integrations.accelerate import Window
from flatmin.integrations.lightning import FlatMinima
from flatmin.integrations.transformers import AMPTrainer
from tests.integrations.trainers import test_lightning as on_lightning
from tests.integrations.trainers import test_transformers as on_transformers
from tests.integrations.trainers.small_transformer import Seeds, arguments, sentences, small_gpt, weights

pytestmark = on_lightning.pytestmark
fresh_accelerator = on_transformers.fresh_accelerator
LATE: dict[str, Any] = {"start": 0.5, "growth": "linear", "every": 2}


# ---- Lightning


def test_lightnings_callback_starts_late_as_a_loop_by_hand_does_bit_for_bit() -> None:
    fitted, looped = on_lightning.Module("dropout"), on_lightning.Module("dropout")
    on_lightning.fit(fitted, FlatMinima(epsilon=0.1, **LATE))
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    scheduler = flatmin.RadiusScheduler(optimizer, 8, **LATE)
    on_lightning.by_hand(looped, optimizer, after_step=scheduler.step)
    assert same(fitted.weights(), looped.weights())
    assert fitted.passes == 4 + 2 + 1 + 2 + 1


def test_a_group_that_is_unfrozen_in_a_training_has_the_same_share_of_its_radius() -> None:
    seen: list[tuple[float, ...]] = []

    class Unfreezes(on_lightning.Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.trainer.optimizers[0]
            if self.trainer.global_step == 2:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
            seen.append(tuple(group["epsilon"] for group in optimizer.param_groups))

    fitted = on_lightning.fit(Unfreezes("dropout"), FlatMinima(epsilon=0.1, start=0.75))
    assert seen[2:6] == [(0.0, 0.0)] * 4
    assert seen[6:] == [(0.1, 0.1)] * 2
    assert [group["epsilon"] for group in fitted.optimizers[0].param_groups] == [0.1, 0.1]


def test_a_scheduler_that_the_module_configures_moves_the_radius() -> None:
    class Configured(on_lightning.Module):
        def configure_optimizers(self) -> Any:
            optimizer = flatmin.AMP(super().configure_optimizers(), epsilon=0.1, model=self)
            radius = flatmin.RadiusScheduler(optimizer, self.trainer.estimated_stepping_batches, **LATE)  # type: ignore[arg-type]
            return [optimizer], [{"scheduler": radius, "interval": "step"}]

    fitted, expected = Configured("dropout"), on_lightning.Module("dropout")
    on_lightning.fit(fitted, FlatMinima())
    on_lightning.fit(expected, FlatMinima(epsilon=0.1, **LATE))
    assert same(fitted.weights(), expected.weights())
    assert fitted.passes == expected.passes == 10


@pytest.mark.parametrize("total_steps", [2, 8])
def test_a_scheduler_of_steps_that_lightning_would_step_once_per_epoch_is_refused(total_steps: int) -> None:
    class Configured(on_lightning.Module):
        def configure_optimizers(self) -> Any:
            optimizer = flatmin.AMP(super().configure_optimizers(), epsilon=0.1, model=self)
            return [optimizer], [flatmin.RadiusScheduler(optimizer, total_steps, start=0.5)]

    module = Configured()
    if total_steps == 8:
        with pytest.raises(ValueError, match=r"total_steps=8, but .* per epoch, 2 times; return it .*: \"step\"}"):
            on_lightning.fit(module, FlatMinima())
        return
    on_lightning.fit(module, FlatMinima())  # it counts epochs
    assert module.passes == 4 + 2 * 4


def test_a_scheduler_that_lightning_does_not_step_or_not_to_the_end_is_the_modules_own_business() -> None:
    class ByEpoch(on_lightning.Module):
        def configure_optimizers(self) -> Any:
            optimizer = flatmin.AMP(self.base(self.parameters()), epsilon=0.1, model=self)
            return [optimizer], [flatmin.RadiusScheduler(optimizer, 8, start=0.5)]

    class Manual(on_lightning.Manual):
        configure_optimizers = ByEpoch.configure_optimizers

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]

    module = Manual(form="closure")
    on_lightning.fit(module, FlatMinima())
    assert module.passes == 4 + 2 * 4
    tried = ByEpoch()
    on_lightning.fit(tried, FlatMinima(), fast_dev_run=1)
    assert tried.passes == 1


@pytest.mark.parametrize("epsilon", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_radius_that_the_callback_does_not_move_is_left_alone(epsilon: Any) -> None:
    class Moves(on_lightning.Module):
        def configure_optimizers(self) -> Any:
            self.amp = flatmin.AMP(super().configure_optimizers(), epsilon=epsilon, model=self)
            return self.amp

        def on_train_epoch_end(self) -> None:
            self.amp.param_groups[0]["epsilon"] = 0.3

    module = Moves()
    on_lightning.fit(module, FlatMinima())
    assert module.amp.param_groups[0]["epsilon"] == 0.3


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_training_goes_on_with_its_radius_bit_for_bit(tmp_path: Path) -> None:
    straight, first, second = (on_lightning.Resumable() for _ in range(3))
    on_lightning.fit(straight, FlatMinima(epsilon=0.1, **LATE), max_epochs=4)

    class StopsEarly(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 2

    callbacks = FlatMinima(epsilon=0.1, **LATE), on_lightning.keeping(tmp_path), StopsEarly()
    on_lightning.fit(first, *callbacks, max_epochs=4, enable_checkpointing=True)
    going_on = on_lightning.trainer(FlatMinima(epsilon=0.1, **LATE), max_epochs=4)
    going_on.fit(second, on_lightning.loader(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert going_on.global_step == 16
    assert first.passes + second.passes == straight.passes == 8 + 8 + 4
    assert same(second.weights(), straight.weights())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_from_within_a_step_without_a_perturbation_does_not_end_the_perturbations(tmp_path: Path) -> None:
    """Its ε is the step's share, 0, as a signal handler may save it: the callback's own counts."""
    on_lightning.fit(
        on_lightning.Resumable(),
        FlatMinima(epsilon=0.1, start=0.5),
        on_lightning.keeping(tmp_path),
        max_epochs=1,
        enable_checkpointing=True,
    )
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    checkpoint["optimizer_states"][0]["param_groups"][0]["epsilon"] = 0.0
    torch.save(checkpoint, tmp_path / "last.ckpt")
    module, resumed = on_lightning.Resumable(), on_lightning.trainer(FlatMinima(epsilon=0.1, start=0.5))
    resumed.fit(module, on_lightning.loader(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert module.passes == 2 * 4
    assert resumed.optimizers[0].param_groups[0]["epsilon"] == 0.1


@pytest.mark.parametrize("epsilon", [0.3, "auto"])
def test_lightnings_checkpoint_from_within_a_step_has_all_of_the_radius(tmp_path: Path, epsilon: Any) -> None:
    """As a job that is about to be preempted saves it; the step goes on with its share."""
    shares: list[float] = []

    class Preempted(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
            shares.append(trainer.optimizers[0].param_groups[0]["epsilon"])

    schedule: dict[str, Any] = {"growth": "linear"} if epsilon != "auto" else {}
    validated(Validated(), FlatMinima(epsilon, start=0.5, every=2, **schedule), Preempted(), max_epochs=1)
    assert 0 in shares
    assert sum(share != 0 for share in shares) == 1
    for step in range(len(shares)):
        saved = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["optimizer_states"][0]
        assert saved["param_groups"][0]["epsilon"] == (0.1 if epsilon == "auto" else 0.3)


def test_a_radius_over_a_training_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="has no end, or data without a length; give the Trainer max_steps"):
        on_lightning.fit(on_lightning.Module(), FlatMinima(epsilon=0.1, start=0.5), max_epochs=-1)
    with pytest.raises(TypeError, match=r"return a flatmin.RadiusScheduler from configure_optimizers"):
        FlatMinima(start=0.5)
    with pytest.raises(ValueError, match="start must be a share of the training"):
        FlatMinima(epsilon=0.1, start=5)


def test_data_without_a_length_need_max_steps() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(on_lightning.data())

    loader = torch.utils.data.DataLoader(Endless(), batch_size=6)
    with pytest.raises(ValueError, match="or data without a length; give the Trainer max_steps"):
        on_lightning.fit(on_lightning.Module(), FlatMinima(epsilon=0.1, start=0.5), batches=loader)
    module = on_lightning.Module()
    on_lightning.fit(module, FlatMinima(epsilon=0.1, start=0.5), batches=loader, max_steps=4, max_epochs=-1)
    assert module.passes == 2 + 2 * 2


@pytest.mark.parametrize(
    "ends", [{"max_epochs": 4}, {"max_epochs": -1, "max_steps": 32}, {"max_epochs": 5, "max_steps": 32}]
)
def test_with_two_optimizers_half_of_the_training_is_half_of_it(ends: dict[str, Any]) -> None:
    seen: list[float] = []

    class Two(on_lightning.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            params = list(self.parameters())
            return [torch.optim.SGD(part, lr=0.01) for part in (params[:1], params[1:])]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizers: Any = self.optimizers()
            seen.append(optimizers[0].param_groups[0]["epsilon"])
            for optimizer in optimizers:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                if optimizer.perturbs:
                    with optimizer.perturbed():
                        self.manual_backward(self.loss(batch))
                optimizer.step()

    fitted = on_lightning.fit(Two(), FlatMinima(epsilon=0.1, start=0.5), **ends)
    assert seen == [0.0] * 8 + [0.1] * 8
    assert fitted.optimizers[0].param_groups[0]["epsilon"] == 0.1


def test_a_training_that_failed_leaves_all_of_the_radius_to_the_next() -> None:
    """Of a module that keeps its optimizer, after an error in the steps without a perturbation."""

    class Fails(on_lightning.Module):
        fails = True

        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.kept

        def on_train_batch_end(self, *_: Any) -> None:
            if self.fails:
                raise ArithmeticError

    module = Fails()
    with pytest.raises(ArithmeticError):
        on_lightning.fit(module, FlatMinima(epsilon=0.1, start=0.5))
    assert [group["epsilon"] for group in module.kept.param_groups] == [0.1]
    module.fails, module.passes = False, 0
    on_lightning.fit(module, FlatMinima(epsilon=0.1, start=0.5))
    assert module.passes == 4 + 2 * 4


def test_a_radius_that_is_set_between_steps_is_what_the_callback_takes_shares_of() -> None:
    """Also by a MatchedRadius; and checkpoints have all of it."""
    seen: list[float] = []

    class Sets(on_lightning.Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.optimizers[0].param_groups[0]["epsilon"])
            if self.trainer.global_step == 0:
                self.matched = flatmin.MatchedRadius(self.trainer.optimizers[0])

        def on_train_epoch_end(self) -> None:
            matched = self.trainer.optimizers[0].param_groups[0]
            assert matched["epsilon"] == pytest.approx(0.1 * (2 / 3) ** self.trainer.current_epoch)
            assert self.matched.step(0.05, losses=(0.1, 0.2)) == 2 / 3

    fitted = on_lightning.fit(Sets(), FlatMinima(epsilon=0.1, every=3), max_epochs=3)
    assert seen == pytest.approx([0.1, 0, 0, 0.1, 0, 0, 0.2 / 3, 0, 0, 0.4 / 9, 0, 0])
    assert fitted.optimizers[0].param_groups[0]["epsilon"] == pytest.approx(0.8 / 27)


def test_a_checkpoint_has_all_of_the_radius_before_the_start(tmp_path: Path) -> None:
    callbacks = FlatMinima(epsilon=0.1, start=0.75), ModelCheckpoint(tmp_path, every_n_train_steps=2)
    on_lightning.fit(on_lightning.Module(), *callbacks, enable_checkpointing=True, max_steps=3)
    (checkpoint,) = (torch.load(path, weights_only=True) for path in tmp_path.iterdir())
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["epsilon"] == 0.1


def test_a_checkpoint_of_an_epoch_that_a_hook_ended_has_all_of_the_radius(tmp_path: Path) -> None:
    class Skips(on_lightning.Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1 if batch_idx == 2 else 0

    module = Skips()
    on_lightning.fit(module, FlatMinima(epsilon=0.1, start=0.75), ModelCheckpoint(tmp_path), enable_checkpointing=True)
    (checkpoint,) = (torch.load(path, weights_only=True) for path in tmp_path.iterdir())
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["epsilon"] == 0.1
    assert module.passes == 4  # of the 8 that were planned, the last two would be perturbed


SET_WITHIN = (
    r"had set epsilon to \[0.1\] for a step, but it was set to \[0.3\] before the end of it; set it between steps"
)


def test_a_radius_that_is_set_within_a_step_of_the_callbacks_schedule_is_refused() -> None:
    class Sets(on_lightning.Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            optimizer.param_groups[0]["epsilon"] = 0.3

    with pytest.raises(ValueError, match=SET_WITHIN):
        on_lightning.fit(Sets(), FlatMinima(epsilon=0.1, every=3))


class Validated(on_lightning.Module):
    """With a validation loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


HELD_OUT = on_lightning.data(seed=9, size=6)


def validated(
    module: Validated, callback: FlatMinima, *callbacks: Any, ckpt_path: Any = None, data: Any = None, **settings: Any
) -> Any:
    torch.manual_seed(1)
    fitted = on_lightning.trainer(callback, *callbacks, num_sanity_val_steps=1, **settings)
    held_out = torch.utils.data.DataLoader(HELD_OUT, batch_size=6, generator=torch.Generator())
    fitted.fit(module, data or on_lightning.loader(), held_out, ckpt_path=ckpt_path)
    return fitted


@pytest.mark.parametrize("window", [1, 2])
def test_lightnings_callback_matches_the_radius_as_a_loop_by_hand_does(window: int) -> None:
    """The losses are means over the micro-batches of a step; up to rounding, because they are added up in float32."""
    fitted, looped = Validated("dropout"), Validated("dropout")
    trainer = validated(fitted, FlatMinima(epsilon="auto", start=0.25), max_epochs=4, accumulate_grad_batches=window)
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    steps = 4 // window
    scheduler = flatmin.RadiusScheduler(optimizer, 4 * steps, start=0.25)
    matched = flatmin.MatchedRadius(optimizer, scheduler=scheduler)
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    torch.manual_seed(1)
    for _ in range(4):
        batches = list(on_lightning.loader())
        for at in range(0, 4, window):
            optimizer.zero_grad()
            losses: list[float] = []

            def run(micro_batches: list[Any] = batches[at : at + window], losses: list[float] = losses) -> None:
                each = [looped.loss(batch) for batch in micro_batches]
                for loss in each:
                    (loss / window).backward()
                losses.append(sum(float(loss.detach()) for loss in each) / window)

            run()
            if optimizer.perturbs:
                with optimizer.perturbed():
                    run()
                sums, count = sums + torch.tensor(losses, dtype=torch.float64), count + 1
            optimizer.step()
            scheduler.step()
        looped.eval()
        with torch.no_grad():
            held_out = torch.nn.functional.cross_entropy(looped.net(HELD_OUT.tensors[0]), HELD_OUT.tensors[1])
        looped.train()
        if count:
            matched.step(held_out, losses=tuple((sums / count).tolist()))
        sums, count = torch.zeros(2, dtype=torch.float64), 0
    found = trainer.optimizers[0].param_groups[0]["epsilon"]
    assert found == pytest.approx(matched.radii[0], rel=1e-6)
    assert found != 0.1
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(fitted.weights(), looped.weights(), strict=True)
    )


def test_a_group_that_is_unfrozen_in_a_step_without_a_perturbation_has_the_automatic_radius() -> None:
    moved: list[bool] = []

    class Unfreezes(Validated):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 5:
                bias = self.net[-1].bias.requires_grad_(True)  # type: ignore[index,union-attr]
                self.trainer.optimizers[0].add_param_group({"params": [bias]})

        def configure_optimizers(self) -> Any:
            self.net[-1].bias.requires_grad_(False)  # type: ignore[index,union-attr]
            return self.base([param for param in self.parameters() if param.requires_grad])

        def on_train_batch_end(self, *_: Any) -> None:
            moved.append(self.trainer.optimizers[0].last.delta_norm is not None)

    trainer = validated(Unfreezes("dropout"), FlatMinima(epsilon="auto", every=2))
    assert moved == [True, False] * 4
    first, second = (group["epsilon"] for group in trainer.optimizers[0].param_groups)
    assert first == second != 0.1


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("place", ["step=6", "epoch=1"])
def test_a_resumed_training_matches_on(tmp_path: Path, place: str) -> None:
    """A checkpoint has what was measured since the last validation, too. (All batches are alike.)"""
    straight, resumed = Validated(), Validated()
    data: Any = torch.utils.data.DataLoader(ConcatDataset([on_lightning.data(size=6)] * 4), batch_size=6)
    whole = validated(straight, FlatMinima(epsilon="auto"), data=data, max_epochs=4)
    keeping = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_last=True, save_top_k=-1, filename="{step}")
    after = ModelCheckpoint(tmp_path, filename="{epoch}")
    callbacks = FlatMinima(epsilon="auto"), keeping, after
    validated(Validated(), *callbacks, data=data, enable_checkpointing=True, max_epochs=2)
    within = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["flatmin_matched_radius"][0]
    assert within["sums"][3] == 2  # steps of the second epoch
    place = str(tmp_path / f"{place}.ckpt")
    again = validated(resumed, FlatMinima(epsilon="auto"), data=data, max_epochs=4, ckpt_path=place)
    assert again.optimizers[0].param_groups[0]["epsilon"] == whole.optimizers[0].param_groups[0]["epsilon"] != 0.1
    assert same(resumed.weights(), straight.weights())


def test_a_checkpoint_that_was_validated_is_not_what_the_next_training_has_measured(tmp_path: Path) -> None:
    """Lightning shows its callbacks also the checkpoints that it loads for validate(), test() and predict()."""

    class Measured(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.sums = trainer.optimizers[0].radius.state_dict()["sums"]

    callback, measured = FlatMinima(epsilon="auto"), Measured()
    keeping = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trained = validated(Validated(), callback, keeping, enable_checkpointing=True, max_epochs=2)
    held_out = torch.utils.data.DataLoader(HELD_OUT, batch_size=6)
    trained.validate(Validated(), held_out, ckpt_path=str(tmp_path / "step=6.ckpt"))
    validated(Validated(), callback, measured)
    assert measured.sums is None


def test_what_steps_measure_has_the_losses() -> None:
    """Also of steps without a perturbation."""
    module = on_lightning.Module("mlp")
    fitted = on_lightning.fit(module, FlatMinima(epsilon=0.1, start=0.5), max_epochs=2, accumulate_grad_batches=2)
    last = fitted.optimizers[0].last
    assert last.loss is not None
    assert last.loss_perturbed is not None
    assert last.loss_perturbed > last.loss > 0
    idle = on_lightning.fit(on_lightning.Module("mlp"), FlatMinima(epsilon=0.0))
    assert idle.optimizers[0].last.loss > 0
    assert idle.optimizers[0].last.loss_perturbed is None


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_micro_batch_without_a_loss_is_left_out_of_the_losses() -> None:
    class Skips(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    fitted = validated(Skips(), FlatMinima(epsilon="auto"), accumulate_grad_batches=2)
    assert fitted.optimizers[0].param_groups[0]["epsilon"] != 0.1
    last = fitted.optimizers[0].last
    assert last.loss_perturbed > last.loss


def test_a_training_without_a_validation_says_that_nothing_was_adjusted() -> None:
    with pytest.warns(RuntimeWarning, match="adjusted nothing, because no evaluation .* reported 'val_loss'"):
        validated(Validated(), FlatMinima(epsilon="auto"), check_val_every_n_epoch=10)


@pytest.mark.parametrize("logged", [(0,), (0, 2)])
def test_a_validation_that_does_not_log_the_loss_does_not_use_an_earlier_one(logged: tuple[int, ...]) -> None:
    class Sometimes(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch in logged:
                super().validation_step(batch, batch_idx)

    callback = FlatMinima(epsilon="auto")
    calls: list[int] = []

    class Counts(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            calls.append(callback._matched[0].calls)

    validated(Sometimes("dropout"), callback, Counts(), max_epochs=4)
    assert calls == [sum(at <= epoch for at in logged) for epoch in range(4)]


@pytest.mark.parametrize("monitor", ["val_loss", "another"])
def test_an_automatic_radius_that_the_module_configures_is_matched_if_its_loss_is_reported(monitor: str) -> None:
    class Configured(Validated):
        def configure_optimizers(self) -> Any:
            return flatmin.AMP(super().configure_optimizers(), epsilon="auto", model=self)

    fitted, expected = Configured("dropout"), Validated("dropout")
    if monitor == "another":
        with pytest.warns(RuntimeWarning, match="adjusted nothing, because no evaluation .* reported 'another'"):
            trainer = validated(fitted, FlatMinima(monitor="another"))
        assert trainer.optimizers[0].param_groups[0]["epsilon"] == 0.1
        return
    trainer = validated(fitted, FlatMinima())
    other = validated(expected, FlatMinima(epsilon="auto"))
    assert trainer.optimizers[0].param_groups[0]["epsilon"] == other.optimizers[0].param_groups[0]["epsilon"] != 0.1
    assert same(fitted.weights(), expected.weights())


def test_a_module_that_adjusts_its_automatic_radius_itself_is_not_warned() -> None:
    class Adjusts(Validated):
        def configure_optimizers(self) -> Any:
            self.amp = flatmin.AMP(super().configure_optimizers(), epsilon="auto", model=self)
            return self.amp

        def on_validation_epoch_end(self) -> None:
            self.amp.radius.step(3.0)

    trainer = validated(Adjusts("dropout"), FlatMinima(monitor="another"))
    assert trainer.optimizers[0].param_groups[0]["epsilon"] > 0.1


def test_the_steps_of_a_search_are_not_matched() -> None:
    """Lightning's finders put their checkpoint back, and what steps have measured with it."""
    seen: list[int] = []

    class Counts(Validated):
        learning_rate = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

        def on_train_start(self) -> None:
            sums = callback._matched[0].state_dict()["sums"]
            seen.append(0 if sums is None else int(sums[3]))

    callback = FlatMinima(epsilon="auto")
    finder = LearningRateFinder(num_training_steps=4, min_lr=1e-3, max_lr=1e-2, update_attr=True)
    validated(Counts(), callback, finder)
    assert seen[-1] == 0


def test_what_an_automatic_radius_of_the_callback_needs() -> None:
    with pytest.raises(ValueError, match=r'epsilon="auto" works only with flatmin.AMP, got RMP'):
        FlatMinima(epsilon="auto", method=flatmin.RMP)
    with pytest.raises(ValueError, match=r'grows by itself, got growth="linear"'):
        FlatMinima(epsilon="auto", growth="linear")
    with pytest.raises(ValueError, match=r"epsilon must be a number or \"auto\", got 'big'"):
        FlatMinima(epsilon="big")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"matched with the loss on validation data, but this training has none"):
        on_lightning.fit(on_lightning.Module(), FlatMinima(epsilon="auto"))
    with pytest.raises(ValueError, match=r"the metric 'loss/val', but the evaluation reported .*val_loss"):
        validated(Validated(), FlatMinima(epsilon="auto", monitor="loss/val"))
    by_hand = Validated()
    by_hand.automatic_optimization = False
    with pytest.raises(
        ValueError, match=r"this module optimises manually; return flatmin.AMP\(optimizer, epsilon=\"auto\"\)"
    ):
        validated(by_hand, FlatMinima(epsilon="auto"))


# ---- Hugging Face's Trainer


def matching_trainer(folder: Path, *, epsilon: Any = "auto", **settings: Any) -> AMPTrainer:
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    own = {name: settings.pop(name) for name in ("monitor", "start", "method") if name in settings}
    return AMPTrainer(
        model=small_gpt(),
        args=arguments(folder, **{**evaluating, **settings}),
        train_dataset=sentences(on_transformers.ROWS),
        eval_dataset=sentences(20)[on_transformers.ROWS :],
        callbacks=[Seeds()],
        epsilon=epsilon,
        **own,
    )


@pytest.mark.usefixtures("fresh_accelerator")
def test_amptrainer_matches_the_radius_with_the_losses_that_it_reports(tmp_path: Path) -> None:
    """The clean losses are those of the log, and both are the step's: shares of the window's tokens, added up."""
    trainer = matching_trainer(tmp_path)
    seen: list[tuple[float, float]] = []
    radii: list[float] = []

    def note(optimizer: Any, *_: Any) -> None:
        seen.append((float(optimizer.last.loss), float(optimizer.last.loss_perturbed)))
        radii.append(optimizer.param_groups[0]["epsilon"])

    class Watches(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            trainer._matched.optimizer.register_step_post_hook(note)  # type: ignore[union-attr]

    trainer.add_callback(Watches())
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    held_out = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [clean for clean, _ in seen] == pytest.approx(logged, rel=1e-4)
    assert all(perturbed > clean for clean, perturbed in seen)
    epsilon = 0.1
    after = [*radii[2::2], trainer.optimizer.param_groups[0]["epsilon"]]
    for number, new in enumerate(held_out):
        means = torch.tensor(seen[2 * number : 2 * number + 2]).mean(dim=0).tolist()
        gap, rise = new - means[0], means[1] - means[0]
        epsilon *= min(max((gap / rise) ** 0.5 if gap > 0 else 0, 2 / 3), 3)
        assert after[number] == pytest.approx(epsilon, rel=1e-3)
    assert len(held_out) == 4
    before = trainer.optimizer.param_groups[0]["epsilon"]
    trainer.evaluate()  # after the training nothing is matched
    assert trainer.optimizer.param_groups[0]["epsilon"] == before


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("reported", [True, False])
def test_an_automatic_radius_in_optimizers_is_matched_if_its_loss_is_reported(tmp_path: Path, reported: bool) -> None:
    expected = matching_trainer(tmp_path)
    expected.train()
    model, data = small_gpt(), {"train_dataset": expected.train_dataset, "eval_dataset": expected.eval_dataset}
    plain = on_transformers.transformers.Trainer(model, expected.args, **data)  # type: ignore[attr-defined]
    trainer = AMPTrainer(
        model,
        expected.args,
        **data,
        optimizers=(flatmin.AMP(plain.create_optimizer(), epsilon="auto", model=model), None),
        monitor="eval_loss" if reported else "another",
        callbacks=[Seeds()],
    )
    if reported:
        trainer.train()
    else:
        with pytest.warns(RuntimeWarning, match="adjusted nothing, because no evaluation .* reported 'another'"):
            trainer.train()
    found, matched = (one.optimizer.param_groups[0]["epsilon"] for one in (trainer, expected))
    assert found == (matched if reported else 0.1) != (0.1 if reported else matched)


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_second_training_with_another_model_adjusts_that_ones_radius(tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        return small_gpt()

    trainer = AMPTrainer(
        model_init=make,
        args=arguments(tmp_path, eval_strategy="epoch", num_train_epochs=2),
        train_dataset=sentences(on_transformers.ROWS),
        eval_dataset=sentences(20)[on_transformers.ROWS :],
        epsilon="auto",
    )
    seen = []
    for _ in range(2):  # a warning would be an error
        trainer.train()
        seen.append(trainer.optimizer.param_groups[0]["epsilon"])
    assert 0.1 not in seen


@pytest.mark.usefixtures("fresh_accelerator")
def test_one_of_several_data_sets_is_matched_and_what_callbacks_evaluate_is_not(tmp_path: Path) -> None:
    class Evaluates(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            trainer.evaluate(sentences(2), metric_key_prefix="train")

    trainer = matching_trainer(tmp_path, monitor="eval_b_loss")
    trainer.eval_dataset = {"a": sentences(4), "b": sentences(20)[on_transformers.ROWS :]}
    trainer.add_callback(Evaluates())
    trainer.train()
    alone = matching_trainer(tmp_path)
    alone.train()
    found, expected = (one.optimizer.param_groups[0]["epsilon"] for one in (trainer, alone))
    assert found == expected != 0.1
    unnamed = matching_trainer(tmp_path)
    unnamed.eval_dataset = {"a": sentences(4), "b": sentences(4)}
    with pytest.raises(ValueError, match=r"the metric 'eval_loss', but the evaluation reported .*eval_b_loss"):
        unnamed.train()


@pytest.mark.usefixtures("fresh_accelerator")
def test_what_a_training_step_returns_is_not_taken_for_the_loss(tmp_path: Path) -> None:
    class Scales(on_transformers.transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            return 10 * super().training_step(*arguments, **named)

    class Own(AMPTrainer, Scales):
        pass

    trainer = Own(
        model=small_gpt(), args=arguments(tmp_path), train_dataset=sentences(4), epsilon=0.1, callbacks=[Seeds()]
    )
    trainer.train()
    last = trainer.optimizer.optimizer.last
    assert last.loss < last.loss_perturbed < 2 * last.loss
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] == pytest.approx(10 * float(last.loss), rel=1e-3)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_amptrainer_matches_on(tmp_path: Path, at: int) -> None:
    """From a checkpoint right after an evaluation, and from one between two."""
    straight = matching_trainer(tmp_path / "straight", start=0.2)
    straight.train()
    matching_trainer(tmp_path / "kept", start=0.2, save_strategy="steps", save_steps=1).train()
    resumed = matching_trainer(tmp_path / "kept", start=0.2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "kept" / f"checkpoint-{at}"))
    assert same(weights(resumed.model), weights(straight.model))
    found, expected = (one.optimizer.param_groups[0]["epsilon"] for one in (resumed, straight))
    assert found == expected != 0.1


@pytest.mark.usefixtures("fresh_accelerator")
def test_what_an_automatic_radius_of_amptrainer_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluations during the training, but there are none"):
        matching_trainer(tmp_path, eval_strategy="no").train()
    with pytest.raises(ValueError, match=r"the metric 'eval_nll', but the evaluation reported .*eval_loss"):
        matching_trainer(tmp_path, monitor="eval_nll").train()
    with pytest.raises(ValueError, match=r'epsilon="auto" works only with flatmin.AMP, got RMP'):
        matching_trainer(tmp_path, method=flatmin.RMP)
    model = small_gpt()
    own = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon="auto", model=model)
    with pytest.raises(ValueError, match=r'"auto" grows by itself, got growth="linear"; leave it out'):
        AMPTrainer(model, arguments(tmp_path), optimizers=(own, None), growth="linear")


def late_trainer(folder: Path, **settings: Any) -> AMPTrainer:
    return AMPTrainer(
        model=small_gpt(),
        args=arguments(folder, **settings),
        train_dataset=sentences(on_transformers.ROWS),
        callbacks=[Seeds()],
        epsilon=0.1,
        **LATE,
    )


@pytest.mark.usefixtures("fresh_accelerator")
def test_amptrainer_starts_late_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """14 steps: 7 of one pass, then 7 of two and one in turn."""
    straight = late_trainer(tmp_path / "straight")
    passes: list[bool] = []
    straight.model.register_forward_hook(lambda *_: passes.append(straight.replaying))  # type: ignore[union-attr]
    straight.train()
    assert straight.state.global_step == 14
    assert passes == [False] * 7 + [False, True, False] * 3 + [False, True]
    late_trainer(tmp_path / "kept", save_strategy="steps", save_steps=10).train()
    resumed = late_trainer(tmp_path / "kept")
    resumed.train(resume_from_checkpoint=str(tmp_path / "kept" / "checkpoint-10"))
    assert same(weights(resumed.model), weights(straight.model))
    assert not same(weights(straight.model), weights(on_transformers.trained(tmp_path, epsilon=0.1).model))


@pytest.mark.usefixtures("fresh_accelerator")
def test_amptrainers_checkpoint_from_within_a_step_has_all_of_the_radius(tmp_path: Path) -> None:
    """As the Trainer saves it when its job is about to be preempted; the step goes on with its share."""
    shares: list[float] = []

    class Preempted(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer._save_optimizer_and_scheduler(str(tmp_path))
            saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
            assert [group["epsilon"] for group in saved["param_groups"]] == [0.1, 0.1]
            shares.append(trainer.optimizer.param_groups[1]["epsilon"])

    trainer = AMPTrainer(
        model=small_gpt(),
        args=arguments(tmp_path, max_steps=4),
        train_dataset=sentences(8),
        epsilon=0.1,
        callbacks=[Preempted()],
        **LATE,
    )
    trainer.train()
    assert shares == pytest.approx([0, 0, 0.05, 0])


@pytest.mark.usefixtures("fresh_accelerator")
def test_an_optimizer_of_the_users_own_has_its_radius_again_after_a_training(tmp_path: Path) -> None:
    model = small_gpt()
    optimizer = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.01), epsilon=0.2, model=model)
    for _ in range(2):
        trainer = AMPTrainer(
            model=model,
            args=arguments(tmp_path, max_steps=3),
            train_dataset=sentences(on_transformers.ROWS),
            optimizers=(optimizer, None),
            start=0.0,
            every=2,
        )
        passes: list[bool] = []
        with model.register_forward_hook(lambda *_, to=passes, of=trainer: to.append(of.replaying)):
            trainer.train()
        assert passes == [False, True, False, False, True]
        assert optimizer.param_groups[0]["epsilon"] == 0.2


class Sets(TrainerCallback):
    """Sets ε when it is told to, and notes it at the beginning of a step."""

    def __init__(self, when: str) -> None:
        self.seen: list[float] = []
        setattr(self, when, self.set_radius)

    def set_radius(self, *_: Any, optimizer: Any, **__: Any) -> None:
        optimizer.param_groups[0]["epsilon"] = 0.3

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["epsilon"])


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("when", ["on_step_end", "on_pre_optimizer_step"])
def test_a_radius_is_set_between_the_trainers_steps_and_refused_within(tmp_path: Path, when: str) -> None:
    model, args, sets = (
        small_gpt(),
        arguments(tmp_path, num_train_epochs=1, save_strategy="steps", save_steps=2),
        Sets(when),
    )
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"train_dataset": sentences(8), "optimizers": (base, None), "callbacks": [sets]}
    trainer = AMPTrainer(model, args, epsilon=0.1, every=2, **given)
    passes: list[bool] = []
    model.register_forward_hook(lambda *_: passes.append(trainer.replaying))
    if when == "on_pre_optimizer_step":
        with pytest.raises(ValueError, match=SET_WITHIN):
            trainer.train()
        assert base.param_groups[0]["epsilon"] == 0.1
        return
    trainer.train()
    assert sets.seen == [0.1, 0.3, 0.3, 0.3]
    assert passes == [False, True, False] * 2
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["epsilon"] == 0.3


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_search_for_the_batch_size_starts_over_with_all_of_the_radius(tmp_path: Path) -> None:
    """The first attempt fails in its second step, which is not perturbed."""
    model, rows, sizes = small_gpt(), sentences(8), list[int]()

    def fail(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        sizes.append(len(inputs["input_ids"]))
        if sizes == [4, 4, 4]:
            raise RuntimeError("CUDA out of memory.")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    args = arguments(tmp_path, per_device_train_batch_size=4, auto_find_batch_size=True, num_train_epochs=1)
    trainer = AMPTrainer(model, args, train_dataset=rows, epsilon=0.1, every=2)
    trainer.train()
    assert len(sizes) == 3 + trainer.state.global_step + -(-trainer.state.global_step // 2)
    assert trainer.optimizer.param_groups[0]["epsilon"] == 0.1


# ---- Accelerate


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("prepared", [False, True])  # in one process they are the same
def test_a_scheduler_moves_the_radius_once_a_window(prepared: bool) -> None:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    optimizer = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    scheduler = flatmin.RadiusScheduler(optimizer, 4, start=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    if prepared:
        scheduler = accelerator.prepare(scheduler)
    window = Window(accelerator, model, optimizer)
    seen = []
    for x in torch.randn(8, 5, 3):
        with accelerator.accumulate(model):
            window.backward(lambda x: model(x).square().mean(), x)
            optimizer.step()
            if prepared or accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        seen.append(len(passes))
        passes.clear()
    assert seen == [1, 1, 1, 1, 1, 3, 1, 3]


@pytest.mark.parametrize("over", ["the AMP", "the prepared one"])
def test_a_matched_radius_is_what_a_scheduler_over_a_prepared_optimizer_applies(over: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    amp = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon="auto", model=model)
    model, optimizer = accelerator.prepare(model, amp)
    scheduler = flatmin.RadiusScheduler(amp if over == "the AMP" else optimizer, 10, start=0.0)
    for expected in (0.3, 0.9):
        for x in torch.randn(2, 5, 3):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).square().mean()
                accelerator.backward(loss)
                return loss

            optimizer.step(closure)
            scheduler.step()
        assert optimizer.optimizer.radius.step(1e6) == 3
        scheduler.step()
        assert amp.param_groups[0]["epsilon"] == pytest.approx(expected)
