"""Accelerate with AMP: two moons, micro-batches that are accumulated, clipping and a schedule.

python examples/with_accelerate.py [--epsilon 0.1] [--epochs 10]           or: accelerate launch examples/…
"""

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import flatmin
from flatmin.integrations.accelerate import Window


def moons(rows: int, *, seed: int) -> TensorDataset:
    """Two half circles that reach into one another, with noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (rows,), generator=generator)
    angle = torch.pi * torch.rand(rows, generator=generator)
    x = torch.stack([angle.cos() + y, (1 - 2 * y) * angle.sin() + 0.5 * y], dim=1)
    return TensorDataset(x + 0.2 * torch.randn(rows, 2, generator=generator), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer = flatmin.AMP(optimizer, epsilon=options.epsilon, model=model)  # new
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(moons(512, seed=0), batch_size=16, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    window = Window(accelerator, model, optimizer)  # new

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    for _ in range(options.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                window.backward(loss_of, x, y)  # was: accelerator.backward(loss_of(x, y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    model.eval()
    x, y = moons(1000, seed=1).tensors
    with torch.no_grad():
        error = (model(x.to(accelerator.device)).argmax(dim=1).cpu() != y).float().mean()
    accelerator.print(f"error on new points {error:.1%}")


if __name__ == "__main__":
    main()
