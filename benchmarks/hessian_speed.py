"""How long products with the Hessian take, beside curvlinops and PyHessian: ours divided by theirs.

The network is PreActResNet18 on a GPU and the laboratory's convolutional one on the CPU, in eval mode and float32. Each
contender makes the same number of products with the Hessian of one batch, which it may keep a graph of, and of the same
examples as several batches; they take turns, because machines are noisy. curvlinops also gets all vectors at once,
as a matrix. What is not installed is left out.

    python benchmarks/hessian_speed.py [--turns 10] [--device cpu] [--json out/hessian_speed.json]
"""

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from flatmin import flatness
from flatmin_lab import models
from flatmin_lab.system.machine import facts
from hessian_oracles import curvlinops, its_surroundings, products
from machine import command, in_turns, line

PRODUCTS, IMAGES = 10, 400
BATCHES = {"one batch": IMAGES, "four batches": IMAGES // 4}

Runs = dict[str, Callable[[], object]]


def network(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if device.type == "cuda":
        return models.build("preactresnet18").to(device).eval(), torch.randn(IMAGES, 3, 32, 32, device=device)
    return models.build("convnet", in_channels=1, width=16).eval(), torch.randn(IMAGES, 1, 8, 8)


def contenders(model: nn.Module, x: Tensor, y: Tensor, size: int) -> Runs:
    vectors = [torch.randn(sum(p.numel() for p in model.parameters()), device=x.device) for _ in range(PRODUCTS)]
    batches = list(zip(x.split(size), y.split(size), strict=True))
    risk = flatness.empirical_risk(x, y, batch_size=size)
    runs: Runs = {"flatmin": partial(products, model, risk, vectors)}
    if find_spec("pyhessian") is not None:
        runs["pyhessian"] = partial(_pyhessian, copy.deepcopy(model), batches, vectors)
    if find_spec("curvlinops") is not None:
        runs["curvlinops"] = partial(_curvlinops, model, batches, [v[:, None] for v in vectors])
        runs["curvlinops, a matrix"] = partial(_curvlinops, model, batches, [torch.stack(vectors, dim=1)])
    return runs


def _pyhessian(model: nn.Module, batches: list[tuple[Tensor, Tensor]], vectors: list[Tensor]) -> None:
    sizes = [p.numel() for p in model.parameters()]
    given: dict[str, Any] = {"data": batches[0]} if len(batches) == 1 else {"dataloader": batches}
    model.zero_grad()
    with its_surroundings(torch.float32):
        found = import_module("pyhessian").hessian(model, nn.CrossEntropyLoss(), cuda=batches[0][0].is_cuda, **given)
        for v in vectors:
            pieces = [piece.view(p.shape) for piece, p in zip(v.split(sizes), model.parameters(), strict=True)]
            if len(batches) == 1:
                import_module("pyhessian.utils").hessian_vector_product(found.gradsH, found.params, pieces)
            else:
                found.dataloader_hv_product(pieces)
    model.zero_grad()  # or the graphs stay


def _curvlinops(model: nn.Module, batches: list[tuple[Tensor, Tensor]], matrices: list[Tensor]) -> None:
    operator = curvlinops().HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), batches, check_deterministic=False
    )
    for matrix in matrices:
        operator @ matrix


def measure(turns: int, device: torch.device) -> dict[str, Any]:
    model, x = network(device)
    y = torch.arange(IMAGES, device=device) % 10
    rows = {
        what: in_turns(contenders(model, x, y, size), device, turns=turns, warmup_turns=2)
        for what, size in BATCHES.items()
    }
    return {**facts(device), "turns": turns, "products": PRODUCTS, "images": IMAGES, "rows": rows}


def show(result: dict[str, Any]) -> None:
    print(line(result))
    print(f"ms for {result['products']} products, {result['images']} images: median (quartiles), ours / theirs\n")
    for what, row in result["rows"].items():
        for name, (low, middle, high) in row.items():
            ratio = row["flatmin"][1] / middle
            print(f"{what:16}{name:24}{middle:10.1f} ({low:.1f} to {high:.1f}){ratio:10.2f}")


if __name__ == "__main__":
    command(__doc__, measure, show, counted="turns", default=10, json_file="out/hessian_speed.json")
