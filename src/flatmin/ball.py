"""The ball of perturbations: norms, projections, and points drawn uniformly from it.

A perturbation Δ is a list of tensors, one per parameter. The ball of radius ε is

    B(ε) = {Δ : ‖Δ‖ ≤ ε},   ‖Δ‖ = √(Σ Δᵢ²) for "l2" (the paper),   max |Δᵢ| for "linf".

The kind of ball says what ‖Δ‖ is taken over: all tensors together ("global", the paper), each group of parameters
("group"), or each tensor ("tensor", the paper's published code: T tensors together then reach ‖Δ‖ = ε√T).
The nearest point of the ball, Π(Δ), is Δ·min(1, ε/‖Δ‖) for "l2", and each entry clamped to [−ε, ε] for "linf".

A normal vector has a uniform direction; scaled to the length ε·u^(1/d), with u uniform in [0, 1] and d the dimension,
it is uniform in the L2 ball. In high dimensions nearly all of a ball is near its edge. In L∞ each entry is uniform in
[−ε, ε].

Nothing here reads a number back to the host: radii and comparisons stay on the device.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.linalg import vector_norm

from flatmin.core.distributed import broadcast_over_mesh, generators_of_shards
from flatmin.core.tensors import ORDINARY_TYPES, in_memory_order, plain, zero_unless_

Norm = Literal["l2", "linf"]
Ball = Literal["global", "group", "tensor"]
NORMS: tuple[Norm, ...] = get_args(Norm)
BALLS: tuple[Ball, ...] = get_args(Ball)

__all__ = ["BALLS", "NORMS", "Ball", "Norm", "clamp_", "combine", "norms", "project_", "radii", "shrink", "uniform_"]

# type, layout and dtype of tensors whose memory is their entries: real, dense, whole
_PLAIN = frozenset(
    (kind, torch.strided, dtype)
    for kind in ORDINARY_TYPES
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
)
_ORDER = {"l2": 2.0, "linf": float("inf")}
_ROW = 4096  # entries: a norm on the CPU is that of the norms of its rows (see `_lengths`)


def norms(tensors: Sequence[Tensor], *, norm: Norm = "l2") -> Tensor:
    """The norm of each tensor, as one vector in float32 (float64 if any tensor is).

    The norm of a DTensor is that of the whole: its shards' norms are combined over its mesh, so every rank of the mesh
    must call this. Squares are float32: entries above 1e19 give an infinite norm, those below 1e-19 hardly count.

    >>> norms([torch.tensor([3.0, 4.0]), torch.tensor([[-2.0]])])
    tensor([5., 2.])
    """
    if not tensors:
        return torch.zeros(0)
    kinds = {(t.dtype, t.device) for t in tensors}
    if len(kinds) > 1 or not _PLAIN.issuperset([(type(t), t.layout, t.dtype) for t in tensors]):
        return _norms_of_any(tensors, norm)
    ((dtype, device),) = kinds
    measure = _foreach_norms if device.type == "cuda" else _lengths
    return torch.stack(measure(tensors, norm, torch.float64 if dtype == torch.float64 else torch.float32))


def _norms_of_any(tensors: Sequence[Tensor], norm: Norm) -> Tensor:
    """For tensors of several kinds: on several devices, in several dtypes, sparse, complex, sharded across ranks."""
    tensors = [tensor.coalesce() if tensor.is_sparse else tensor for tensor in tensors]  # duplicate entries add up
    whole = [tensor if type(tensor) in ORDINARY_TYPES else _without_partial_sums(tensor) for tensor in tensors]
    parts = [plain(tensor) for tensor in whole]
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    if all(part.is_cuda for part in parts):
        lengths = _foreach_norms(parts, norm, dtype)
    else:
        lengths = _lengths(parts, norm, dtype)
    home = lengths[0].device
    for (mesh, spread), places in _by_mesh(whole).items():
        here = torch.stack([lengths[place].to(home) for place in places])
        for place, length in zip(places, _over_ranks(here, mesh, spread, norm).unbind(), strict=True):
            lengths[place] = length
    return torch.stack([length.to(home) for length in lengths])


def combine(lengths: Tensor, *, norm: Norm = "l2") -> Tensor:
    """The norm of the whole from the norms of its parts.

    >>> combine(torch.tensor([3.0, 4.0])), combine(torch.tensor([3.0, 4.0]), norm="linf")
    (tensor(5.), tensor(4.))
    """
    if norm == "linf":
        return lengths.amax() if lengths.numel() else lengths.new_zeros(())
    length: Tensor = vector_norm(lengths)
    return length


def radii(lengths: Sequence[Tensor], *, ball: Ball = "global", norm: Norm = "l2") -> list[Tensor]:
    """For each group of tensors, its distance from the centre of its ball: one number per group, or per tensor.

    `lengths` has one vector per group: the norms of its tensors.

    >>> groups = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    >>> [radii(groups, ball=ball) for ball in BALLS]
    [[tensor(13.), tensor(13.)], [tensor(5.), tensor(12.)], [tensor([3., 4.]), tensor([12.])]]
    """
    if ball == "tensor":
        return list(lengths)
    each = [combine(length, norm=norm) for length in lengths]
    if ball == "group":
        return each
    total = combine(torch.stack([length.to(each[0].device) for length in each]), norm=norm)
    return [total] * len(each)


def shrink(radius: Tensor, epsilon: float | Tensor) -> Tensor:
    """min(1, ε/‖Δ‖): the factor that projects Δ onto the ball. It is 1 inside, even at ‖Δ‖ = 0.

    >>> shrink(torch.tensor([0.0, 1.0, 4.0]), 2.0)
    tensor([1.0000, 1.0000, 0.5000])
    """
    # not ε / radius, which rounds differently for a number (this product) and a tensor (a division)
    return torch.where(radius > epsilon, radius.reciprocal() * epsilon, 1.0)


@torch.no_grad()
def project_(
    groups: Sequence[Sequence[Tensor]],
    epsilons: Sequence[float | Tensor],
    *,
    ball: Ball = "global",
    norm: Norm = "l2",
) -> None:
    """Π(Δ), in place: the point of the ball nearest to Δ. A ball whose Δ is not finite is set to its centre, 0.

    `groups` has one list of tensors per group and `epsilons` one radius per group; a global ball has one radius.

    >>> delta = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> project_([delta], [1.0])
    >>> delta
    [tensor([0.6000]), tensor([0.8000])]
    """
    occupied = [(group, epsilon) for group, epsilon in zip(groups, epsilons, strict=True) if group]
    lengths = [norms(group, norm=norm) for group, _ in occupied]
    for (group, epsilon), radius in zip(occupied, radii(lengths, ball=ball, norm=norm) if lengths else [], strict=True):
        factors = shrink(radius, epsilon).expand(len(group)).unbind()
        finite = radius.isfinite().expand(len(group)).unbind()
        for tensor, factor, sound in zip(group, factors, finite, strict=True):
            zero_unless_([tensor], sound)
            if norm == "l2":
                plain(tensor).mul_(factor.to(tensor.device))
            else:
                clamp_(plain(tensor), epsilon)


def clamp_(tensor: Tensor, epsilon: float | Tensor) -> Tensor:
    """Clamp each entry to [−ε, ε], in place.

    >>> clamp_(torch.tensor([-3.0, 0.5]), 1.0)
    tensor([-1.0000,  0.5000])
    """
    return tensor.clamp_(-epsilon, epsilon)  # type: ignore[arg-type]  # the stub does not know tensor bounds


def _foreach_norms(tensors: Sequence[Tensor], norm: Norm, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each, in a few launches per dtype: a list of several dtypes would take one per tensor."""
    kinds: dict[torch.dtype, list[int]] = {}
    found: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault(tensor.dtype, []).append(place)
        else:
            found[place] = torch.zeros((), dtype=dtype, device=tensor.device)
    for places in kinds.values():
        alike = torch._foreach_norm([tensors[place] for place in places], _ORDER[norm], dtype=dtype)
        found.update(zip(places, alike, strict=True))
    return [found[place] for place in range(len(tensors))]


