"""flatmin under Lightning's Trainer equals flatmin in a loop of one's own, and Lightning sees one pass a step."""

import csv
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import flatmin
from tests import HANG_SECONDS, PYTHONPATH, ROOT
from tests.support.cases import MODELS, OPTIMIZERS, fused_sgd, same
from tests.support.doc_blocks import code
from tests.support.ports import reserved_port

pytest.importorskip("lightning", reason="needs Lightning: pip install 'flatmin[lightning]'")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.tuner.lr_finder import _ExponentialLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from flatmin.integrations.lightning import FlatMinima, PerturbedOptimizer
from tests.integrations.trainers import lightning_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval.*"),
]

Step = dict[str, Any]


def data(seed: int = 3, size: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))


def loader(batch_size: int = 6, size: int = 24) -> DataLoader[Any]:
    """Its own generator: the random numbers of a training are then those of its dropout alone."""
    return DataLoader(data(size=size), batch_size=batch_size, generator=torch.Generator())


class Module(pl.LightningModule):
    """A network of `cases.MODELS`; `spoilt` passes, counted over the training, get an infinite loss."""

    def __init__(
        self, model: str = "mlp", base: Callable[[Any], Optimizer] | None = None, spoilt: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = MODELS[model]()
        self.base = base or OPTIMIZERS["nesterov"]
        self.spoilt = spoilt
        self.passes = 0

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.net(x).float(), y)
        self.passes += 1
        return loss * float("inf") if self.passes - 1 in self.spoilt else loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.base(self.parameters())

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


def trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(quiet | settings))


def fit(module: pl.LightningModule, *callbacks: pl.Callback, batches: Any = None, **settings: Any) -> pl.Trainer:
    torch.manual_seed(1)
    fitted = trainer(*callbacks, **settings)
    fitted.fit(module, loader() if batches is None else batches)
    return fitted


def by_hand(
    module: Module,
    optimizer: Any,
    *,
    epochs: int = 2,
    window: int = 1,
    batches: Any = None,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    clip: Callable[[Any], object] | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """The loop that a user of flatmin would write, in blocks; the clean loss of every step."""
    torch.manual_seed(1)
    module.train()
    losses = []
    for _ in range(epochs):
        held = list(loader() if batches is None else batches)
        for start in range(0, len(held), window):
            micro_batches = held[start : start + window]

            def run(micro_batches: list[Any] = micro_batches) -> float:
                total = 0.0
                for batch in micro_batches:
                    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None, cache_enabled=False):
                        loss = module.loss(batch) / window
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    total += loss.item()
                return total

            optimizer.zero_grad()
            losses.append(run())
            for _ in range(optimizer.inner_iter if isinstance(optimizer, flatmin.AMP | flatmin.RMP) else 0):
                with optimizer.perturbed(scaler=scaler):
                    run()
            if clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                clip(module.parameters())
            optimizer.step(scaler=scaler)
            if scaler is not None:
                scaler.update()
            after_step()
    return losses


# ---- the same numbers


@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("model", ["mlp", "conv-batchnorm", "dropout"])
def test_fit_equals_a_loop_by_hand_bit_for_bit(model: str, inner_iter: int) -> None:
    """Dropout's masks and BatchNorm's statistics too."""
    fitted, looped = Module(model), Module(model)
    fit(fitted, FlatMinima(epsilon=0.1, inner_iter=inner_iter))
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, inner_iter=inner_iter, model=looped)
    by_hand(looped, optimizer)
    assert same(fitted.weights(), looped.weights())
    assert same(fitted.buffers(), looped.buffers())
    assert fitted.passes == 8 * (inner_iter + 1)


