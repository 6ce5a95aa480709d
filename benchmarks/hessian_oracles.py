"""The Hessian by flatmin, by curvlinops, by PyHessian, and by brute force: relative differences.

The networks of the others' rows are the laboratory's MLP and its convolutional one, trained for twenty steps of AMP on
digits, in float64. All are asked about the same batches, of which the last is smaller, and start from the same vectors.
What has to be evened out first:

- PyHessian adds 1e-6 to every length that it divides by. Its unit vectors are too short by that, its eigenvalues by
  twice that. Its Lanczos method divides lengths of the Hessian's own size, so it is given a million times the loss.
- PyHessian's density calls torch.eig, which torch no longer has; the matrix is symmetric, so eigh serves. It has
  float32 in it wherever torch's default is.
- PyHessian seeks the eigenvalue that is largest in absolute value, flatmin the largest.
- curvlinops' Lanczos method is not orthogonalised again: beyond a few steps it finds the largest eigenvalue several
  times, and the quadratures differ. There are 8 steps here.
- curvlinops is right with BatchNorm in eval mode alone. In train mode it fails, and with `track_running_stats=False`
  its products are percents off (torch 2.13's jvp of jacrev through batch_norm).

curvlinops requires torchvision, through backpack, which it does not need here. A torchvision from a package index does
not import beside a torch for CPUs, so it is not in flatmin[dev]:

    pip install --no-deps curvlinops-for-pytorch einconv einops linear_operator opt_einsum
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatmin
from flatmin import flatness
from flatmin.flatness.hessian import RandomVectors, hessian_products
from flatmin.flatness.quadrature import quadrature
from flatmin.flatness.risk import parts_of
from flatmin.flatness.weights import Weights
from flatmin_lab import models
from flatmin_lab.data import load

EXAMPLES, BATCH = 50, 20  # two batches of 20, one of 10
STEPS = 8  # of Lanczos' method
SHORT = 1 + 1e-6  # PyHessian's unit vectors have a length of one by this
LOUD = 1e6  # times the loss, for PyHessian's density


class Problem(NamedTuple):
    """A trained network in eval mode, and examples."""

    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def risk(self) -> flatness.Loss:
        return flatness.empirical_risk(self.x, self.y, batch_size=BATCH)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(BATCH), self.y.split(BATCH), strict=True))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def shaped(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


@cache
def trained(seed: int, device: torch.device) -> Problem:
    """An MLP or, for odd seeds, a convolutional network with BatchNorm; about 1,400 parameters."""
    digits = load("digits").train
    x, y = (digits.x.double() / 255).to(device), digits.y.to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: dict[str, int] = {"width": 4} if seed % 2 else {"side": 8, "width": 16, "depth": 2}
        model = models.build("convnet" if seed % 2 else "mlp", in_channels=1, **kind).double().to(device)
        order = torch.randperm(len(x)).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = flatmin.AMP(sgd, epsilon=0.1, model=model)
    for batch in order[: 20 * 50].split(50):

        def closure(batch: Tensor = batch) -> Tensor:
            amp.zero_grad()
            loss = cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            return loss

        amp.step(closure)
    amp.zero_grad()
    return Problem(model.eval(), x[order[-EXAMPLES:]], y[order[-EXAMPLES:]])


def products(model: nn.Module, loss: flatness.Loss, vectors: Sequence[Tensor]) -> list[Tensor]:
    weights = Weights(model)
    with weights.movable(), hessian_products(weights, parts_of(loss)) as product:
        return [product(v) for v in vectors]


def our_products(problem: Problem, vectors: Sequence[Tensor]) -> list[Tensor]:
    return products(problem.model, problem.risk, vectors)


def our_quadrature(problem: Problem, start: Tensor) -> tuple[Tensor, Tensor]:
    weights = Weights(problem.model)
    with weights.movable(), hessian_products(weights, parts_of(problem.risk)) as product:
        return quadrature(product, start, STEPS)


def normals(problem: Problem, seed: int, number: int) -> list[Tensor]:
    random = RandomVectors(Weights(problem.model), torch.Generator().manual_seed(seed))
    return [random.normal() for _ in range(number)]


def _apart(ours: Tensor, theirs: Tensor, scale: Tensor | None = None) -> float:
    scale = theirs.norm() if scale is None else scale
    return float((ours.cpu() - theirs.detach().cpu()).norm() / scale.cpu())


def _quadratures_apart(ours: tuple[Tensor, Tensor], values: Tensor, shares: Tensor) -> Iterator[float]:
    order = values.argsort()
    yield _apart(ours[0], values[order], values.abs().max())
    yield _apart(ours[1], shares[order])


# ---- curvlinops


def curvlinops() -> Any:
    with warnings.catch_warnings():  # linear_operator, which it imports, uses torch.jit.script
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        return import_module("curvlinops")


def their_operator(problem: Problem) -> Any:
    return curvlinops().HessianLinearOperator(
        problem.model, nn.CrossEntropyLoss(), problem.parameters, problem.batches, check_deterministic=False
    )


def from_curvlinops(quantity: str, seed: int, device: torch.device) -> Iterator[float]:
    problem = trained(seed, device)
    operator = their_operator(problem)
    if quantity == "products":
        vectors = normals(problem, seed, 3)
        for v, ours in zip(vectors, our_products(problem, vectors), strict=True):
            yield _apart(ours, operator @ v)
    elif quantity == "eigenvalues":  # by ARPACK
        eigsh = import_module("scipy.sparse.linalg").eigsh
        theirs = eigsh(operator.to_scipy(), k=5, which="LA", tol=1e-10, return_eigenvectors=False, rng=seed)
        values = flatness.top_eigenvalues(problem.model, problem.risk, k=5, max_products=300, tolerance=1e-9).values
        expected = torch.from_numpy(theirs).sort(descending=True).values
        yield _apart(values, expected, expected[0])
    elif quantity == "trace":  # both by Hutch++, of the same random signs
        signs = RandomVectors(Weights(problem.model), torch.Generator().manual_seed(seed))
        where = import_module(curvlinops().hutchpp_trace.__module__)
        with patch.object(where, "random_vector", lambda *_: signs.signs()):
            expected = where.hutchpp_trace(operator, 30)
        found = flatness.trace(problem.model, problem.risk, products=30, generator=torch.Generator().manual_seed(seed))
        yield _apart(found.value, expected)
    else:
        lanczos = import_module("curvlinops.papyan2020traces.spectrum").fast_lanczos
        (start,) = normals(problem, seed, 1)
        with patch.dict(lanczos.__globals__, randn=lambda *_, **__: start.clone()):
            values, vectors = lanczos(operator, STEPS)
        yield from _quadratures_apart(our_quadrature(problem, start), values.detach(), vectors.detach()[0].square())


# ---- PyHessian


@contextmanager
def its_surroundings(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """What PyHessian was written for: torch.eig, its dtype as the default, no warning about backward's create_graph."""

    def eig(matrix: Tensor, *, eigenvectors: bool) -> tuple[Tensor, Tensor]:
        assert eigenvectors
        values, vectors = torch.linalg.eigh(matrix)
        return torch.stack([values, torch.zeros_like(values)], dim=1), vectors

    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), patch.object(torch, "eig", eig, create=True):
            warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True", category=UserWarning)
            yield
    finally:
        torch.set_default_dtype(default)


