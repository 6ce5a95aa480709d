"""Weight gradients of convolutions beside the rest of the backward pass, on a stream of their own.

Going back through a layer, two products are due: the gradient of its input, for which the layer below waits, and that
of its weight, for which nobody waits until the pass is over. One after the other, small batches leave much of a GPU
idle in both. So in a compiled backward pass each `convolution_backward` is taken in two: the weight's half is started
on a second stream, and `joined` waits for them all. The numbers are the same.

What a weight gradient reads (the layer's input, the gradient of its output) must not be overwritten meanwhile, so both
are held until the streams have met, and the compiler is told not to reuse memory of its own accord (`OPTIONS`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

_BACKWARD = torch.ops.aten.convolution_backward.default
_beside: list[tuple[torch.cuda.Stream, list[Tensor]]] = []  # the stream for weight gradients, and what they read


@torch.library.custom_op("flatmin::weight_gradient", mutates_args=())
def weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """∂L/∂weight of a convolution from the gradient of its output; inside `joined`, on the second stream."""

    def product() -> Tensor:
        numbers = (stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False])
        found: Tensor = _BACKWARD(gradient, x, weight, None, *numbers)[1]
        return found

    if not _beside or not gradient.is_cuda:
        return product()
    stream, read = _beside[-1]
    read += [gradient, x, weight]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return product()


@weight_gradient.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    return torch.empty_like(weight)


@contextmanager
def joined(stream: torch.cuda.Stream) -> Iterator[None]:
    """Weight gradients that are asked for inside are computed on `stream`, and are there when the block is left."""
    read: list[Tensor] = []
    _beside.append((stream, read))
    try:
        yield
    finally:
        _beside.pop()
        if read:  # else nothing was started there, and a capture refuses to wait for what it does not hold
            torch.cuda.current_stream().wait_stream(stream)
        read.clear()  # after the streams have met: memory that is free now can be written on the first one


class TakeApart(CustomGraphPass):
    """Each convolution_backward whose weight gradient leaves the graph as it is, as two operations."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is _BACKWARD:
                _take_apart(graph, node)

    def uuid(self) -> Any:
        return "flatmin.capture.compiler.TakeApart, 2"


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

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = torch.compile(_own(function), dynamic=False, options=OPTIONS)
        self.others: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Another function, compiled along with it."""
        if function not in self.others:
            self.others[function] = torch.compile(_own(function), dynamic=False)
        return self.others[function]


def _own(function: Any) -> FunctionType:
    """A function with code of its own: the compiler counts compilations by code, and gives up after eight."""
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
