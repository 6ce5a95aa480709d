"""The loss along a line and over a plane through θ, after Li et al. (2018), who showed why directions must be scaled:

    L(θ + αd),   L(θ + x d₁ + y d₂),   d = a random direction, each of its filters as long as that of θ

A network with ReLU and BatchNorm computes the same function after a filter is doubled, so a step of length 1 means
nothing until it is compared with the filter that it moves. A filter is weight[i], the weights of one output of a layer
(of a transposed convolution: of one input). Biases and BatchNorm's weights, one number per filter, stay where they are,
or are scaled number by number.

With the same seed two models are measured along the same directions: the noise is drawn on the CPU, and scaled to each
model's own filters.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.linalg import vector_norm

from flatmin.core.tensors import compute_dtype
from flatmin.flatness.risk import Loss, LossPart, parts_of, total_loss
from flatmin.flatness.weights import Weights, derived_generator

Direction = Sequence[Tensor]
Vectors = Literal["zero", "scaled"]


class Line(NamedTuple):
    """`losses[i]` is L(θ + alphas[i]·d)."""

    alphas: Tensor
    losses: Tensor


class Plane(NamedTuple):
    """`losses[i, j]` is L(θ + xs[j]·d₁ + ys[i]·d₂)."""

    xs: Tensor
    ys: Tensor
    losses: Tensor


def directions(
    model: nn.Module,
    *,
    number: int = 1,
    vectors: Vectors = "zero",
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> list[list[Tensor]]:
    """Random directions, with one tensor per parameter, whose filters are as long as the model's.

    >>> layer = nn.Linear(2, 2)
    >>> (direction,) = directions(layer)
    >>> torch.allclose(direction[0].norm(dim=1), layer.weight.norm(dim=1)), direction[1]
    (True, tensor([0., 0.]))
    """
    if vectors not in ("zero", "scaled"):
        raise ValueError(f"vectors must be 'zero' or 'scaled', got {vectors!r}")
    if number < 1:
        raise ValueError(f"there must be at least one direction, got {number}")
    tensors = Weights(model, parameters).tensors
    if vectors == "zero" and all(p.ndim < 2 for p in tensors):
        raise ValueError("every parameter is a vector, so all directions would be 0; use vectors='scaled'")
    derived = derived_generator(generator)
    return [[scaled_to_filters(_noise(p, derived), p.detach(), vectors) for p in tensors] for _ in range(number)]


def _noise(p: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(p.shape, generator=generator, device=generator.device, dtype=torch.float32).to(
        p.device, compute_dtype(p)
    )


def scaled_to_filters(noise: Tensor, p: Tensor, vectors: Vectors) -> Tensor:
    """d[i] · ‖θ[i]‖/‖d[i]‖ for a direction d of a parameter's shape; a filter of zeros stays where it is."""
    if p.ndim < 2:
        return torch.zeros_like(noise) if vectors == "zero" else noise.sign() * p.to(noise.dtype).abs()
    over = tuple(range(1, p.ndim))
    wanted, has = (vector_norm(x.to(noise.dtype), dim=over, keepdim=True) for x in (p, noise))
    scaled: Tensor = noise * (wanted / has.clamp(min=1e-30))
    return scaled


