"""Tensors side by side in one block of bytes: one copy hands them all out.

What a CUDA graph leaves in its memory is overwritten by the next replay, so it is copied before it is given away. A
copy of a number takes as long as a copy of a thousand, and as long to ask for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16  # bytes, which suits every type
SMALL = 4096  # bytes


class Packed:
    """Copies of these tensors as they are now; `fresh` gives copies of the copies, large ones in memory of their own.

    >>> packed = Packed([torch.tensor(2.5), torch.tensor(True), torch.arange(3)])
    >>> packed.fresh()
    [tensor(2.5000), tensor(True), tensor([0, 1, 2])]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.kinds = [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors]
        # who keeps a loss should not keep the logits beside it
        self.large = {i: tensor.detach() for i, tensor in enumerate(tensors) if tensor.nbytes > SMALL}
        device = tensors[0].device if tensors else None
        rest = torch.zeros(ALIGNED, dtype=torch.uint8, device=device)
        pieces = []
        for i, tensor in enumerate(tensors):
            if i not in self.large:
                pieces += [tensor.detach().reshape(-1).view(torch.uint8), rest[: _missing(tensor.nbytes)]]
        self.block = torch.cat(pieces) if pieces else rest

    def fresh(self) -> list[Tensor]:
        block, begin, found = self.block.clone(), 0, []
        for i, (dtype, shape, nbytes) in enumerate(self.kinds):
            if i in self.large:
                found.append(self.large[i].clone())
                continue
            found.append(block[begin : begin + nbytes].view(dtype).view(shape))
            begin += nbytes + _missing(nbytes)
        return found


def _missing(nbytes: int) -> int:
    return -nbytes % ALIGNED
