"""Run as a program: flatmin imports no trainer; a training where pytorch_lightning is there and `lightning` is not."""

import sys

import flatmin  # noqa: F401

assert not {"lightning", "pytorch_lightning", "torchmetrics"} & sys.modules.keys()
sys.modules["lightning"] = None  # type: ignore[assignment]

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flatmin.integrations.lightning import FlatMinima


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.passes = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.passes += 1
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    module = Net()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        accumulate_grad_batches=2,
        callbacks=[FlatMinima(epsilon=0.1)],  # type: ignore[list-item]  # mypy finds both packages
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,))), batch_size=6))
    assert trainer.global_step == 2
    assert module.passes == 8, module.passes