def their_hessian(problem: Problem, *, loudness: float = 1.0) -> Any:
    """Of a copy: it leaves gradients with graphs at the parameters."""

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return loudness * cross_entropy(logits, labels)

    where = {"dataloader": problem.batches, "cuda": problem.x.is_cuda}
    return import_module("pyhessian").hessian(copy.deepcopy(problem.model), criterion, **where)


def from_pyhessian(quantity: str, seed: int, device: torch.device) -> Iterator[float]:
    problem = trained(seed, device)
    with its_surroundings():
        if quantity == "products":
            vectors, theirs = normals(problem, seed, 3), their_hessian(problem)
            for v, ours in zip(vectors, our_products(problem, vectors), strict=True):
                _, found = theirs.dataloader_hv_product(problem.shaped(v))
                yield _apart(ours, torch.cat([piece.reshape(-1) for piece in found]))
        elif quantity == "eigenvalue":  # by power iteration
            torch.manual_seed(seed)
            (found,), _ = their_hessian(problem).eigenvalues(maxIter=2000, tol=1e-10)
            top = flatness.top_eigenvalue(problem.model, problem.risk, max_products=300, tolerance=1e-9)
            yield _apart(top, torch.tensor(found * SHORT**2))
        else:
            theirs = their_hessian(problem, loudness=LOUD)
            torch.manual_seed(seed)
            (values,), (shares,) = theirs.density(iter=STEPS)
            torch.manual_seed(seed)  # the same signs once more
            signs = [torch.randint_like(p, high=2) * 2 - 1 for p in problem.parameters]
            start = torch.cat([piece.reshape(-1) for piece in signs])
            values, shares = torch.tensor(values) / LOUD, torch.tensor(shares)
            yield from _quadratures_apart(our_quadrature(problem, start), values, shares)


# ---- the dense Hessian


def from_dense(quantity: str, seed: int, device: torch.device) -> Iterator[float]:
    """Relative to the largest eigenvalue: small networks in float64, whose Hessian torch writes down whole."""
    model, x, y, eigenvalues = _dense(seed, device)
    risk = flatness.empirical_risk(x, y, batch_size=8)
    if quantity == "trace":
        found = flatness.trace(model, risk, products=len(eigenvalues)).value
        yield float((found - eigenvalues.sum()).abs() / eigenvalues[0])
    else:
        values = flatness.top_eigenvalues(model, risk, k=5, tolerance=1e-9).values
        yield float((values - eigenvalues[:5]).abs().max() / eigenvalues[0])


@cache
def _dense(seed: int, device: torch.device) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network, its data, and all eigenvalues of its Hessian, the largest first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)]
        model = nn.Sequential(*layers).double()
        x, y = torch.randn(20, 4, dtype=torch.float64).to(device), torch.randint(0, 3, (20,)).to(device)
        model(torch.randn(50, 4, dtype=torch.float64))
    model = model.to(device).eval()
    named = dict(model.named_parameters())

    def loss_at(*weights: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, dict(zip(named, weights, strict=True)), (x,))
        return cross_entropy(logits, y)

    blocks: Any = torch.autograd.functional.hessian(loss_at, tuple(p.detach() for p in named.values()))
    sizes = [p.numel() for p in named.values()]
    rows = [torch.cat([b.reshape(size, -1) for b in line], dim=1) for line, size in zip(blocks, sizes, strict=True)]
    return model, x, y, torch.linalg.eigvalsh(torch.cat(rows)).flip(0)