def _lengths(tensors: Sequence[Tensor], norm: Norm, dtype: torch.dtype) -> list[Tensor]:
    """‖tensor‖ of each, accurate to the last bits of float32, on the CPU too.

    There torch adds the squares of a float32 tensor one by one: ‖x‖ of 20 million normal numbers comes out 0.1 % too
    small, which would let Δ leave the ball. With rows first, then the norm of the rows' norms, it is 6e-9, and as fast.
    """
    if norm == "linf":
        return [_largest(tensor, dtype) if tensor.numel() else tensor.new_zeros((), dtype=dtype) for tensor in tensors]
    short = list(tensors)
    for place, tensor in enumerate(tensors):
        if tensor.numel() > _ROW:
            flat = tensor if tensor.is_contiguous() else in_memory_order(tensor)
            while flat.numel() > _ROW:
                flat = flat.reshape(-1).to(dtype)
                even = flat.numel() // _ROW * _ROW
                rows = vector_norm(flat[:even].view(-1, _ROW), dim=1)
                flat = rows if even == flat.numel() else torch.cat([rows, vector_norm(flat[even:]).view(1)])
            short[place] = flat
    return list(torch._foreach_norm(short, 2.0, dtype=dtype))


def _largest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    low, high = torch.aminmax(tensor)  # an order of magnitude faster on the CPU than vector_norm(·, inf)
    return torch.maximum(-low, high).to(dtype)