def forward_and_backward(module: Module, optimizer: Optimizer, batch: list[Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = module.loss(batch)
    loss.backward()
    return loss


def test_fit_equals_a_loop_with_a_closure_bit_for_bit() -> None:
    fitted, looped = Module("dropout"), Module("dropout")
    fit(fitted, FlatMinima(epsilon=0.1))
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    torch.manual_seed(1)
    for batch in [batch for _ in range(2) for batch in loader()]:
        optimizer.step(partial(forward_and_backward, looped, optimizer, batch))
    assert same(fitted.weights(), looped.weights())


def test_masks_are_the_same_in_both_passes_where_hooks_draw_random_numbers_too() -> None:
    class Drawing(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.rand(3)

        def loss(self, batch: list[Tensor]) -> Tensor:
            losses.append((loss := super().loss(batch)).item())
            return loss

    losses: list[float] = []
    fit(Drawing("dropout"), FlatMinima(epsilon=1e-9))
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-5)
    assert len(set(losses)) > 4


@pytest.mark.parametrize("base", list(OPTIMIZERS))
def test_any_base_and_any_setting_passes_through(base: str) -> None:
    settings: Step = {"epsilon": 0.02, "inner_lr": 0.5, "ball": "tensor", "norm": "linf"}
    fitted, looped = Module(base=OPTIMIZERS[base]), Module(base=OPTIMIZERS[base])
    fit(fitted, FlatMinima(**settings))
    by_hand(looped, flatmin.AMP(looped.base(looped.parameters()), model=looped, **settings))
    assert same(fitted.weights(), looped.weights())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("settings", [{"epsilon": 0.0}, {"epsilon": 0.1, "inner_iter": 0}])
def test_epsilon_zero_is_plain_lightning_bit_for_bit(settings: Step, precision: Any) -> None:
    plain, wrapped = Module("dropout"), Module("dropout")
    expected = fit(plain, precision=precision, gradient_clip_val=0.5, accumulate_grad_batches=2)
    got = fit(wrapped, FlatMinima(**settings), precision=precision, gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert same(plain.weights(), wrapped.weights())
    assert wrapped.passes == plain.passes
    assert got.callback_metrics == expected.callback_metrics


def test_bf16_equals_the_loop_by_hand_bit_for_bit() -> None:
    fitted, looped = Module("dropout"), Module("dropout")
    fit(fitted, FlatMinima(epsilon=0.1), precision="bf16-mixed")
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    by_hand(looped, optimizer, autocast=torch.bfloat16)
    assert same(fitted.weights(), looped.weights())


def test_rmp_equals_the_loop_by_hand_bit_for_bit_and_counts_statistics_once() -> None:
    fitted, looped, plain = Module("conv-batchnorm"), Module("conv-batchnorm"), Module("conv-batchnorm")
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    fit(fitted, FlatMinima(epsilon=0.1, method=flatmin.RMP, generator=generators[0]))
    optimizer = flatmin.RMP(looped.base(looped.parameters()), epsilon=0.1, generator=generators[1], model=looped)
    torch.manual_seed(1)
    for batch in [batch for _ in range(2) for batch in loader()]:
        optimizer.zero_grad()
        with optimizer.perturbed():
            looped.loss(batch).backward()
        optimizer.step()
    assert same(fitted.weights(), looped.weights())
    fit(plain)
    assert fitted.net[2].num_batches_tracked == plain.net[2].num_batches_tracked == 8  # type: ignore[index]


def test_rmp_draws_anew_in_every_step_from_torchs_own_generator() -> None:
    """With nothing else random in the training, the generator must not be put back."""
    seen: list[list[Tensor]] = []

    class Watched(Module):
        def loss(self, batch: list[Tensor]) -> Tensor:
            seen.append(self.weights())
            return super().loss(batch)

    fit(Watched(base=lambda params: SGD(params, lr=0.0)), FlatMinima(epsilon=0.1, method=flatmin.RMP))
    first, second = seen[1], seen[3]
    assert not same(seen[0], first)
    assert not same(first, second)


# ---- accumulation


def test_accumulation_equals_the_loop_that_replays_all_micro_batches_bit_for_bit() -> None:
    """The last window of an epoch is shorter: Lightning divides by the full length there too, and so does the loop."""
    for model in ("conv-batchnorm", "dropout"):
        fitted, looped = Module(model), Module(model)
        batches = loader(batch_size=4, size=20)
        fit(fitted, FlatMinima(epsilon=0.1, inner_iter=2), batches=batches, accumulate_grad_batches=2)
        optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, inner_iter=2, model=looped)
        by_hand(looped, optimizer, window=2, batches=batches)
        assert same(fitted.weights(), looped.weights())
        assert same(fitted.buffers(), looped.buffers())


def test_accumulation_equals_one_large_batch() -> None:
    small, large = Module(), Module()
    fit(small, FlatMinima(epsilon=0.1), batches=loader(batch_size=6), accumulate_grad_batches=2)
    fit(large, FlatMinima(epsilon=0.1), batches=loader(batch_size=12))
    for weight, value in zip(small.weights(), large.weights(), strict=True):
        torch.testing.assert_close(weight, value, rtol=1e-5, atol=1e-6)


# ---- fp16


def fp16(scale: float = 2.0**12) -> MixedPrecision:
    """Lightning's own plugin; given "16-mixed" on a CPU, the Trainer would take bf16 instead."""
    return MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=scale))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("base", ["nesterov", "adamw", "adamw-fused"])
def test_fp16_equals_the_loop_by_hand_bit_for_bit(base: str, window: int) -> None:
    fitted, looped = Module("dropout", OPTIMIZERS[base]), Module("dropout", OPTIMIZERS[base])
    plugin = fp16()
    fit(fitted, FlatMinima(epsilon=0.1), plugins=[plugin], accumulate_grad_batches=window)
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    unscale = None if "fused" in base else lambda params: None  # where the loop unscales first, as Lightning does
    scaler = GradScaler("cpu", init_scale=2.0**12)
    by_hand(looped, optimizer, window=window, autocast=torch.float16, scaler=scaler, clip=unscale)
    assert same(fitted.weights(), looped.weights())
    assert not same(fitted.weights(), Module("dropout").weights())


