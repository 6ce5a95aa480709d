"""The Hessian H = ∇²L(θ) through its products with vectors: Hv = ∇(∇L·v), two passes each.

Vectors are flat: all parameters in a row, in at least float32. A model with ReLU is piecewise smooth: its Hessian is
that of the piece in which θ lies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatmin.ball import norms
from flatmin.core.tensors import compute_dtype
from flatmin.flatness.risk import INDEPENDENT_LOSS, LossPart, check_loss, dense, gradient_of
from flatmin.flatness.weights import Weights, derived_generator

Product = Callable[[Tensor], Tensor]
_ROW = 4096  # numbers added at a time on the CPU (see `dot`)


@contextmanager
def hessian_products(weights: Weights, parts: Sequence[LossPart]) -> Iterator[Product]:
    """The function v ↦ Hv. If L has one part, the graph of its gradient is kept; with several, each is rebuilt."""
    tensors, sizes = weights.tensors, [p.numel() for p in weights.tensors]
    home, dtype = tensors[0].device, compute_dtype(tensors[0])

    def gradient(part: LossPart) -> list[Tensor] | None:
        return gradient_of(check_loss(part(weights.model)), tensors, create_graph=True)

    # the fast attention kernels have no second derivative, nor do compiled functions
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
        kept = gradient(parts[0]) if len(parts) == 1 else None

        def product(v: Tensor) -> Tensor:
            pieces = zip(v.split(sizes), tensors, strict=True)
            along = [piece.view(p.shape).to(p.device, p.dtype) for piece, p in pieces]
            total, depends = torch.zeros_like(v), False
            weights.replay()
            for part in parts:
                slopes = gradient(part) if kept is None else kept
                depends |= slopes is not None
                moving = [(s, a) for s, a in zip(slopes or [], along, strict=False) if s.requires_grad]
                if not moving:  # L is linear in θ, or does not depend on it
                    continue
                found = torch.autograd.grad(
                    [s for s, _ in moving],
                    tensors,
                    [a for _, a in moving],
                    retain_graph=kept is not None,
                    materialize_grads=True,
                )
                total += torch.cat([dense(piece.detach()).reshape(-1).to(home, dtype) for piece in found])
            if not depends:
                raise ValueError(INDEPENDENT_LOSS)
            return total

        yield product


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The product a·b. On the CPU row by row: a single sum of ten million float32 products loses three digits."""
    if a.device.type != "cpu" or a.numel() < _ROW:
        return a @ b
    even = a.numel() // _ROW * _ROW
    rows = (a[:even].view(-1, _ROW) * b[:even].view(-1, _ROW)).sum(dim=1)
    return (rows.double().sum() + a[even:] @ b[even:]).to(a.dtype)


def length(v: Tensor) -> Tensor:
    return norms([v])[0]


def orthogonal(w: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """The part of w that the basis does not span."""
    for _ in range(2):  # once is not enough, because of rounding
        for q in basis:
            w = w - dot(q, w) * q
    return w


class RandomVectors:
    """Flat random vectors in the space of the weights."""

    def __init__(self, weights: Weights, generator: torch.Generator | None) -> None:
        first = weights.tensors[0]
        self.home, self.dtype = first.device, compute_dtype(first)
        self.dimension = weights.dimension
        self.generator = derived_generator(generator)

    def normal(self) -> Tensor:
        where = self.generator.device
        drawn = torch.randn(self.dimension, generator=self.generator, device=where, dtype=torch.float32)
        return drawn.to(self.home, self.dtype)

    def signs(self) -> Tensor:
        where = self.generator.device
        bits = torch.randint(0, 2, (self.dimension,), generator=self.generator, device=where)
        return bits.to(self.home, self.dtype) * 2 - 1
