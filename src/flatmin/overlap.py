"""Weight gradients of convolutions beside the rest of the backward pass, on a stream of their own.

Going back through a layer, two products are due: the gradient of its input, for which the layer below waits, and that
of its weight, for which nobody waits until the pass is over. One after the other, small batches leave much of a GPU
idle in both. So in a compiled backward pass each `convolution_backward` is taken in two: the weight's half is started
on a second stream, and `joined` waits for them all. The numbers are the same. A weight gradient's length, which the
ascent will ask for, is taken on the way, while the numbers are still in the cache and nobody waits.

What a weight gradient reads (the layer's input, the gradient of its output) must not be overwritten meanwhile, so both
are held until the streams have met, and the compiler is told not to reuse memory of its own accord (`OPTIONS`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from flatmin.ball import Norm, norms

_BACKWARD = torch.ops.aten.convolution_backward.default


@dataclass
class Beside:
    """What goes on beside a backward pass: on which stream, what it reads, and what it found.

    With a `norm`, the length of each weight gradient is taken as soon as it is there: `lengths` has it, by the address
    of the gradient.
    """

    stream: torch.cuda.Stream
    norm: Norm | None
    read: list[Tensor] = field(default_factory=list)
    lengths: dict[int, Tensor] = field(default_factory=dict)


_under_way: list[Beside] = []


@torch.library.custom_op("flatmin::weight_gradient", mutates_args=())
def weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """∂L/∂weight of a convolution from the gradient of its output; inside `joined`, on the second stream."""

    def product() -> Tensor:
        numbers = (stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False])
        found: Tensor = _BACKWARD(gradient, x, weight, None, *numbers)[1]
        return found

    if not _under_way or not gradient.is_cuda:
        return product()
    beside = _under_way[-1]
    beside.read += [gradient, x, weight]
    beside.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside.stream):
        found = product()
        if beside.norm is not None:
            beside.lengths[found.data_ptr()] = norms([found], norm=beside.norm)[0]
    return found


@weight_gradient.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    return torch.empty_like(weight)


@contextmanager
def joined(stream: torch.cuda.Stream, norm: Norm | None) -> Iterator[dict[int, Tensor]]:
    """Weight gradients that are asked for inside are computed on `stream`, and are there when the block is left.

    What it gives are their lengths, by their addresses.
    """
    beside = Beside(stream, norm)
    _under_way.append(beside)
    try:
        yield beside.lengths
    finally:
        _under_way.pop()
        torch.cuda.current_stream().wait_stream(stream)
        beside.read.clear()  # after the streams have met: memory that is free now can be written on the first one


class TakeApart(CustomGraphPass):
    """Each convolution_backward whose weight gradient leaves the graph as it is, as two operations."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is _BACKWARD:
                _take_apart(graph, node)

    def uuid(self) -> Any:
        return "flatmin.overlap.TakeApart, 2"


def _take_apart(graph: fx.Graph, node: fx.Node) -> None:
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
    parts = {user.args[1]: user for user in node.users}
    mine = parts.get(1)
    wants_input, wants_weight, wants_bias = mask  # type: ignore[misc, str-unpack]
    if transposed or wants_bias or not (wants_input and wants_weight) or mine is None:  # with one half, nothing waits
        return
    if any(user.op != "output" for user in mine.users):  # it is needed within the pass
        return
    with graph.inserting_before(node):
        arguments = (gradient, x, weight, stride, padding, dilation, groups)
        new = graph.call_function(torch.ops.flatmin.weight_gradient.default, arguments)
    new.meta.update(mine.meta)
    mine.replace_all_uses_with(new)
    graph.erase_node(mine)
    node.args = (*node.args[:-1], [True, False, False])


# small kernels that are alike in one launch; and the compiler's own reuse of memory knows of one stream only
OPTIONS: dict[str, Any] = {
    "combo_kernels": True,
    "post_grad_custom_post_pass": TakeApart(),
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}


class Compiled:
    """A compiled function, to be called and differentiated inside `joined`."""

    joined = staticmethod(joined)
    compiled = staticmethod(partial(torch.compile, dynamic=False))

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = torch.compile(function, dynamic=False, options=OPTIONS)

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)
