"""The spectral density of the Hessian H, by stochastic Lanczos quadrature.

    φ(t) = (1/n) Σᵢ δ(t − λᵢ),   λᵢ the n eigenvalues of H
    E vᵀf(H)v = ∫ f(t) φ(t) dt,  v a random vector of length 1, all directions alike

A few steps of Lanczos' method from v give a small tridiagonal matrix T. Its eigenvalues, the Ritz values, and the
squares of the first entries of its eigenvectors, the weights, are a Gauss quadrature: Σⱼ wⱼ f(tⱼ) = vᵀf(H)v for every
polynomial f of degree up to 2·steps − 1. So each probe v sees the whole spectrum at once. The more eigenvalues there
are, the fewer probes it takes: in a large network one or a few.

Each new vector is made orthogonal to all before it, twice, as in lanczos.py. Where H maps the span to itself before the
last step, the quadrature ends there and is exact for every f.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatmin.flatness.hessian import Product, RandomVectors, hessian_products, length
from flatmin.flatness.lanczos import lanczos_step, tridiagonal_eigenvectors
from flatmin.flatness.risk import Loss, parts_of
from flatmin.flatness.weights import Weights

ENDED = 100  # what is left is rounding, below so many rounding errors of the largest value: no Ritz value moves by more
WIDTH = 0.01  # of the Gaussian, as a share of the spectrum's range
ROUNDING = 1e-6  # a range below this share of the largest value is not one
MARGIN, POINTS = 5, 1101  # of the grid: so many widths beyond either end, ten points a width


class Density(NamedTuple):
    """`values[i]` is the share of eigenvalues per unit at `grid[i]`."""

    grid: Tensor
    values: Tensor
    width: float  # the Gaussian's standard deviation


class Spectrum(NamedTuple):
    """The spectrum as each probe sees it: `weights[i][j]` is the share of eigenvalues at `values[i][j]`.

    The values of a probe ascend and its weights add up to 1; all are in float64, on the CPU. A probe has fewer than
    `steps` values where H has fewer distinct eigenvalues.
    """

    values: list[Tensor]
    weights: list[Tensor]
    dimension: int  # how many eigenvalues there are: n, the number of parameters
    products: int  # with the Hessian, taken in all

    @property
    def smallest(self) -> Tensor:
        """The smallest Ritz value. Rounding apart, Ritz values lie between the smallest and the largest eigenvalue."""
        return torch.cat(self.values).min()

    @property
    def largest(self) -> Tensor:
        return torch.cat(self.values).max()

    def moments(self, degree: int) -> Tensor:
        """vᵀHᵏv of each probe; their mean estimates tr Hᵏ/n. Exact to the probe up to degree 2·steps − 1."""
        if degree < 0:
            raise ValueError(f"degree must be at least 0, got {degree}")
        return torch.stack([(w * v**degree).sum() for v, w in self._probes()])

    @property
    def trace(self) -> Tensor:
        """The trace of H: n times the first moment. (`flatness.trace` needs far fewer products for the same error.)"""
        return self.dimension * self.moments(1).mean()

    @property
    def trace_error(self) -> Tensor:
        """The standard error of the trace; nan with a single probe."""
        moments, count = self.moments(1), len(self.values)
        return self.dimension * moments.std(correction=1) / count**0.5 if count > 1 else moments[0] * torch.nan

    def cumulative(self, at: Tensor | float) -> Tensor:
        """The share of eigenvalues up to and including `at`, which may be many points."""
        points = torch.as_tensor(at, dtype=torch.float64, device="cpu")
        shares = [(w * (v <= points.unsqueeze(-1))).sum(dim=-1) for v, w in self._probes()]
        return torch.stack(shares).mean(dim=0)

    @property
    def negative_curvature(self) -> Tensor:
        """Σ λ² over negative eigenvalues, as a share of Σ λ² over all; 0 at a minimum, and where H is 0.

        Squared: nearly all eigenvalues of a network are almost 0. A quadrature has one node below 0 and one above for
        them, whose positions depend on the number of steps; in Σ |λ| these two alone can outweigh all the others.
        """
        below = torch.stack([(w * v.clamp(max=0).square()).sum() for v, w in self._probes()]).mean()
        whole = self.moments(2).mean()
        return below / whole if whole > 0 else torch.zeros_like(whole)

    def density(self, grid: Tensor | None = None, *, width: float | None = None) -> Density:
        """φ smoothed with a Gaussian of this width (standard deviation), on this grid; it integrates to 1.

        Without a width, a hundredth of the spectrum's range; without a grid, 1,101 points from five widths below the
        smallest Ritz value to five above the largest.
        """
        low, high = float(self.smallest), float(self.largest)
        size = max(abs(low), abs(high))
        alone = high - low <= ROUNDING * size  # one eigenvalue, however often, has no range
        width = WIDTH * ((size or 1.0) if alone else high - low) if width is None else width
        if not 0 < width < float("inf"):
            raise ValueError(f"width must be above 0 and finite, got {width}")
        if grid is None:
            ends = low - MARGIN * width, high + MARGIN * width
            grid = torch.linspace(*ends, POINTS, dtype=torch.float64, device="cpu")
        grid = torch.as_tensor(grid, dtype=torch.float64, device="cpu")
        if grid.ndim != 1 or not bool(grid.isfinite().all()):
            raise ValueError(f"the grid must be finite numbers in a row, got shape {tuple(grid.shape)}")
        total = torch.zeros_like(grid)
        for v, w in self._probes():
            bells = torch.exp(-((grid[:, None] - v) / width).square() / 2)
            total += bells @ w / (width * (2 * torch.pi) ** 0.5)
        return Density(grid, total / len(self.values), width)

    def _probes(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.values, self.weights, strict=True)


def spectrum(
    model: nn.Module,
    loss: Loss,
    *,
    steps: int = 60,
    probes: int = 4,
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[int], object] | None = None,
) -> Spectrum:
    """The spectral density of the Hessian, from probes × steps products with it, of two passes each.

    More steps tell more eigenvalues apart, more probes make the shares more certain. A step keeps a vector as large as
    all parameters until its probe is done. `progress(n)` is called when n products are done.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> found = spectrum(layer, lambda model: (model(torch.tensor([[3.0, 4.0]])) ** 2).sum() / 2)    # xxᵀ: 0 and 25
    >>> found.largest.round(decimals=3), found.products     # a product for each distinct eigenvalue, and each probe
    (tensor(25., dtype=torch.float64), 8)
    """
    if steps < 1 or probes < 1:
        raise ValueError(f"steps and probes must be at least 1, got {steps} and {probes}")
    weights = Weights(model, parameters)
    random = RandomVectors(weights, generator)
    values, shares, done = [], [], 0

    with weights.movable(), hessian_products(weights, parts_of(loss)) as product:

        def counted(v: Tensor) -> Tensor:
            nonlocal done
            found = product(v)
            done += 1
            if progress is not None:
                progress(done)
            return found

        for _ in range(probes):
            here, share = quadrature(counted, random.normal(), min(steps, weights.dimension))
            values.append(here)
            shares.append(share)
    return Spectrum(values, shares, weights.dimension, done)


def quadrature(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Values, ascending, and weights of the Gauss quadrature for vᵀf(H)v, v = start/‖start‖."""
    rounding = ENDED * torch.finfo(start.dtype).eps
    basis: list[Tensor] = [start / length(start)]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    while True:
        entry, w, left = lanczos_step(product, basis)
        diagonal.append(entry)
        # H maps the span to itself. If rounding hides that, only products are lost: what follows has no weight
        ended = not left > rounding * _largest(diagonal, off_diagonal)  # nan ends it too
        if ended or len(diagonal) == steps:
            break
        basis.append(w / left)
        off_diagonal.append(left)
    values, vectors = tridiagonal_eigenvectors(diagonal, off_diagonal)
    return values.flip(0), vectors[0].square().flip(0)


def _largest(diagonal: Sequence[float], off_diagonal: Sequence[float]) -> float:
    return max(map(abs, (*diagonal, *off_diagonal)))