@pytest.mark.parametrize("spoilt", [2, 3], ids=["clean pass", "perturbed pass"])
@pytest.mark.parametrize("base", ["nesterov", "adamw-fused"])
def test_overflow_in_either_pass_skips_the_step_and_lowers_the_scale(base: str, spoilt: int) -> None:
    plugin = fp16()
    seen: list[list[Tensor]] = []

    class Watching(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(pl_module.weights())

    module = Module(base=OPTIMIZERS[base], spoilt=(spoilt,))
    fitted = fit(module, FlatMinima(epsilon=0.1), Watching(), plugins=[plugin])
    assert same(seen[1], seen[2])
    assert not same(seen[2], seen[3])
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**11
    assert all(weight.isfinite().all() for weight in module.weights())
    assert fitted.global_step == 8


def test_a_gradient_that_is_not_finite_is_skipped_without_a_scaler_too() -> None:
    for spoilt in (0, 1, 6, 7):
        module = Module(spoilt=(spoilt,))
        fit(module, FlatMinima(epsilon=0.1))
        assert all(weight.isfinite().all() for weight in module.weights())


def test_fp16_with_epsilon_zero_is_plain_lightning_bit_for_bit() -> None:
    plain, wrapped = Module(spoilt=(1,)), Module(spoilt=(1,))
    fit(plain, plugins=[fp16()], gradient_clip_val=0.5)
    fit(wrapped, FlatMinima(epsilon=0.0), plugins=[fp16()], gradient_clip_val=0.5)
    assert same(plain.weights(), wrapped.weights())


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_on_a_gpu_every_precision_trains_as_float32_does_on_a_cpu(precision: str) -> None:
    module, looped = Module(), Module()
    fitted = fit(module, FlatMinima(epsilon=0.1), accelerator="gpu", precision=precision)
    by_hand(looped, flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped))
    assert (getattr(fitted.precision_plugin, "scaler", None) is not None) == (precision == "16-mixed")
    for weight, expected in zip(module.weights(), looped.weights(), strict=True):
        torch.testing.assert_close(weight.cpu(), expected, rtol=0.02, atol=0.02)


# ---- clipping


