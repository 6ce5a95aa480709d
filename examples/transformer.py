"""A small transformer on digits with wrong labels: AdamW alone, AMP with a fixed radius, and with one that is matched.

A digit of 8×8 is a sequence of 16 patches. For `auto` a tenth of the training set is held out, with labels that are
wrong as often as the rest's, for the first 60 % of training. Then it is trained on too, and ε stays as it is.

    python examples/transformer.py [--epsilon 0 0.1 auto] [--noise 0.2] [--epochs 30] [--seeds 3]

`--start 0.5` perturbs in the second half alone, at three quarters of AMP's passes. With ε = 0.12 that ended at an error
of 5.39 ± 0.86 % and an NLL of 0.324 ± 0.028, AMP in all steps at 6.65 ± 1.05 and 0.359 ± 0.032, AdamW alone at 8.56 ±
1.57 and 0.359 ± 0.042 (n = 20, one CPU core).
"""

import argparse
from statistics import mean, stdev

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatmin
from flatmin import metrics

BATCH = 50
MATCHED = 0.6  # the share of the perturbed part of training in which ε is adjusted


class Transformer(nn.Module):
    """Patches of 2×2, two layers of attention, the mean over the patches."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.layers(tokens).mean(dim=1))
        return logits


def digits(noise: float, *, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images and labels; of the former, a share is wrong."""
    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # the same test images for all seeds
    x, y = x[order], y[order]
    train, test = slice(360, None), slice(360)
    labels, draw = y[train].clone(), torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(labels), generator=draw) < noise
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (int(wrong.sum()),), generator=draw)) % 10
    return x[train], labels, x[test], y[test]


def trained(epsilon: str, noise: float, epochs: int, seed: int, start: float) -> tuple[float, float, float]:
    """Test error in %, test NLL, and the last radius."""
    x, y, x_test, y_test = digits(noise, seed=seed)
    torch.manual_seed(seed)
    model = Transformer()
    base = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    optimizer = flatmin.AMP(base, epsilon="auto" if epsilon == "auto" else float(epsilon), model=model)
    steps, kept = len(x) // BATCH, len(x) - len(x) // 10
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=epochs * steps)
    late = flatmin.RadiusScheduler(optimizer, epochs * steps, start=start)
    for epoch in range(epochs):
        model.train()
        is_matched = epsilon == "auto" and epoch < round((start + (1 - start) * MATCHED) * epochs)
        order = torch.randperm(kept if is_matched else len(x))
        if is_matched:  # as many steps as in the other epochs
            order = torch.cat([order, torch.randperm(kept)])
        for index in order.split(BATCH)[:steps]:

            def closure(index: Tensor = index) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(x[index]), y[index])
                loss.backward()
                return loss

            optimizer.step(closure)
            rate.step()
            late.step()
        model.eval()
        if is_matched:
            with torch.no_grad():
                optimizer.radius.step(cross_entropy(model(x[kept:]), y[kept:]))
    with torch.no_grad():
        logits = model(x_test)
    last = float(optimizer.param_groups[0]["epsilon"])
    return 100 * float(metrics.error(logits, y_test)), float(metrics.nll(logits, y_test)), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", nargs="+", default=["0", "0.1", "auto"], help="0 is AdamW alone")
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start", type=float, default=0.0, help="the share of the training without a perturbation")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    print(f"{options.noise:.0%} wrong labels, {options.epochs} epochs, n = {options.seeds}")
    print(f"{'ε':>6}  {'error, %':>14}  {'NLL':>15}  last ε")
    for epsilon in options.epsilon:
        runs = [trained(epsilon, options.noise, options.epochs, seed, options.start) for seed in range(options.seeds)]
        error, nll, radius = zip(*runs, strict=True)
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in (error, nll)]
        numbers = f"{mean(error):6.2f} ± {spread[0]:5.2f}  {mean(nll):7.3f} ± {spread[1]:5.3f}"
        print(f"{epsilon:>6}  {numbers}  {min(radius):.3f} to {max(radius):.3f}", flush=True)


if __name__ == "__main__":
    main()
