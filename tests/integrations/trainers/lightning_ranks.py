"""One rank of training runs with Lightning, started as torchrun would; it writes the weights after every step.

With DDP, or with ModelParallelStrategy: `sharded` is the code of the page, `tensor` cuts the layers up.

RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ... python lightning_ranks.py FOLDER mlp batchnorm
"""

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import flatmin
from flatmin.integrations.lightning import FlatMinima
from tests import ROOT
from tests.integrations.ranks.overflow import whole
from tests.support.doc_blocks import blocks

PAGE = ROOT / "docs" / "trainers_lightning.md"
SHARDED = next(block.text for block in blocks(PAGE, "python") if "ModelParallelStrategy" in block.text)
SETTINGS: dict[str, dict[str, Any]] = {"own": {"sync_perturbation": False}}  # of the callback
WINDOW = {"accumulating": 2}


class Net(pl.LightningModule):
    """Batches of 6 in all, 3 a rank, four steps."""

    def __init__(self, kind: str = "mlp") -> None:
        super().__init__()
        torch.manual_seed(0)
        middle: nn.Module = nn.BatchNorm1d(8) if kind == "batchnorm" else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))
        self.automatic_optimization = kind != "manual"
        self.kind = kind
        self.hooks = 0
        self.after_batches: list[list[Tensor]] = []

    def configure_model(self) -> None:
        if self.kind == "tensor" and self.device_mesh is not None:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with optimizer.perturbed():
            self.manual_backward(self.loss(batch))
        optimizer.step()
        return None

    def on_train_batch_end(self, *_: object) -> None:
        self.after_batches.append(whole(self.parameters()))

    def on_before_optimizer_step(self, *_: object) -> None:
        self.hooks += 1

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.5, momentum=0.9)


class Writing(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        last: Any = trainer.optimizers[0].last  # type: ignore[attr-defined]
        result = {"after_batches": pl_module.after_batches, "steps": trainer.global_step, "grad_norm": last.grad_norm}
        torch.save({**result, "hooks": pl_module.hooks}, self.folder / f"{trainer.global_rank}.pt")


def quiet_trainer(folder: Path, **settings: Any) -> pl.Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(flags, False)}
    callbacks = [*settings.pop("callbacks"), Writing(folder)]
    return pl.Trainer(callbacks=callbacks, use_distributed_sampler=False, **quiet | settings)  # it would shuffle


def batches(*, ranks: int, steps: int = 4) -> DataLoader[Any]:
    """Of 6 in all: this rank's share."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(6 * steps, 6, generator=generator), torch.randint(0, 3, (6 * steps,), generator=generator)
    own = range(int(os.environ["RANK"]) if ranks > 1 else 0, len(y), ranks)
    return DataLoader(TensorDataset(x, y), batch_size=6 // ranks, sampler=own)


def train(folder: Path, kind: str, *, ranks: int) -> None:
    if kind == "sharded" and ranks > 1:
        train_sharded(folder)
        return
    window = WINDOW.get(kind, 1)
    strategy: Any = "auto" if ranks == 1 else "ddp"
    if kind == "tensor" and ranks > 1:
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
    trainer = quiet_trainer(
        folder,
        devices=ranks,
        strategy=strategy,
        accumulate_grad_batches=window,
        callbacks=[FlatMinima(epsilon=0.1, **SETTINGS.get(kind, {}))],
    )
    trainer.fit(Net(kind), batches(ranks=1 if kind == "tensor" else ranks, steps=4 * window))


def train_sharded(folder: Path, *, code: str = SHARDED, **settings: Any) -> pl.Trainer:
    """The code of the page."""
    names: dict[str, Any] = {"Module": Net, "loader": batches(ranks=2), "FlatMinima": FlatMinima}
    names["Trainer"] = partial(quiet_trainer, folder, **settings)
    exec(compile(code, str(PAGE), "exec"), names)
    trained: pl.Trainer = names["trainer"]
    return trained


def resume(folder: Path) -> None:
    """Two epochs, and the same with a break; after it the callback has another ε."""
    train_sharded(folder / "through", max_epochs=2)
    train_sharded(folder / "first").save_checkpoint(folder / "checkpoint")
    again = SHARDED.replace("epsilon=0.1", "epsilon=0.3").replace(
        "loader)", f"loader, ckpt_path='{folder}/checkpoint')"
    )
    train_sharded(folder / "second", code=again, max_epochs=2)


class LoggedOnOne(Net):
    """Its validation loss is logged on rank 0 alone."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.log("val_loss", self.loss(batch), rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        base = super().configure_optimizers()
        return base if self.kind == "callback" else flatmin.AMP(base, epsilon="auto", model=self)


def match_on_one(folder: Path) -> None:
    """What each rank is told: with an automatic radius of the callback, and with one of the module."""
    for kind in ("callback", "module"):
        callback = FlatMinima(epsilon="auto") if kind == "callback" else FlatMinima()
        trainer = quiet_trainer(folder, devices=2, strategy="ddp", num_sanity_val_steps=0, callbacks=[callback])
        try:
            trainer.fit(LoggedOnOne(kind), batches(ranks=2), batches(ranks=2))
        except ValueError as error:
            (folder / f"{kind}-{trainer.global_rank}.txt").write_text(str(error))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for kind in sys.argv[2:]:
        folder = Path(sys.argv[1]) / kind
        if kind == "resumed":
            resume(folder)
        elif kind == "logged on one":
            match_on_one(folder)
        else:
            train(folder, kind, ranks=2)