def _without_partial_sums(tensor: Tensor) -> Tensor:
    """A DTensor whose value is still a sum over ranks, summed; anything else as it is."""
    placements = getattr(tensor, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return tensor
    from torch.distributed.tensor import Replicate

    summed = [Replicate() if placement.is_partial() else placement for placement in placements]
    return tensor.redistribute(placements=summed)  # type: ignore[attr-defined, no-any-return]


def _by_mesh(tensors: Sequence[Tensor]) -> dict[tuple[Any, tuple[bool, ...]], list[int]]:
    """The indices of the DTensors, by mesh and by the mesh dimensions that they are sharded along."""
    kinds: dict[tuple[Any, tuple[bool, ...]], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if type(tensor) not in ORDINARY_TYPES and (placements := getattr(tensor, "placements", ())):
            spread = tuple(not placement.is_replicate() for placement in placements)
            if any(spread):
                kinds.setdefault((tensor.device_mesh, spread), []).append(place)  # type: ignore[attr-defined]
    return kinds


def _over_ranks(lengths: Tensor, mesh: Any, spread: Sequence[bool], norm: Norm) -> Tensor:
    """The norms of DTensors from those of their shards here, in one message per sharded mesh dimension."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    reduce = "sum" if norm == "l2" else "max"
    placements = [Partial(reduce) if cut else Replicate() for cut in spread]
    parts = lengths.square() if norm == "l2" else lengths
    full = DTensor.from_local(parts, mesh, placements).full_tensor()
    return full.sqrt() if norm == "l2" else full


# ---- points drawn uniformly from a ball


def fill_with_noise(
    tensors: Sequence[Tensor], *, like: Sequence[Tensor], norm: Norm, generator: torch.Generator | None
) -> None:
    """Fill each with noise: normal, so that its direction is uniform, or for "linf" uniform in [−1, 1].

    `like` are the same tensors as DTensors, if they are sharded: shards get different noise, replicas the same.
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


def uniform_factors(
    lengths: Sequence[Tensor],
    groups: Sequence[Sequence[Tensor]],
    epsilons: Sequence[float | Tensor],
    *,
    ball: Ball,
    norm: Norm,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """For each group, the factors, one per tensor, that make noise of these norms uniform in the group's ball."""
    if norm == "linf":
        return [torch.ones_like(length) * epsilon for length, epsilon in zip(lengths, epsilons, strict=True)]
    home = lengths[0].device
    everything = [tensor for group in groups for tensor in group]
    shared = _radius_share(everything, home, generator) if ball == "global" else None
    found = []
    for radius, group, epsilon in zip(radii(lengths, ball=ball), groups, epsilons, strict=True):
        if shared is not None:
            share = shared
        elif ball == "group":
            share = _radius_share(group, home, generator)
        else:
            share = torch.stack([_radius_share([tensor], home, generator) for tensor in group])
        found.append(torch.where(radius > 0, epsilon * share / radius, 0.0).expand(len(group)))
    return found


def cube_factors(
    lengths: Sequence[Tensor],
    groups: Sequence[Sequence[Tensor]],
    epsilons: Sequence[float | Tensor],
    *,
    ball: Ball,
) -> list[Tensor]:
    """For each group, the factors, one per tensor, that make noise in [−1, 1] uniform in [−√(ε/d), √(ε/d)].

    d is the dimension that the ball is taken over. Points of this cube have ‖Δ‖ ≈ √(ε/3), at most √ε: it is not
    a ball of radius ε, but what the paper's published code draws from for RMP.
    """
    dimensions = [[_dimension([tensor]) for tensor in group] for group in groups]
    total = sum(map(sum, dimensions))
    found = []
    for length, own, epsilon in zip(lengths, dimensions, epsilons, strict=True):
        over = {"global": [total] * len(own), "group": [sum(own)] * len(own), "tensor": own}[ball]
        sides = torch.stack([length.new_full((), max(count, 1) ** -0.5) for count in over])  # no copy from the host
        found.append(sides * epsilon**0.5)
    return found


def _dimension(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors)


def _radius_share(tensors: Sequence[Tensor], home: torch.device, generator: torch.Generator | None) -> Tensor:
    """u^(1/d): the distance of a uniform point from the centre of these tensors' ball, as a share of the radius."""
    dimension = _dimension(tensors)
    device = home if generator is None else generator.device
    drawn = torch.rand((), generator=generator, device=device, dtype=torch.float32)  # whatever torch's default type is
    share: Tensor = drawn ** (1 / max(dimension, 1))
    return broadcast_over_mesh(share.to(home), tensors)


@torch.no_grad()
def uniform_(
    tensors: Sequence[Tensor],
    epsilon: float,
    *,
    ball: Ball = "global",
    norm: Norm = "l2",
    generator: torch.Generator | None = None,
) -> None:
    """Draw a uniform point of the ball of radius ε, in place.

    >>> delta = [torch.empty(3), torch.empty(2)]
    >>> uniform_(delta, 0.1, generator=torch.Generator().manual_seed(0))
    >>> bool(torch.cat(delta).norm() <= 0.1)
    True
    """
    fill_with_noise(tensors, like=tensors, norm=norm, generator=generator)
    lengths = [norms(tensors, norm=norm)]
    (factors,) = uniform_factors(lengths, [tensors], [epsilon], ball=ball, norm=norm, generator=generator)
    for tensor, factor in zip(tensors, factors.unbind(), strict=True):
        plain(tensor).mul_(factor.to(tensor.device))
