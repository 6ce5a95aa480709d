"""Does AMP help me? Three training loops of your own, to be compared with and without it.

Each function returns a training loop that has not started, with its batches and with held-out data:

    flatmin compare examples/worth_it.py:wrong_labels          a convolutional network; a fifth of the labels is wrong
    flatmin compare examples/worth_it.py:breast_cancer         a perceptron on 30 measurements of 426 tumours
    flatmin compare examples/worth_it.py:transformer           a transformer that reads a digit line by line

or, from Python with torch alone, `print(flatmin.compare(wrong_labels, seeds=3))`. `flatmin doctor` takes the same
functions, and says whether a training is set up right.
"""

from typing import Any

import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # the networks are small: threads would only wait for one another


def training(model: nn.Module, optimizer: Optimizer, data: list[Tensor], *, train: int, epochs: int) -> dict[str, Any]:
    """A training on the first images or measurements, with the rest held out."""
    x, y, truth = data

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return {
        "model": model,
        "optimizer": optimizer,
        "closure": closure,
        "batches": DataLoader(TensorDataset(x[:train], y[:train]), batch_size=50, shuffle=True),
        "held_out": DataLoader(TensorDataset(x[train:], truth[train:]), batch_size=500),
        "scheduler": CosineAnnealingLR(optimizer, epochs),
        "epochs": epochs,
    }


def shuffled(x: Tensor, y: Tensor, *, wrong: float = 0.0) -> list[Tensor]:
    """Inputs, labels of which some are wrong, and the true ones; the same for every training."""
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=random)
    x, y = x[order], y[order]
    is_wrong = torch.rand(len(y), generator=random) < wrong
    others = (y + torch.randint(1, int(y.max()) + 1, y.shape, generator=random)) % (int(y.max()) + 1)
    return [x, torch.where(is_wrong, others, y), y]


def digits(*, wrong: float = 0.0) -> list[Tensor]:
    """1797 images of 8×8."""
    found = load_digits()
    return shuffled(torch.tensor(found.images, dtype=torch.float32) / 8 - 1, torch.tensor(found.target), wrong=wrong)


def wrong_labels() -> dict[str, Any]:
    """Where AMP is strong: it does not memorise single wrong labels."""
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(768, 10)),
    )
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    return training(model, optimizer, digits(wrong=0.2), train=1000, epochs=30)


def breast_cancer() -> dict[str, Any]:
    """Where there is little to gain: most of what is left is noise in the data."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    data = shuffled(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return training(model, AdamW(model.parameters(), lr=1e-3), data, train=426, epochs=30)


class Lines(nn.Module):
    """A transformer whose tokens are the eight lines of a digit."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.lines, self.places = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.lines(x) + self.places).mean(dim=1))
        return logits


def transformer() -> dict[str, Any]:
    """Small data for a transformer: 500 digits."""
    model = Lines()
    return training(model, AdamW(model.parameters(), lr=2e-3), digits(), train=500, epochs=30)
