"""Weight gradients taken out of a backward pass are the weight gradients."""

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from flatmin.capture.compiler import SplitConvolutionBackward, weight_gradient


def backward_of(layer: nn.Conv2d, x: Tensor) -> tuple[torch.fx.GraphModule, tuple[Tensor, ...]]:
    """The backward pass of a convolution as a graph of its inputs."""
    gradient = torch.randn_like(layer(x))

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        numbers = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups, [True, True, False])
        found = torch.ops.aten.convolution_backward(gradient, x, weight, None, *numbers)
        return found[0], found[1]

    inputs = (gradient, x, layer.weight.detach())
    return make_fx(backward)(*inputs), inputs


def test_a_backward_pass_taken_apart_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    for layer in (nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.Conv2d(4, 8, 1, groups=2, bias=False)):
        module, inputs = backward_of(layer, torch.randn(2, 4, 8, 8))
        expected = module(*inputs)
        SplitConvolutionBackward()(module.graph)
        module.recompile()
        targets = [node.target for node in module.graph.nodes]
        assert torch.ops.flatmin.weight_gradient.default in targets
        assert torch.ops.aten.convolution_backward.default in targets
        assert all(torch.equal(a, b) for a, b in zip(module(*inputs), expected, strict=True))


def test_a_gradient_that_the_pass_itself_needs_is_left_where_it_is() -> None:
    layer = nn.Conv2d(4, 6, 3, bias=False)
    module, _ = backward_of(layer, torch.randn(2, 4, 8, 8))
    graph = module.graph
    (mine,) = [node for node in graph.nodes if node.name.startswith("getitem") and node.args[1] == 1]
    output = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        doubled = graph.call_function(torch.ops.aten.add.Tensor, (mine, mine))
    output.args = ((output.args[0][0], doubled),)
    SplitConvolutionBackward()(graph)
    assert torch.ops.flatmin.weight_gradient.default not in [node.target for node in graph.nodes]


def test_the_operation_is_the_weight_half() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    weight = torch.randn(5, 3, 3, 3, requires_grad=True)
    out = nn.functional.conv2d(x, weight, stride=2, padding=1)
    gradient = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, weight, gradient)
    found = weight_gradient(gradient, x.detach(), weight.detach(), [2, 2], [1, 1], [1, 1], 1)
    torch.testing.assert_close(found, expected)
