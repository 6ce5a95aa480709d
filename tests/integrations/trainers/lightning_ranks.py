"""One rank of training runs with Lightning's DDP, started as torchrun would; it writes the weights after every step.

RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ... python lightning_ranks.py FOLDER mlp batchnorm
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from flatmin.integrations.lightning import FlatMinima

SETTINGS: dict[str, dict[str, Any]] = {"own": {"sync_perturbation": False}}  # of the callback
WINDOW = {"accumulating": 2}


class Net(pl.LightningModule):
    """Batches of 6 in all, 3 a rank, four steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle: nn.Module = nn.BatchNorm1d(8) if kind == "batchnorm" else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))
        self.automatic_optimization = kind != "manual"
        self.after_batches: list[list[Tensor]] = []

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
        self.after_batches.append([param.detach().clone() for param in self.parameters()])

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.5, momentum=0.9)


class Writing(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        last: Any = trainer.optimizers[0].last  # type: ignore[attr-defined]
        result = {"after_batches": pl_module.after_batches, "steps": trainer.global_step, "grad_norm": last.grad_norm}
        torch.save(result, self.folder / f"{trainer.global_rank}.pt")


def train(folder: Path, kind: str, *, ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    window = WINDOW.get(kind, 1)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24 * window, 6, generator=generator), torch.randint(0, 3, (24 * window,), generator=generator)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=1,
        use_distributed_sampler=False,  # it would shuffle
        accumulate_grad_batches=window,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[FlatMinima(epsilon=0.1, **SETTINGS.get(kind, {})), Writing(folder)],
    )
    own = range(int(os.environ["RANK"]) if ranks > 1 else 0, len(y), ranks)
    trainer.fit(Net(kind), DataLoader(TensorDataset(x, y), batch_size=6 // ranks, sampler=own))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for kind in sys.argv[2:]:
        train(Path(sys.argv[1]) / kind, kind, ranks=2)
