"""The trace of the Hessian H, by Hutch++ (Meyer, Musco, Musco and Woodruff 2021).

    tr H = tr QᵀHQ + E gᵀ(I − QQᵀ)H(I − QQᵀ)g,     g of random signs

Q spans H times a few random vectors, where most of a Hessian with a few large eigenvalues lies: there the trace is
exact, and only the rest is estimated.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatmin.flatness.hessian import Product, RandomVectors, dot, hessian_products, orthogonal
from flatmin.flatness.risk import Loss, parts_of
from flatmin.flatness.weights import Weights


class Trace(NamedTuple):
    """The estimate, its standard error (0 if it is exact), and the number of products it took."""

    value: Tensor
    error: Tensor
    products: int


def trace(
    model: nn.Module,
    loss: Loss,
    *,
    products: int = 60,
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Trace:
    """The trace of the Hessian from this many products; exact if there are no more parameters than that.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> trace(layer, lambda model: (model(torch.tensor([[3.0, 4.0]])) ** 2).sum() / 2).value
    tensor(25.)
    """
    weights = Weights(model, parameters)
    random = RandomVectors(weights, generator)
    if products < min(6, random.dimension):
        raise ValueError(f"products must be at least 6, got {products}")
    with weights.movable(), hessian_products(weights, parts_of(loss)) as product:
        found = _estimate(product, random, products)
    if not bool(found.value.isfinite()):
        raise ValueError("the Hessian must be finite to have a trace, got nan or infinity at these weights")
    return found


def _estimate(product: Product, random: RandomVectors, products: int) -> Trace:
    third = products // 3
    if random.dimension <= products:
        rows = torch.eye(random.dimension, device=random.home, dtype=random.dtype)
        diagonal = torch.stack([product(row)[i] for i, row in enumerate(rows)])
        return Trace(diagonal.sum(), torch.zeros_like(diagonal[0]), random.dimension)
    sketch = torch.stack([product(random.signs()) for _ in range(third)], dim=1)
    basis, _ = torch.linalg.qr(sketch)
    columns = list(basis.T.contiguous())
    exact = torch.stack([dot(q, product(q)) for q in columns]).sum()
    rest = []
    for _ in range(products - 2 * third):
        g = orthogonal(random.signs(), columns)
        rest.append(dot(g, product(g)))
    samples = torch.stack(rest)
    return Trace(exact + samples.mean(), samples.std() / len(samples) ** 0.5, products)