def line(
    model: nn.Module,
    loss: Loss,
    *,
    alphas: Tensor | None = None,
    direction: Direction | None = None,
    vectors: Vectors = "zero",
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
    at_once: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Line:
    """The loss along a direction, random unless given, at 41 points from −1 to 1, or at those given.

    With `at_once` above 1, that many points go through the model together (torch.func.vmap), or fewer if there is no
    memory or no kernel for so many. It gains little: on an H200 it saves at best half the time, for a network of 66,000
    weights, and nothing for a PreActResNet18; on a CPU it is slower. `progress(n)` is called when n points are done.
    """
    weights = Weights(model, parameters)
    if direction is None:
        (direction,) = directions(model, vectors=vectors, parameters=weights.tensors, generator=generator)
    alphas = _axis(alphas)
    losses = _losses(weights, loss, alphas[:, None], [direction], at_once, progress)
    return Line(alphas, losses)


def plane(
    model: nn.Module,
    loss: Loss,
    *,
    xs: Tensor | None = None,
    ys: Tensor | None = None,
    along: tuple[Direction, Direction] | None = None,
    vectors: Vectors = "zero",
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
    at_once: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Plane:
    """The loss over the plane of two directions, random unless given, at 41 × 41 points, or at those given."""
    weights = Weights(model, parameters)
    if along is None:
        first, second = directions(model, number=2, vectors=vectors, parameters=weights.tensors, generator=generator)
        along = (first, second)
    xs, ys = _axis(xs), _axis(ys)
    points = torch.cartesian_prod(ys, xs).flip(1)
    losses = _losses(weights, loss, points, along, at_once, progress)
    return Plane(xs, ys, losses.view(len(ys), len(xs)))


def _axis(given: Tensor | None) -> Tensor:
    if given is None:
        return torch.linspace(-1, 1, 41, dtype=torch.float64, device="cpu")
    axis = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    if axis.ndim != 1 or not len(axis) or not bool(axis.isfinite().all()):
        raise ValueError(f"the points of an axis must be a vector of finite numbers, got shape {tuple(axis.shape)}")
    return axis


def _losses(
    weights: Weights,
    loss: Loss,
    points: Tensor,
    along: Sequence[Direction],
    at_once: int,
    progress: Callable[[int], object] | None,
) -> Tensor:
    """L(θ + Σ points[n, i]·along[i]) for every n."""
    parts = parts_of(loss)
    for direction in along:
        shapes = [tuple(d.shape) for d in direction]
        if shapes != [tuple(p.shape) for p in weights.tensors]:
            raise ValueError(f"a direction must have one tensor per parameter, of the same shape, got {shapes}")
    if at_once < 1:
        raise ValueError(f"at_once must be at least 1, got {at_once}")
    found: list[Tensor] = []
    with weights.movable():
        while len(found) < len(points):
            chunk = points[len(found) : len(found) + at_once].tolist()
            if at_once == 1:
                found.append(_alone(weights, parts, chunk[0], along))
            else:
                try:
                    together = _together(weights, parts, chunk, along).unbind()
                except RuntimeError:  # no memory or kernel for so many; with one point, an error is the model's own
                    at_once //= 2
                    continue
                except AttributeError:  # the loss uses more of the model than its output
                    at_once = 1
                    continue
                far = max(range(len(chunk)), key=lambda n: max(map(abs, chunk[n])))
                if not found and not _agree(together[far], _alone(weights, parts, chunk[far], along), weights):
                    at_once = 1  # the loss, or the model, ignores the weights it is given
                    continue
                found += together
            if progress is not None:
                progress(len(found))
    return torch.stack(found)


def _agree(one: Tensor, other: Tensor, weights: Weights) -> bool:
    """Equal up to the rounding of these weights; not if one of them is not finite."""
    share = 0.03 if max(torch.finfo(p.dtype).eps for p in weights.tensors) > 1e-6 else 1e-3
    return bool((one - other).abs() <= share * other.abs())


def _alone(weights: Weights, parts: Sequence[LossPart], point: Sequence[float], along: Sequence[Direction]) -> Tensor:
    weights.move(_sum(point, along))
    return weights.value(parts)


@torch.no_grad()
def _sum(point: Sequence[float], along: Sequence[Direction]) -> list[Tensor]:
    total = torch._foreach_mul(list(along[0]), point[0])
    for number, direction in zip(point[1:], along[1:], strict=True):
        torch._foreach_add_(total, list(direction), alpha=number)
    return list(total)


def _together(
    weights: Weights, parts: Sequence[LossPart], chunk: Sequence[Sequence[float]], along: Sequence[Direction]
) -> Tensor:
    """The model at several weights in one pass: convolutions become grouped, matrix products batched."""
    names: dict[Tensor, str] = {p: name for name, p in weights.model.named_parameters()}
    if not names.keys() >= set(weights.tensors):
        raise ValueError("with at_once above 1 the parameters must be the model's own")
    theta = weights.theta()
    moved = [
        [(t.to(compute_dtype(t)) + d).to(t.dtype) for t, d in zip(theta, _sum(point, along), strict=True)]
        for point in chunk
    ]
    stacked = {
        names[p]: torch.stack(here).detach() for p, here in zip(weights.tensors, zip(*moved, strict=True), strict=True)
    }

    def losses(theta: dict[str, Tensor]) -> Tensor:
        def model(*inputs: Any, **named: Any) -> Any:
            return functional_call(weights.model, theta, inputs, named)

        return total_loss(model, parts)

    with torch.no_grad():
        return vmap(losses)(stacked)
