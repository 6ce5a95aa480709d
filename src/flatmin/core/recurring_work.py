"""The arithmetic of an eager step on a GPU, in a few launches.

Beyond its passes a step does the same work every time, on the same weights: norms of gradients, a projection, a move.
Only the addresses of the gradients differ. So these are written to the device, where kernels find them
(`GradientKernels`), and the launches are the same in every step: recorded once, then replayed.

Whatever does not fit (other devices and dtypes, gradients that are not laid out in memory as the kernels need them, the
user's own capture) is computed by plain torch, as on a CPU.
"""

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatmin.core.copies import layout
from flatmin.core.multi_tensor import ALIGNMENT_BYTES, GradientKernels, has_gradient_kernels
from flatmin.core.recorded_launches import RecordedLaunches, Results, Work
from flatmin.core.tensors import is_dense

_UNALIGNED = (ALIGNMENT_BYTES - 1).__and__
KEPT_PIECES, MAX_PIECES = 8, 64  # with more, the work does not really recur


class Operands(NamedTuple):
    """What a piece of work is, and the tensors it works on."""

    what: Hashable
    gradients: Sequence[Sequence[Tensor]]  # lists of them
    params: Sequence[Sequence[Tensor]] = ()  # the weights of each list, if they are moved
    flags: Sequence[Tensor] = ()
    numbers: Sequence[Any] = ()  # these may change from step to step


class RecurringWork:
    """Pieces of work, each with kernels for its lists of gradients."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._made = 0
        self.kernels: dict[int, GradientKernels] = {}  # inside `run`: those for each list of gradients, by its id

    def run(self, work: Work, operands: Operands) -> Results:
        """`work(numbers)`."""
        what, gradients, params, flags, numbers = operands
        if gradients[0][0].get_device() != torch.cuda.current_device() or torch.cuda.is_current_stream_capturing():
            return work(numbers)
        key: list[Any] = [what]
        addresses: list[Sequence[int]] = []
        for place, tensors in enumerate(gradients):
            there = layout(tensors)
            if there is None or any(map(_UNALIGNED, there[: len(tensors)])):
                return work(numbers)
            addresses.append(there[: len(tensors)])
            key += (there[len(tensors) :], set(map(Tensor.get_device, tensors)))
            key += (list(map(Tensor.data_ptr, params[place])),) if params else ()
        piece = next((piece for piece in self._pieces if piece.key == key), None)
        if piece is None:
            if self._made == MAX_PIECES:
                return work(numbers)
            self._made += 1
            self._pieces = [_Piece(key, gradients, params), *self._pieces[: KEPT_PIECES - 1]]
            piece = self._pieces[0]
        if not piece.kernels:
            return work(numbers)
        for kernels, where in zip(piece.kernels, addresses, strict=True):
            kernels.locate(where)
        self.kernels = dict(zip(map(id, gradients), piece.kernels, strict=True))
        try:
            return piece.launches.run(layout(flags), work, numbers)
        finally:
            self.kernels = {}


class _Piece:
    """A piece of work on gradients of these shapes: kernels for each list, and the recordings."""

    def __init__(
        self, key: list[Any], gradients: Sequence[Sequence[Tensor]], params: Sequence[Sequence[Tensor]]
    ) -> None:
        self.key, self.launches = key, RecordedLaunches()
        self.kernels: list[GradientKernels] = []  # empty: they do not fit
        if fit_kernels(gradients, params):
            weights: Sequence[Sequence[Tensor] | None] = params or [None] * len(gradients)
            self.kernels = [GradientKernels(*lists) for lists in zip(gradients, weights, strict=True)]


def fit_kernels(gradients: Sequence[Sequence[Tensor]], params: Sequence[Sequence[Tensor]]) -> bool:
    """Can the kernels work on these? Gradients of a list have one dtype, weights are float32; all are dense."""
    weights = list(chain(*params))
    layouts = [layout(tensors) for tensors in params]
    return (
        all(t.is_cuda for t in chain(weights, *gradients))
        and None not in layouts
        and len({t.device for t in chain(weights, *gradients)}) == 1
        and all(len({g.dtype for g in tensors}) == 1 and any(g.numel() for g in tensors) for tensors in gradients)
        and all(has_gradient_kernels(tensors[0].dtype, tensors[0].device) for tensors in gradients)
        and all(map(is_dense, chain(weights, *gradients)))
        and all(p.dtype == torch.float32 and p.data_ptr() % ALIGNMENT_BYTES == 0 for p in weights)
    )
