"""torch.compile for the passes, with the weight gradients of convolutions on a second stream.

The backward pass of a layer computes two products: the gradient of its input, which the layer below waits for, and
that of its weight, which nothing waits for until the pass is over. With small batches each leaves much of a GPU idle.
So in a compiled backward pass each `convolution_backward` is split in two: the weight's half runs on a second stream,
and `overlapped` waits for all of them. The numbers are the same.

What a weight gradient reads (the layer's input, the gradient of its output) must not be overwritten meanwhile, so both
are kept until the streams have joined, and the compiler may not reuse memory on its own (`COMPILE_OPTIONS`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

_BACKWARD = torch.ops.aten.convolution_backward.default
_side_streams: list[tuple[torch.cuda.Stream, list[Tensor]]] = []  # for weight gradients, and the tensors they read


@torch.library.custom_op("flatmin::weight_gradient", mutates_args=())
def weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """∂L/∂weight of a convolution from the gradient of its output; inside `overlapped`, on the second stream."""

    def product() -> Tensor:
        numbers = (stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False])
        found: Tensor = _BACKWARD(gradient, x, weight, None, *numbers)[1]
        return found

    if not _side_streams or not gradient.is_cuda:
        return product()
    stream, read = _side_streams[-1]
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
def overlapped(stream: torch.cuda.Stream) -> Iterator[None]:
    """Weight gradients requested inside are computed on `stream`, and are complete when the block ends."""
    read: list[Tensor] = []
    _side_streams.append((stream, read))
    try:
        yield
    finally:
        _side_streams.pop()
        if read:  # else nothing ran there, and a capture must not wait for a stream outside it
            torch.cuda.current_stream().wait_stream(stream)
        read.clear()  # after the streams have joined: the first one may now reuse this memory


class SplitConvolutionBackward(CustomGraphPass):
    """Splits each convolution_backward whose weight gradient is an output of the graph into two operations."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is _BACKWARD:
                _split(graph, node)

    def uuid(self) -> Any:
        return "flatmin.capture.compiler.SplitConvolutionBackward, 2"


def _split(graph: fx.Graph, node: fx.Node) -> None:
    gradient, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = node.args
    parts = {user.args[1]: user for user in node.users}
    mine = parts.get(1)
    wants_input, wants_weight, wants_bias = mask  # type: ignore[misc, str-unpack]
    if (
        transposed or wants_bias or not (wants_input and wants_weight) or mine is None
    ):  # with only one half there is nothing to overlap
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


# similar small kernels share a launch; the compiler's own reuse of memory assumes a single stream
COMPILE_OPTIONS: dict[str, Any] = {
    "combo_kernels": True,
    "post_grad_custom_post_pass": SplitConvolutionBackward(),
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}


class CompiledForward:
    """A compiled function, to be called and differentiated inside `overlapped`."""

    overlapped = staticmethod(overlapped)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = torch.compile(_with_own_code(function), dynamic=False, options=COMPILE_OPTIONS)
        self.others: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Another function, compiled once and kept."""
        if function not in self.others:
            self.others[function] = torch.compile(_with_own_code(function), dynamic=False)
        return self.others[function]


def _with_own_code(function: Any) -> FunctionType:
    """A copy with its own code object: the compiler counts compilations per code object, and gives up after eight."""
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
