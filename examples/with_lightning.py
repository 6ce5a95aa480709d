"""AMP in Lightning: one callback, and nothing else in the module or the Trainer changes.

Two spiral arms, one training label in five is wrong. A few seconds show how it is used, not how much it
helps.

    python examples/with_lightning.py

(The file is not called lightning.py, which would hide the package of that name from it.)
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flatmin.integrations.lightning import FlatMinima


class Spiral(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def spiral(points: int, *, wrong: float) -> TensorDataset:
    radius, y = torch.rand(points).sqrt(), torch.randint(0, 2, (points,))
    angle = 3 * torch.pi * radius + torch.pi * y
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + 0.02 * torch.randn(points, 2)
    return TensorDataset(2 * x, torch.where(torch.rand(points) < wrong, 1 - y, y))


def main() -> None:
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    train, test = DataLoader(spiral(400, wrong=0.2), batch_size=50, shuffle=True), spiral(4000, wrong=0.0)
    module = Spiral()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=60,
        callbacks=[FlatMinima(epsilon=0.2)],  # the one change
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, train)
    x, y = test.tensors
    with torch.no_grad():
        wrong = module.net(x).argmax(dim=1) != y
    print(f"test error {wrong.float().mean():.1%} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
