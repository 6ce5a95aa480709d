"""AMP in an ordinary loop: autocast, a gradient scaler, accumulation, clipping, an EMA of the weights.

The lines that an ordinary loop does not have are marked `new`. Micro-batches are kept in a list until their step.

    python examples/plain_loop.py [--epsilon 0.1] [--epochs 8]
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import flatmin


def stripes(rows: int, *, seed: int) -> TensorDataset:
    """Images of 8×8 with horizontal, vertical or diagonal stripes, and noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (rows,), generator=generator)
    down, across = torch.arange(8).view(8, 1).expand(8, 8), torch.arange(8).expand(8, 8)
    along = torch.stack([down, across, down + across])[y] + torch.randint(0, 4, (rows, 1, 1), generator=generator)
    x = (along // 2 % 2).float() + 0.5 * torch.randn(rows, 8, 8, generator=generator)
    return TensorDataset(x.unsqueeze(1), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    device, accumulate = "cuda" if torch.cuda.is_available() else "cpu", 2
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 3)]
    model = nn.Sequential(*layers).to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    optimizer = flatmin.AMP(base, epsilon=options.epsilon, model=model)  # new
    scaler, loader = torch.amp.GradScaler(device), DataLoader(stripes(512, seed=0), batch_size=16, shuffle=True)

    def run(window: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in window:
            with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
                loss = cross_entropy(model(x.to(device)), y.to(device)) / len(window)
            scaler.scale(loss).backward()

    for _ in range(options.epochs):
        batches = list(loader)
        for at in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            run(batches[at : at + accumulate])
            with optimizer.perturbed(scaler=scaler):  # new: all micro-batches of the step again, at θ + Δ
                run(batches[at : at + accumulate])  # new
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            ema.update_parameters(model)

    x, y = stripes(1000, seed=1).tensors
    error = (ema.eval()(x.to(device)).argmax(dim=1).cpu() != y).float().mean()
    print(f"error of the EMA on new images {error:.1%}")


if __name__ == "__main__":
    main()
