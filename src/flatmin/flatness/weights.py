"""The weights θ of a model, which are moved to θ + Δ and always put back.

They are moved in place, so that any model will do, also a compiled one or one that keeps references to its weights.
Copies of all of them are taken first and copied back: p + d − d ≠ p in floating point.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatmin.attacks import evaluating
from flatmin.snapshot import Snapshot
from flatmin.tensors import Copies, wide


class Weights:
    """θ: the parameters that require a gradient, or those given.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> weights, before = Weights(layer), layer.weight.item()
    >>> with weights.movable():
    ...     weights.move([torch.ones(1, 1)])
    ...     layer.weight.item() == before + 1
    True
    >>> layer.weight.item() == before
    True
    """

    def __init__(self, model: Callable[..., Any], parameters: Iterable[Tensor] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        chosen = model.parameters() if parameters is None else parameters
        self.model = model
        self.tensors = [p for p in dict.fromkeys(chosen) if p.requires_grad]
        if not self.tensors:
            raise ValueError(
                "the model must have parameters that require a gradient, got none; call model.requires_grad_()"
            )
        for p in self.tensors:
            if hasattr(p, "placements") or not p.is_floating_point():
                raise TypeError(
                    f"flatness is measured of whole, real parameters, got {type(p.data).__name__} of {p.dtype}; "
                    "gather a sharded model first"
                )
        self._theta: Copies[Tensor] = Copies()

    @property
    def dimension(self) -> int:
        return sum(p.numel() for p in self.tensors)

    @contextmanager
    def movable(self) -> Iterator[None]:
        """The model in eval mode; when the block ends, however it ends, everything is as it was."""
        buffers = Snapshot(self.model)
        buffers.take_buffers()
        self._theta.take({p: p for p in self.tensors})
        try:
            with torch.inference_mode(False), evaluating(self.model):
                yield
        finally:
            self._theta.put_back({p: p for p in self.tensors})
            buffers.put_back_buffers()

    @torch.no_grad()
    def move(self, delta: Sequence[Tensor]) -> None:
        """To θ + Δ, added in float32 at least."""
        for p, d in zip(self.tensors, delta, strict=True):
            theta = self._theta[p]
            p.copy_(theta.to(wide(theta)) + d.to(theta.device))

    def home(self) -> None:
        """To θ."""
        self._theta.put_back({p: p for p in self.tensors})

    def zeros(self) -> list[Tensor]:
        """A Δ of 0, in float32 at least."""
        return [torch.zeros_like(p, dtype=wide(p), requires_grad=False) for p in self.tensors]


def check_radius(epsilon: float) -> None:
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")


def own_generator(generator: torch.Generator | None) -> torch.Generator:
    """The one given, or a new one with seed 0: the same numbers every time, and on every device."""
    return torch.Generator().manual_seed(0) if generator is None else generator