@pytest.mark.parametrize("precision", ["32", "fp16"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_of_the_final_gradient_alone(algorithm: str, precision: str) -> None:
    limit = 0.05
    fitted, looped = Module(), Module()
    plugins = [fp16()] if precision == "fp16" else []
    settings: Step = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm, "plugins": plugins}
    fit(fitted, FlatMinima(epsilon=0.1), **settings)

    def clip(params: Any) -> None:
        if algorithm == "norm":
            nn.utils.clip_grad_norm_(params, limit)
        else:
            nn.utils.clip_grad_value_(params, limit)

    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    dtype, scaler = (torch.float16, GradScaler("cpu", init_scale=2.0**12)) if plugins else (None, None)
    by_hand(looped, optimizer, clip=clip, autocast=dtype, scaler=scaler)
    assert same(fitted.weights(), looped.weights())
    assert float(optimizer.last.grad_norm) > 2 * limit  # type: ignore[arg-type]  # what Δ came from was not clipped


# ---- what Lightning sees


def test_the_logged_losses_are_those_of_the_clean_passes(tmp_path: Path) -> None:
    fitted, looped = Module("dropout"), Module("dropout")
    logger = CSVLogger(tmp_path)
    result = fit(fitted, FlatMinima(epsilon=0.1), logger=logger, log_every_n_steps=1)
    losses = by_hand(looped, flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [float(row["loss_step"]) for row in csv.DictReader(file) if row["loss_step"]]
    assert logged == losses
    assert float(result.callback_metrics["loss_epoch"]) == pytest.approx(sum(losses[4:]) / 4, rel=1e-6)


def test_what_steps_measure_goes_to_the_trainers_logger_and_changes_no_bit(tmp_path: Path) -> None:
    fitted, looped = Module("dropout"), Module("dropout")
    logger = CSVLogger(tmp_path)
    fit(fitted, FlatMinima(epsilon=0.1, log_every=4), logger=logger)
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    norms: list[float] = []

    def note(*_: Any) -> None:
        assert optimizer.last.delta_norm is not None
        norms.append(float(optimizer.last.delta_norm))

    optimizer.register_step_post_hook(note)
    by_hand(looped, optimizer)
    assert same(fitted.parameters(), looped.parameters())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["amp/delta_norm"]]
    assert [int(row["step"]) for row in rows] == [4, 8]
    expected = [sum(norms[:4]) / 4, sum(norms[4:]) / 4]
    assert [float(row["amp/delta_norm"]) for row in rows] == pytest.approx(expected, rel=1e-5)
    assert {row["amp/epsilon"] for row in rows} == {"0.1"}


def test_metrics_count_a_batch_once() -> None:
    class Counting(Module):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy, self.mean = MulticlassAccuracy(3), MeanMetric()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.accuracy(self.net(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss)
            return loss

        def on_train_epoch_end(self) -> None:
            assert isinstance(self.accuracy.tp, Tensor)
            assert isinstance(self.accuracy.fn, Tensor)
            counted.append((int((self.accuracy.tp + self.accuracy.fn).sum()), float(self.mean.weight)))
            means.append(float(self.mean.compute()))
            self.mean.reset()

    counted: list[tuple[int, float]] = []
    means: list[float] = []
    fitted = fit(Counting(), FlatMinima(epsilon=0.1))
    assert counted == [(24, 4.0), (24, 4.0)]
    assert means[-1] == pytest.approx(float(fitted.callback_metrics["loss_epoch"]), rel=1e-6)


class Hooks(pl.Callback):
    """What another callback sees: which hooks in which order, whether at θ, and with which gradients."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gradient_changed: list[bool] = []  # between the last backward pass and the step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.theta = pl_module.weights()

    def note(self, name: str, module: Any) -> None:
        self.calls.append(name)
        assert same(module.weights(), self.theta)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("zero_grad", pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.note("before backward", pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.note("after backward", pl_module)
        self.gradient = [param.grad.clone() for param in pl_module.parameters()]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("step", pl_module)
        self.gradient_changed.append(not same([param.grad for param in pl_module.parameters()], self.gradient))


@pytest.mark.parametrize("window", [1, 2])
def test_hooks_come_as_often_as_without_and_at_theta_and_the_step_has_the_final_gradient(window: int) -> None:
    plain, perturbed = Hooks(), Hooks()
    expected = fit(Module(), plain, accumulate_grad_batches=window)
    got = fit(Module(), FlatMinima(epsilon=0.1), perturbed, accumulate_grad_batches=window)
    assert perturbed.calls == plain.calls
    assert got.global_step == expected.global_step == 8 // window
    assert not any(plain.gradient_changed)
    assert all(perturbed.gradient_changed)


def test_schedulers_move_the_learning_rate_of_the_training() -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.1), "interval": "step"},
            }

    fitted, looped = Scheduled(), Module()
    fit(fitted, FlatMinima(epsilon=0.1))
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    by_hand(looped, optimizer, after_step=StepLR(optimizer, 3, 0.1).step)
    assert same(fitted.weights(), looped.weights())


def test_the_learning_rate_monitor_finds_one_optimizer(tmp_path: Path) -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1)]

    for module in (Module(), Scheduled()):
        monitor = LearningRateMonitor()
        fit(module, FlatMinima(epsilon=0.1), monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1)
        assert list(monitor.lrs) == ["lr-SGD"]


def test_early_stopping_and_the_progress_bar_read_the_clean_loss(capsys: pytest.CaptureFixture[str]) -> None:
    module = Module(base=lambda params: SGD(params, lr=0.0))  # so the loss never falls
    stopping = EarlyStopping("loss_epoch", patience=1)
    fitted = fit(module, FlatMinima(epsilon=0.1), stopping, max_epochs=9, enable_progress_bar=True)
    assert fitted.current_epoch == 2
    assert "loss_epoch" in capsys.readouterr().out
    assert fitted.progress_bar_metrics["loss_epoch"] == pytest.approx(float(stopping.best_score), rel=1e-6)


def test_what_training_step_counts_for_itself_can_ask_whether_it_is_replayed() -> None:
    class Keeping(Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[float] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if not getattr(self.optimizers(), "replaying", False):
                self.kept.append(loss.item())
            return loss

    module = Keeping()
    fit(module, FlatMinima(epsilon=0.1))
    assert len(module.kept) == 8


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_stochastic_weight_averaging_keeps_no_batch_of_its_last_epoch(epsilon: float) -> None:
    """It only updates BatchNorm's statistics there, as one window as long as the epoch, without a step."""
    held: list[int] = []

    class Watched(Module):
        def on_train_epoch_start(self) -> None:
            self.seen: list[weakref.ref[Tensor]] = []

        def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen.append(weakref.ref(batch[0]))

        def on_train_batch_end(self, *_: Any) -> None:
            held.append(sum(batch() is not None for batch in self.seen[:-1]))

    def averaging() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)

    module, plain = Watched("conv-batchnorm"), Watched("conv-batchnorm")
    fit(plain, averaging())
    expected, held = max(held), []
    fit(module, FlatMinima(epsilon=epsilon), averaging())
    assert max(held) == expected < 2
    assert module.passes == 8 * (2 if epsilon else 1) + 4
    assert same(module.weights(), plain.weights()) == (epsilon == 0)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_training_steps_that_take_one_argument_or_return_a_dict_or_none() -> None:
    class OneArgument(Module):
        def training_step(self, batch: list[Tensor]) -> Any:  # type: ignore[override]
            return {"loss": self.loss(batch), "more": 1}

    class Skipping(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return None if batch_idx in skipped or self.passes in skipped_passes else self.loss(batch)

    fitted, looped = OneArgument(), Module()
    fit(fitted, FlatMinima(epsilon=0.1))
    by_hand(looped, flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped))
    assert same(fitted.weights(), looped.weights())
    for plugins in ([], [fp16()]):
        skipped, skipped_passes = {0, 1, 2, 3}, set[int]()
        nothing = Skipping()
        fit(nothing, FlatMinima(epsilon=0.1), plugins=plugins)
        assert same(nothing.weights(), Module().weights())
        skipped, skipped_passes = set(), {1}  # at θ + Δ alone, from the first step on
        fit(nothing := Skipping(), FlatMinima(epsilon=0.1), plugins=plugins, max_steps=1)
        assert same(nothing.weights(), Module().weights())


def test_a_training_step_may_take_entries_out_of_a_batch_that_a_callback_has_changed() -> None:
    class Mixes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: list[Tensor], batch_idx: int) -> None:
            batch[0] = batch[0] + batch[0].flip(0)

    class Takes(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            y = batch.pop()
            return self.loss([batch.pop(), y])

    fitted, expected = Takes("dropout"), Module("dropout")
    for module in (fitted, expected):
        fit(module, FlatMinima(epsilon=0.1, inner_iter=2), Mixes(), accumulate_grad_batches=2)
    assert same(fitted.weights(), expected.weights())


# ---- checkpoints


class Resumable(Module):
    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.05)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


