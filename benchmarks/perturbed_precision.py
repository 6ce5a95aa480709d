"""How much of the sharpness L(θ + Δ) − L(θ) is left when a pass computes in less than float32.

A perturbation of length 0.1 over eleven million weights moves each of them by some 3e-5, and bfloat16 has three digits:
next to a weight of 0.02 its numbers lie 1e-4 apart. So most weights round to where they were, or a step too far. What
matters is the loss at the rounded point, and the gradient there, over batches: this measures both.

After a short training run, for batches of 50: Δ = ε∇L/‖∇L‖ in float32, and the pass at θ + Δ in each precision: under
autocast, or (bf16, fp16 weights) with the weights themselves rounded. The table
has the mean sharpness over the batches and its error against float64 (the mean of absolute differences, in % of the
mean sharpness), and the cosine between the gradient of that pass and float64's.

    python benchmarks/perturbed_precision.py [--batches 20] [--device cpu] [--json out/perturbed_precision.json]

On the CPU it is the small network on digits; on a GPU also PreActResNet18 on images made of noise and ten patterns.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from flatmin_lab import models
from flatmin_lab.data import load
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.system.machine import facts
from machine import command, line

EPSILONS = (0.05, 0.1, 0.5)
STEPS, BATCH = 300, 50
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = {"float64": torch.float64, "bf16 weights": torch.bfloat16, "fp16 weights": torch.float16}


def images(kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    if kind == "convnet":
        data = load("digits").train
        return Normalisation.of(data)(data.x).to(device), data.y.to(device)
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(5000) % 10
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    noise = torch.randn(5000, 3, 32, 32, generator=generator)
    return (patterns[y] * 0.1 + noise).to(device), y.to(device)


def batch(x: Tensor, y: Tensor, number: int) -> tuple[Tensor, Tensor]:
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(number))[:BATCH].to(x.device)
    return x[chosen], y[chosen]


def trained(kind: str, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"in_channels": x.shape[1]}
    model = models.build(kind, **settings).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for number in range(STEPS):
        optimizer.zero_grad()
        here, labels = batch(x, y, number)
        cross_entropy(model(here), labels).backward()
        optimizer.step()
    return model


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def loss_and_gradient(model: nn.Module, x: Tensor, y: Tensor, precision: str) -> tuple[float, Tensor]:
    dtype = WEIGHTS.get(precision, torch.float32)
    model = copy.deepcopy(model).to(dtype) if precision in WEIGHTS else model
    cast = (
        torch.autocast(x.device.type, AUTOCAST[precision], cache_enabled=False)
        if precision in AUTOCAST
        else nullcontext()
    )
    with tf32(precision == "tf32"), cast:
        loss = cross_entropy(model(x.to(dtype)).to(torch.float64), y)
    scale = 2.0**10 if precision in ("float16", "fp16 weights") else 1.0  # as a GradScaler would
    gradients = torch.autograd.grad(loss * scale, list(model.parameters()))
    return loss.item(), torch.cat([gradient.flatten().double() for gradient in gradients]) / scale


@contextmanager
def moved(model: nn.Module, delta: Tensor) -> Iterator[None]:
    params = list(model.parameters())
    theta = [p.detach().clone() for p in params]
    parts = delta.split([p.numel() for p in params])
    try:
        with torch.no_grad():
            for p, part in zip(params, parts, strict=True):
                p.add_(part.view_as(p).to(p.dtype))
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(params, theta, strict=True):
                p.copy_(value)


def measure(batches: int, device: torch.device) -> dict[str, Any]:
    kinds = ["convnet"] if device.type == "cpu" else ["convnet", "preactresnet18"]
    precisions = ["float32", *AUTOCAST, *list(WEIGHTS)[1:], *(["tf32"] if device.type == "cuda" else [])]
    rows = []
    for kind in kinds:
        x, y = images(kind, device)
        model = trained(kind, x, y)
        for epsilon in EPSILONS:
            rows += [
                {"model": kind, "epsilon": epsilon, **row}
                for row in compared(model, x, y, epsilon, precisions, batches)
            ]
    return {"batches": batches, "rows": rows, **facts(device)}


def compared(
    model: nn.Module, x: Tensor, y: Tensor, epsilon: float, precisions: list[str], batches: int
) -> list[dict[str, Any]]:
    sharpness: dict[str, list[float]] = {name: [] for name in ("float64", *precisions)}
    cosines: dict[str, list[float]] = {name: [] for name in precisions}
    for number in range(batches):
        here, labels = batch(x, y, 10_000 + number)
        _, gradient = loss_and_gradient(model, here, labels, "float32")
        delta = gradient * epsilon / gradient.norm()
        clean = {name: loss_and_gradient(model, here, labels, name)[0] for name in sharpness}
        with moved(model, delta):
            there = {name: loss_and_gradient(model, here, labels, name) for name in sharpness}
        for name, values in sharpness.items():
            values.append(there[name][0] - clean[name])
        for name in precisions:
            cosines[name].append(cosine_similarity(there[name][1], there["float64"][1], dim=0).item())
    exact = torch.tensor(sharpness["float64"])
    return [
        {
            "precision": name,
            "sharpness": torch.tensor(sharpness[name]).mean().item(),
            "exact": exact.mean().item(),
            "error_percent": 100 * ((torch.tensor(sharpness[name]) - exact).abs().mean() / exact.mean()).item(),
            "cosine": torch.tensor(cosines[name]).mean().item(),
        }
        for name in precisions
    ]


def show(result: dict[str, Any]) -> None:
    print(f"{result['batches']} batches of {BATCH}; {line(result)}\n")
    print(f"{'model':16}{'ε':>6}  {'precision':13}{'L(θ+Δ) − L(θ)':>15}{'exact':>10}{'error':>9}{'cosine':>10}")
    for row in result["rows"]:
        print(
            f"{row['model']:16}{row['epsilon']:6g}  {row['precision']:13}{row['sharpness']:15.5f}{row['exact']:10.5f}"
            f"{row['error_percent']:8.2f}%{row['cosine']:10.5f}"
        )


if __name__ == "__main__":
    command(__doc__, measure, show, counted="batches", default=20, json_file="out/perturbed_precision.json")
