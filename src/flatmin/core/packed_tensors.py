"""Small tensors packed into one block of bytes, so that a single copy returns them all.

The next replay overwrites a CUDA graph's memory, so results are copied before they are returned. Copying one number
takes as long as copying a thousand, to launch and to run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16  # enough for every dtype
MAX_PACKED_BYTES = 4096  # of a tensor: keeping a loss should not keep large logits alive


class PackedTensors:
    """These tensors, copied together; `unpack` returns new copies, large ones in their own memory.

    >>> packed = PackedTensors([torch.tensor(2.5), torch.tensor(True), torch.arange(3)])
    >>> packed.unpack()
    [tensor(2.5000), tensor(True), tensor([0, 1, 2])]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.kinds = [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors]
        self.numbers = torch.stack(list(tensors)) if len(set(self.kinds)) == 1 and not tensors[0].dim() else None
        self.large = {i: tensor.detach() for i, tensor in enumerate(tensors) if tensor.nbytes > MAX_PACKED_BYTES}
        if self.numbers is not None:
            return
        device = tensors[0].device if tensors else None
        rest = torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        pieces = []
        for i, tensor in enumerate(tensors):
            if i not in self.large:
                pieces += [tensor.detach().reshape(-1).view(torch.uint8), rest[: _padding(tensor.nbytes)]]
        self.block = torch.cat(pieces) if pieces else rest

    def unpack(self) -> list[Tensor]:
        if self.numbers is not None:
            return list(self.numbers.clone().unbind())
        block, begin, found = self.block.clone(), 0, []
        for i, (dtype, shape, nbytes) in enumerate(self.kinds):
            if i in self.large:
                found.append(self.large[i].clone())
                continue
            found.append(block[begin : begin + nbytes].view(dtype).view(shape))
            begin += nbytes + _padding(nbytes)
        return found


def _padding(nbytes: int) -> int:
    return -nbytes % ALIGNMENT_BYTES