def keeping(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_last=True)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("precision", ["32", "fp16"])
def test_a_resumed_training_ends_as_an_uninterrupted_one_bit_for_bit(tmp_path: Path, precision: str) -> None:
    def plugins() -> list[Any]:
        return [fp16()] if precision == "fp16" else []

    straight, first, second = Resumable(), Resumable(), Resumable()
    fit(straight, FlatMinima(epsilon=0.1), max_epochs=4, plugins=plugins())
    fit(first, FlatMinima(epsilon=0.1), keeping(tmp_path), max_epochs=2, plugins=plugins(), enable_checkpointing=True)
    with torch.no_grad():
        for param in second.parameters():
            param.zero_()
    callbacks = FlatMinima(epsilon=0.1), keeping(tmp_path)
    going_on = trainer(*callbacks, max_epochs=4, plugins=plugins(), enable_checkpointing=True)
    going_on.fit(second, loader(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert same(second.weights(), straight.weights())
    assert going_on.global_step == 16


@pytest.mark.parametrize("method", [flatmin.AMP, flatmin.RMP])
def test_a_job_that_slurm_requeues_within_a_perturbed_pass_saves_theta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    """Lightning's handler saves as soon as the signal comes; the training goes on undisturbed."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")

    class Normalised(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    class Signalled(Normalised):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            optimizer: Any = self.optimizers()
            if self.trainer.global_step == 3:
                passes.append({name: value.clone() for name, value in self.state_dict().items()})
                if optimizer.replaying:
                    os.kill(os.getpid(), signal.SIGUSR1)
            return loss

    passes: list[dict[str, Tensor]] = []
    slurm: Any = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)
    trained, expected = Signalled(), Normalised()
    expected.load_state_dict(trained.state_dict())
    fit(trained, FlatMinima(epsilon=0.1, method=method), max_epochs=1, plugins=[slurm], default_root_dir=tmp_path)
    fit(expected, FlatMinima(epsilon=0.1, method=method), max_epochs=1)
    assert same(trained.weights(), expected.weights())
    at_theta, there = passes
    assert not any(same([at_theta[name]], [there[name]]) for name in ("net.3.weight", "net.1.running_mean"))
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["state_dict"]
    assert list(saved) == list(at_theta)
    assert same(list(saved.values()), list(at_theta.values()))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_of_plain_training_goes_on_with_a_perturbation_and_back(tmp_path: Path) -> None:
    fit(Resumable(), keeping(tmp_path), enable_checkpointing=True, max_epochs=1)
    saved = str(tmp_path / "last.ckpt")
    perturbed, plain, expected = Resumable(), Resumable(), Resumable()
    fitted = trainer(FlatMinima(epsilon=0.1), max_epochs=2)
    fitted.fit(perturbed, loader(), ckpt_path=saved)
    assert fitted.optimizers[0].param_groups[0]["epsilon"] == 0.1
    fitted.save_checkpoint(tmp_path / "perturbed.ckpt")
    trainer(max_epochs=2).fit(expected, loader(), ckpt_path=saved)
    assert not same(perturbed.weights(), expected.weights())
    trainer(max_epochs=3).fit(plain, loader(), ckpt_path=str(tmp_path / "perturbed.ckpt"))
    assert not same(plain.weights(), perturbed.weights())


def test_a_strategy_can_be_copied_and_pickled_after_the_training() -> None:
    """As a plain one can; the copy's optimizer has weights and settings of its own."""
    fitted = fit(Module(base=fused_sgd), FlatMinima(epsilon=0.1, inner_iter=2))
    for copied in (deepcopy(fitted.strategy), pickle.loads(pickle.dumps(fitted.strategy))):
        (optimizer,) = copied.optimizers
        assert isinstance(optimizer, PerturbedOptimizer)
        assert optimizer.inner_iter == 2  # type: ignore[attr-defined]
        assert optimizer is copied._lightning_optimizers[0]


# ---- optimizers of the user's own, manual optimisation


def test_an_amp_that_the_module_configured_is_used_as_it_is() -> None:
    class Configured(Module):
        def configure_optimizers(self) -> Any:
            optimizer = flatmin.AMP(super().configure_optimizers(), epsilon=0.1, model=self)
            return [optimizer], [{"scheduler": StepLR(optimizer, 3, gamma=0.5), "interval": "step"}]

    fitted, looped = Configured("dropout"), Module("dropout")
    result = fit(fitted, FlatMinima(), accumulate_grad_batches=2)
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    by_hand(looped, optimizer, window=2, after_step=StepLR(optimizer, 3, gamma=0.5).step)
    assert same(fitted.weights(), looped.weights())
    assert isinstance(result.optimizers[0], flatmin.AMP)
    assert float(result.optimizers[0].last.delta_norm) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("calls_closure", [False, True])
def test_an_optimizer_step_of_the_users_own_is_respected(calls_closure: bool) -> None:
    class Own(Module):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if calls_closure:
                optimizer_closure()
                optimizer.step()
            else:
                optimizer.step(closure=optimizer_closure)

    expected, own = Module(), Own()
    fit(expected, FlatMinima(epsilon=0.1))
    fit(own, FlatMinima(epsilon=0.1))
    assert same(own.weights(), expected.weights())


class Twice(Module):
    """Two steps a batch, as some do in their `optimizer_step`."""

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        super().optimizer_step(*arguments, **named)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_an_optimizer_step_that_steps_twice_is_two_steps(epsilon: float) -> None:
    module, expected = Twice("dropout"), Module("dropout")
    fit(module, FlatMinima(epsilon=epsilon), max_epochs=1)
    base = OPTIMIZERS["nesterov"](expected.parameters())
    optimizer = flatmin.AMP(base, epsilon=epsilon, model=expected.train())
    torch.manual_seed(1)
    for batch in loader():
        for _ in range(2):
            optimizer.step(partial(forward_and_backward, expected, optimizer, batch))
    assert same(module.weights(), expected.weights())


def test_lbfgs_without_a_radius_is_plain_lightning_bit_for_bit() -> None:
    def lbfgs(params: Any) -> Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    class Steps(pl.Callback):
        count = 0

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.count += 1

    plain, module = Module("mlp", base=lbfgs), Module("mlp", base=lbfgs)
    expected, counted = Steps(), Steps()
    fit(plain, expected)
    fit(module, FlatMinima(epsilon=0.0), counted)
    assert same(module.weights(), plain.weights())
    assert counted.count == expected.count > 8


def test_a_command_line_sees_every_setting() -> None:
    """LightningCLI makes its flags from the signature."""
    settings = signature(FlatMinima).parameters
    for method in (flatmin.AMP, flatmin.RMP):
        assert signature(method).parameters.keys() - {"base", "model"} <= settings.keys()
    (optimizer,) = fit(Module("mlp"), FlatMinima(epsilon=0.1, inner_iter=2, ball="tensor", inner_lr=0.5)).optimizers
    assert (optimizer.inner_iter, optimizer.ball, optimizer.norm) == (2, "tensor", "l2")  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["inner_lr"] == 0.5


class Manual(Module):
    def __init__(self, model: str = "mlp", form: str = "blocks") -> None:
        super().__init__(model)
        self.automatic_optimization = False
        self.form = form

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        if self.form == "blocks":
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            with optimizer.perturbed():
                self.manual_backward(self.loss(batch))
            optimizer.step()
            return

        def closure() -> None:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.manual_backward(loss)

        optimizer.step(closure)


@pytest.mark.parametrize("precision", ["32", "fp16"])
@pytest.mark.parametrize("form", ["blocks", "closure"])
def test_manual_optimisation_equals_the_loop_by_hand_bit_for_bit(form: str, precision: str) -> None:
    fitted, looped = Manual("dropout", form), Module("dropout")
    plugins = [fp16()] if precision == "fp16" else []
    result = fit(fitted, FlatMinima(epsilon=0.1), plugins=plugins)
    optimizer = flatmin.AMP(looped.base(looped.parameters()), epsilon=0.1, model=looped)
    dtype, scaler = (torch.float16, GradScaler("cpu", init_scale=2.0**12)) if plugins else (None, None)
    losses = by_hand(looped, optimizer, autocast=dtype, scaler=scaler, clip=(lambda params: None) if plugins else None)
    assert same(fitted.weights(), looped.weights())
    assert result.global_step == 8
    if form == "closure":
        assert float(result.callback_metrics["loss"]) == pytest.approx(sum(losses[4:]) / 4, rel=1e-6)


@pytest.mark.parametrize("only_one", [False, True])
def test_several_optimizers_in_manual_optimisation(only_one: bool) -> None:
    class Two(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                if isinstance(optimizer, flatmin.AMP):
                    with optimizer.perturbed():
                        self.manual_backward(self.loss(batch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            bases = [SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]  # type: ignore[index]
            return [flatmin.AMP(bases[0], epsilon=0.1, model=self), bases[1]] if only_one else bases

    fitted, looped = Two(), Module()
    result = fit(fitted, FlatMinima() if only_one else FlatMinima(epsilon=0.1))
    layers = [looped.net[0], looped.net[2]]  # type: ignore[index]
    optimizers = [flatmin.AMP(SGD(layer.parameters(), lr=0.1), epsilon=0.1) for layer in layers]
    if only_one:
        optimizers[1].param_groups[0]["epsilon"] = 0.0
    for batch in [batch for _ in range(2) for batch in loader()]:
        for optimizer in optimizers:
            optimizer.zero_grad()
            looped.loss(batch).backward()
            with optimizer.perturbed():
                looped.loss(batch).backward()
            optimizer.step()
            looped.zero_grad()
    assert same(fitted.weights(), looped.weights())
    assert result.global_step == 16


# ---- tuners


class Tuned(Module):
    """`lr` and `batch_size` are what tuners look for; batches of `too_large` do not fit, at θ + Δ alone."""

    def __init__(self, model: str = "dropout", too_large: int = 1000) -> None:
        super().__init__(model)
        self.lr, self.batch_size, self.too_large = 0.1, 6, too_large
        self.kept: list[bool] = []  # was there a copy of θ in memory, in each pass?

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.kept.append(isinstance(optimizer, PerturbedOptimizer) and bool(optimizer._optimizer.memory()))
        if len(batch[0]) >= self.too_large and optimizer.replaying:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)


def scale(tuner: Tuner, module: Tuned, **settings: Any) -> Any:
    return tuner.scale_batch_size(module, steps_per_trial=2, init_val=2, **settings)


SEARCHES: dict[str, tuple[Callable[[Tuner, Tuned], Any], int]] = {  # and the steps that each takes
    "learning rate": (lambda tuner, module: tuner.lr_find(module, num_training=10, update_attr=False), 10),
    "batch size": (partial(scale, max_trials=2), 4),
    "batch size by bisection": (partial(scale, max_trials=2, mode="binsearch", margin=0.0), 4),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("search", list(SEARCHES))
def test_tuners_run_all_passes_of_a_step(search: str, inner_iter: int, window: int, tmp_path: Path) -> None:
    """And have θ in memory twice from the first perturbed pass on."""
    module = Tuned()
    tuned = trainer(
        FlatMinima(epsilon=0.1, inner_iter=inner_iter),
        default_root_dir=tmp_path,
        accumulate_grad_batches=window,
        max_epochs=9,
    )
    run, steps = SEARCHES[search]
    run(Tuner(tuned), module)
    assert module.passes == steps * window * (inner_iter + 1)
    assert module.kept == [False] * window + [True] * (module.passes - window)


@pytest.mark.parametrize("search", list(SEARCHES))
def test_a_training_after_a_tuner_is_that_without_bit_for_bit(search: str, tmp_path: Path) -> None:
    """The user's callbacks are there again, and nothing else is left."""
    tuned, plain = Tuned(), Tuned()
    callback, hooks = FlatMinima(epsilon=0.1), Hooks()
    both = trainer(hooks, callback, default_root_dir=tmp_path)
    SEARCHES[search][0](Tuner(both), tuned)
    assert not hooks.calls
    assert set(both.callbacks) == {hooks, callback}  # type: ignore[attr-defined]
    assert "run" not in vars(both.fit_loop)
    assert same(tuned.weights(), plain.weights())
    tuned.batch_size, tuned.passes = 6, 0
    torch.manual_seed(1)
    both.fit(tuned)
    fit(plain, FlatMinima(epsilon=0.1))
    assert tuned.passes == plain.passes == 16
    assert same(tuned.weights(), plain.weights())


def test_the_learning_rate_finder_sees_the_losses_of_the_loop_by_hand_bit_for_bit(tmp_path: Path) -> None:
    tuned, looped = Tuned(), Tuned()
    torch.manual_seed(1)
    search = trainer(FlatMinima(epsilon=0.1), default_root_dir=tmp_path, max_epochs=3)
    found = Tuner(search).lr_find(tuned, min_lr=1e-3, max_lr=1.0, num_training=12, update_attr=False)
    assert found is not None
    base = SGD(looped.parameters(), lr=1e-3, momentum=0.9)
    optimizer = flatmin.AMP(base, epsilon=0.1, model=looped)
    losses = by_hand(looped, optimizer, epochs=3, after_step=_ExponentialLR(optimizer, 1.0, 12).step)
    expected, mean = [], 0.0
    for count, loss in enumerate(losses, start=1):
        mean = 0.98 * mean + (1 - 0.98) * loss
        expected.append(mean / (1 - 0.98 ** (count + 1)))
    assert found.results["loss"] == expected


@pytest.mark.parametrize("first", [False, True])
def test_finders_among_the_callbacks_search_with_the_perturbation_and_training_goes_on(
    first: bool, tmp_path: Path
) -> None:
    for finder, steps in (
        (LearningRateFinder(max_lr=0.5, num_training_steps=16, early_stop_threshold=None), 16),
        (BatchSizeFinder(steps_per_trial=2, init_val=2, max_trials=2), 4),
    ):
        module = Tuned()
        callbacks = [FlatMinima(epsilon=0.1), finder]
        fitted = trainer(*(callbacks if first else reversed(callbacks)), default_root_dir=tmp_path, max_epochs=5)
        fitted.fit(module)
        trained = 5 * (24 // module.batch_size)
        assert module.passes == 2 * (steps + trained)
        assert fitted.global_step == trained
        assert isinstance(fitted.optimizers[0], PerturbedOptimizer)
        assert fitted.optimizers[0].param_groups[0]["lr"] == module.lr
        assert (module.lr, module.batch_size) != (0.1, 6)


@pytest.mark.parametrize("window", [1, 2])
def test_a_batch_that_fits_at_theta_alone_is_too_large(window: int, tmp_path: Path) -> None:
    module = Tuned(too_large=8)
    tuned = trainer(FlatMinima(epsilon=0.1), default_root_dir=tmp_path, accumulate_grad_batches=window, max_epochs=9)
    assert scale(Tuner(tuned), module, mode="binsearch", margin=0.0) == 7
    assert same(module.weights(), Tuned().weights())
    fits = 2 + 2 + 2 + 2  # steps with 2, 4, 6 and 7, and beside them the clean passes of 8
    assert module.passes == fits * window * 2 + window


# ---- several processes


KINDS = ["mlp", "accumulating", "manual", "batchnorm", "sharded", "tensor"]
if "sync_perturbation" in signature(flatmin.AMP).parameters:
    KINDS.append("own")  # a perturbation for each rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two processes wrote, which went through all kinds of training together."""
    folder = tmp_path_factory.mktemp("ranks")
    with reserved_port() as port:
        train_in_two_processes(folder, port)
    return folder


def train_in_two_processes(folder: Path, port: int) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    program = [sys.executable, "-m", "tests.integrations.trainers.lightning_ranks", str(folder)]
    program += [*KINDS, "resumed", "logged on one"]
    processes = []
    for rank in ("0", "1"):
        environment = {**os.environ, **shared, "PYTHONPATH": PYTHONPATH, "RANK": rank, "LOCAL_RANK": rank}
        processes.append(subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            _, said = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_stay_bitwise_equal(ranks: Path, kind: str) -> None:
    first, second = (torch.load(ranks / kind / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["steps"] == second["steps"] == 4
    for mine, others in zip(first["after_batches"], second["after_batches"], strict=True):
        assert same(mine, others)
    assert not same(first["after_batches"][0], first["after_batches"][-1])
    assert (first["grad_norm"] == second["grad_norm"]) == (kind != "own")  # the gradient that Δ came from


@pytest.mark.parametrize("kind", ["mlp", "accumulating", "manual", "sharded", "tensor"])
def test_two_processes_train_as_one_with_the_whole_batch(ranks: Path, tmp_path: Path, kind: str) -> None:
    """One perturbation for all, from the gradient of all."""
    lightning_ranks.train(tmp_path, kind, ranks=1)
    one, two = (torch.load(folder / "0.pt", weights_only=True) for folder in (tmp_path, ranks / kind))
    for mine, value in zip(two["after_batches"][-1], one["after_batches"][-1], strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)


def test_a_sharded_training_resumes_bit_for_bit_and_loading_runs_no_hooks(ranks: Path) -> None:
    """The checkpoint's ε counts, whatever the callback says."""
    through, resumed = (
        torch.load(ranks / "resumed" / part / "0.pt", weights_only=True) for part in ("through", "second")
    )
    assert (through["steps"], resumed["steps"], resumed["hooks"]) == (8, 8, 4)
    assert same(resumed["after_batches"][-1], through["after_batches"][-1])


@pytest.mark.parametrize("kind", ["callback", "module"])
def test_a_validation_loss_on_one_of_two_ranks_is_an_error_on_both(ranks: Path, kind: str) -> None:
    first, second = ((ranks / "logged on one" / f"{kind}-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    assert "got a new 'val_loss' on rank 0 and no new 'val_loss' on rank 1; log it on every rank" in first


# ---- the door


def test_wrong_settings_are_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match="AMP has no setting 'rho'; choose from epsilon, inner_lr"):
        FlatMinima(epsilon=0.1, rho=0.05)
    with pytest.raises(TypeError, match=r"without epsilon takes no settings, got inner_lr; add epsilon=0.1"):
        FlatMinima(inner_lr=0.5)
    with pytest.raises(TypeError, match=r"method must be flatmin.AMP or flatmin.RMP, got the class SGD"):
        FlatMinima(epsilon=0.1, method=SGD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon must be a finite number of at least 0, got -1"):
        fit(Module(), FlatMinima(epsilon=-1))


def test_a_callback_and_a_module_that_both_wrap_or_neither_are_refused() -> None:
    class Configured(Module):
        def configure_optimizers(self) -> Any:
            return flatmin.AMP(super().configure_optimizers(), epsilon=0.1)

    with pytest.raises(ValueError, match=r"already returned flatmin.AMP; leave out epsilon here, or the"):
        fit(Configured(), FlatMinima(epsilon=0.1))
    with pytest.raises(ValueError, match=r"got SGD; write FlatMinima\(epsilon=0.1\)"):
        fit(Module(), FlatMinima())


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_what_cannot_be_replayed_is_refused() -> None:
    class Iterating(Module):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(ValueError, match=r"write training_step\(self, batch, batch_idx\)"):
        fit(Iterating(), FlatMinima(epsilon=0.1))


def test_a_precision_plugin_with_a_step_of_its_own_is_refused() -> None:
    class Own(pl.plugins.precision.Precision):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().optimizer_step(*args, **kwargs)

    with pytest.raises(ValueError, match=r"works on one device, with DDP .* got SingleDeviceStrategy with Own"):
        fit(Module(), FlatMinima(epsilon=0.1), plugins=[Own()])


def test_a_manual_step_without_blocks_says_what_is_missing() -> None:
    class Forgetting(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    with pytest.raises(TypeError, match=r"use `with optimizer.perturbed\(\):`"):
        fit(Forgetting(), FlatMinima(epsilon=0.1))


def test_an_error_in_a_perturbed_pass_leaves_the_weights_and_the_module_as_they_were() -> None:
    class Failing(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.passes == 1:
                raise KeyError("in the perturbed pass")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError, match="in the perturbed pass"):
        fit(module, FlatMinima(epsilon=0.1))
    assert same(module.weights(), Module().weights())
    assert "log" not in vars(module)


def test_flatmin_imports_no_trainer_and_the_older_package_works_where_it_is_alone() -> None:
    if find_spec("pytorch_lightning") is None:
        pytest.skip("needs pytorch_lightning")
    program = [sys.executable, "-W", "ignore", "-m", "tests.integrations.trainers.pytorch_lightning_alone"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    subprocess.run(program, check=True, timeout=HANG_SECONDS, capture_output=True, text=True, env=environment)


# ---- what is shown to users

EXAMPLE = ROOT / "examples" / "with_lightning.py"
PAGE = ROOT / "docs" / "trainers_lightning.md"
ELSEWHERE = ("fabric", "ModelParallelStrategy")  # test_fabric.py and lightning_ranks.py run those
SNIPPETS = [text for text in code(PAGE) if not any(word in text for word in ELSEWHERE)]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_path(str(EXAMPLE), run_name="__main__")
    assert "test error" in capsys.readouterr().out


@pytest.mark.parametrize("text", SNIPPETS)
def test_the_blocks_of_the_page_run(text: str) -> None:
    class Quiet(pl.Trainer):
        def __init__(self, **settings: Any) -> None:
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
            super().__init__(accelerator="cpu", enable_model_summary=False, **quiet | settings)

    module, batches = Module(), loader()
    names: dict[str, Any] = {"pl": pl, "torch": torch, "flatmin": flatmin, "Trainer": Quiet, "FlatMinima": FlatMinima}
    exec(compile(text, str(PAGE), "exec"), names | {"module": module, "loader": batches, "Module": Module})


def test_wrong_values_and_two_callbacks_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="epsilon must be a finite number of at least 0, got -1"):
        FlatMinima(epsilon=-1)
    with pytest.raises(ValueError, match="unknown ball 'layer'"):
        FlatMinima(epsilon=0.1, ball="layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a Trainer takes one FlatMinima, got 2 of them; keep one"):
        fit(Module(), FlatMinima(epsilon=0.1), FlatMinima(epsilon=0.1))
