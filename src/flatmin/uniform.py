"""A point drawn uniformly from a ball, in the memory of the tensors that it moves.

A normal vector points in every direction alike; scaled to the length ε·u^(1/d), with u uniform in [0, 1] and d the
dimension, it is uniform in the L2 ball. In many dimensions nearly all of a ball lies at its edge. In L∞ every number is
uniform in [−ε, ε] on its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatmin.ball import Ball, Norm, norms, radii
from flatmin.ranks import generators_of_shards, same_on_all_ranks
from flatmin.tensors import plain


def fill_with_noise(
    tensors: Sequence[Tensor], *, like: Sequence[Tensor], norm: Norm, generator: torch.Generator | None
) -> None:
    """Noise in each: normal, so that its direction is uniform, or for "linf" uniform in [−1, 1].

    `like` are the tensors as they are spread over ranks, if they are: shards get different noise, replicas the same.
    """
    generators = generators_of_shards(like, generator)
    for place, tensor in enumerate(tensors):
        _noise_(plain(tensor), norm=norm, generator=generators.get(place, generator))


def _noise_(tensor: Tensor, *, norm: Norm, generator: torch.Generator | None) -> None:
    home = tensor.device if generator is None else generator.device
    noise = tensor if home == tensor.device else torch.empty_like(tensor, device=home)
    if norm == "l2":
        noise.normal_(generator=generator)
    else:
        noise.uniform_(-1, 1, generator=generator)
    if noise is not tensor:
        tensor.copy_(noise)


def scales(
    lengths: Sequence[Tensor],
    groups: Sequence[Sequence[Tensor]],
    epsilons: Sequence[float | Tensor],
    *,
    ball: Ball,
    norm: Norm,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """For each group the factors, one a tensor, that make its noise uniform in its ball; `lengths`: of the noise."""
    if norm == "linf":
        return [torch.ones_like(length) * epsilon for length, epsilon in zip(lengths, epsilons, strict=True)]
    home = lengths[0].device
    everything = [tensor for group in groups for tensor in group]
    shared = _share(everything, home, generator) if ball == "global" else None
    found = []
    for radius, group, epsilon in zip(radii(lengths, ball=ball), groups, epsilons, strict=True):
        if shared is not None:
            share = shared
        elif ball == "group":
            share = _share(group, home, generator)
        else:
            share = torch.stack([_share([tensor], home, generator) for tensor in group])
        found.append(torch.where(radius > 0, epsilon * share / radius, 0.0).expand(len(group)))
    return found


def _share(tensors: Sequence[Tensor], home: torch.device, generator: torch.Generator | None) -> Tensor:
    """u^(1/d): how far out a uniform point of these tensors' ball lies, as a share of its radius."""
    dimension = sum(tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors)
    device = home if generator is None else generator.device
    share: Tensor = torch.rand((), generator=generator, device=device) ** (1 / max(dimension, 1))
    return same_on_all_ranks(share.to(home), tensors)


@torch.no_grad()
def uniform_(
    tensors: Sequence[Tensor],
    epsilon: float,
    *,
    ball: Ball = "global",
    norm: Norm = "l2",
    generator: torch.Generator | None = None,
) -> None:
    """A uniform point of the ball of radius ε, in place.

    >>> delta = [torch.empty(3), torch.empty(2)]
    >>> uniform_(delta, 0.1, generator=torch.Generator().manual_seed(0))
    >>> bool(torch.cat(delta).norm() <= 0.1)
    True
    """
    fill_with_noise(tensors, like=tensors, norm=norm, generator=generator)
    lengths = [norms(tensors, norm=norm)]
    (factors,) = scales(lengths, [tensors], [epsilon], ball=ball, norm=norm, generator=generator)
    for tensor, factor in zip(tensors, factors.unbind(), strict=True):
        plain(tensor).mul_(factor.to(tensor.device))
