"""The largest eigenvalues of the Hessian H, by Lanczos' method.

It builds an orthonormal basis Q of {v, Hv, H²v, …}, with a random v, in which H is tridiagonal: T = QᵀHQ. The largest
eigenvalues of T converge to those of H first. Let q be the last vector, β the norm of the part of Hq outside the span,
and s an eigenvector of T: some eigenvalue of H lies within β·|last entry of s| of that of T. This is the error that is
returned.

Each new vector is made orthogonal to all before it, twice: otherwise rounding lets the same eigenvalue appear again and
again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatmin.flatness.hessian import Product, RandomVectors, dot, hessian_products, length, orthogonal
from flatmin.flatness.risk import Loss, parts_of
from flatmin.flatness.weights import Weights

MIN_PRODUCTS = 10  # besides k: a random vector hardly sees one eigenvalue among many equal ones


class Eigenvalues(NamedTuple):
    """The largest eigenvalues, descending. Apart from rounding, there is an eigenvalue within `errors` of each."""

    values: Tensor
    errors: Tensor
    vectors: list[list[Tensor]]  # one direction for each, of length 1
    products: int  # with the Hessian, in total


def top_eigenvalue(
    model: nn.Module,
    loss: Loss,
    *,
    max_products: int = 100,
    tolerance: float = 1e-4,
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The largest eigenvalue of the Hessian; `top_eigenvalues` also returns its error.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> top_eigenvalue(layer, lambda model: (model(torch.tensor([[3.0, 4.0]])) ** 2).sum() / 2)      # xxᵀ
    tensor(25.)
    """
    found = top_eigenvalues(
        model, loss, max_products=max_products, tolerance=tolerance, parameters=parameters, generator=generator
    )
    return found.values[0]


def top_eigenvalues(
    model: nn.Module,
    loss: Loss,
    *,
    k: int = 1,
    max_products: int = 100,
    tolerance: float = 1e-4,
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Eigenvalues:
    """The k largest eigenvalues, refined until each error is below `tolerance` times the largest of them.

    At least 10 + k products are taken, and at most `max_products`: a random vector hardly sees a single eigenvalue that
    stands out among many equal ones, and stopping early would miss it. An eigenvalue that occurs twice is found once,
    unless `max_products` reaches the number of parameters; make it a few times k. Each product stores a vector as large
    as all parameters.
    """
    weights = Weights(model, parameters)
    dimension = weights.dimension
    if not 1 <= k <= min(dimension, max_products):
        raise ValueError(
            f"k must be from 1 to the {dimension} parameters, and max_products at least k, got {k} and {max_products}"
        )
    random = RandomVectors(weights, generator)
    with weights.movable(), hessian_products(weights, parts_of(loss)) as product:
        return _lanczos(product, weights, random, k, min(max_products, dimension), tolerance)


def _lanczos(
    product: Product,
    weights: Weights,
    random: RandomVectors,
    k: int,
    most: int,
    tolerance: float,
) -> Eigenvalues:
    rounding = 8 * torch.finfo(random.dtype).eps
    least = min(most, MIN_PRODUCTS + k)
    basis = [_orthonormal(random.normal(), [])]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    while True:
        entry, w, left = lanczos_step(product, basis)
        diagonal.append(entry)
        values, turned = tridiagonal_eigenvectors(diagonal, off_diagonal)
        errors = left * turned[-1].abs()
        reach = rounding * float(values.abs().max())  # differences below this are rounding
        close = float(errors[:k].max()) <= max(tolerance * float(values[:k].abs().max()), reach)
        # if all products fit, take them all: then an eigenvalue is found as often as it occurs
        if len(diagonal) == most or (close and len(diagonal) >= least and most < random.dimension):
            break
        ended = left <= reach  # H maps the span to itself: continue with another vector
        basis.append(_orthonormal(random.normal(), basis) if ended else w / left)
        off_diagonal.append(0.0 if ended else left)
    vectors = []
    for mix in turned[:, :k].T.tolist():
        flat = sum((share * q for share, q in zip(mix[1:], basis[1:], strict=True)), mix[0] * basis[0])
        vectors.append(_shaped(flat, weights.tensors))
    found, near = (numbers[:k].to(random.home, random.dtype) for numbers in (values, errors))
    return Eigenvalues(found, near, vectors, len(diagonal))


def lanczos_step(product: Product, basis: Sequence[Tensor]) -> tuple[float, Tensor, float]:
    """The next diagonal entry of T; then the part of H times the last vector beyond the basis, and its length."""
    w = product(basis[-1])
    entry = float(dot(w, basis[-1]))
    beyond = orthogonal(w, basis)
    return entry, beyond, float(length(beyond))


def tridiagonal_eigenvectors(diagonal: Sequence[float], off_diagonal: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors, in columns; on the CPU, whatever torch's default device is."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64, device="cpu"))
    if off_diagonal:
        off = torch.tensor(off_diagonal, dtype=torch.float64, device="cpu")
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    if not bool(matrix.isfinite().all()):
        raise ValueError("the Hessian must be finite to have eigenvalues, got nan or infinity at these weights")
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0), vectors.flip(1)


def _orthonormal(v: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """A vector of length 1 that is orthogonal to the basis."""
    v = orthogonal(v / length(v), basis)
    return v / length(v)


def _shaped(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([p.numel() for p in tensors])
    return [piece.view(p.shape).to(p.device) for piece, p in zip(pieces, tensors, strict=True)]
