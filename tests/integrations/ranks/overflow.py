"""A gradient that overflows on the last rank alone, in the clean pass of the second of three steps."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from flatmin import AMP
from flatmin.core.tensors import plain
from tests.support.cases import Setup


def whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def overflow_once(case: Setup, optimizer: AMP, *, scaled: bool, less: bool = False) -> dict[str, Any]:
    """What every rank saw: which steps were skipped, which moved the weights, and what is left of the scale.

    With `less`, the first pass of each step has the first rows alone.
    """
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    here = dist.get_rank() == dist.get_world_size() - 1
    calls, skipped, moved = 0, [], []

    def closure(case: Setup = case) -> Tensor:
        nonlocal calls
        optimizer.zero_grad()
        loss = case.loss()
        scaler.scale(loss).backward()
        if calls == 2 and here:
            for param in case.model.parameters():
                assert param.grad is not None
                plain(param.grad).fill_(float("inf"))
        calls += 1
        return loss

    first = partial(closure, Setup(case.model, case.x[:2], case.y[:2])) if less else None
    for _ in range(3):
        before = whole(case.model.parameters())
        optimizer.step(closure, ascent=first, scaler=scaler)
        scaler.update()
        skipped.append(bool(optimizer.last.skipped))
        after = whole(case.model.parameters())
        moved.append(not all(torch.equal(a, b) for a, b in zip(after, before, strict=True)))
    return {"weights": after, "skipped": skipped, "moved": moved, "scale": scaler.get_scale()}
