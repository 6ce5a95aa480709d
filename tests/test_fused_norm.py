"""BatchNorm and ReLU in few kernels: torch's numbers, gradients and running statistics, the same bits every time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from flatmin_lab.models.fused_norm import ALONE_ROWS, norm_relu, plan, suits

MOMENTUM, EPS = 0.1, 1e-5
Tensors = dict[str, Tensor]
NormReLU = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, float], Tensor]

SHAPES = {
    "few rows": (50, 512, 4, 4),
    "few rows, odd channels": (3, 13, 5, 7),
    "one pixel": (32, 8, 1, 1),
    "many rows": (50, 64, 32, 32),
    "odd channels": (50, 100, 11, 13),
    "one channel": (7, 1, 31, 33),
    "many channels": (17, 520, 18, 15),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-4, torch.bfloat16: 3e-3}  # of the norm; torch's own is as large
cuda = pytest.mark.cuda
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, *, mean: float = 0.0, std: float = 1.0) -> Tensors:
    """Input, parameters, running statistics and a gradient, the same every time."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda")

    channels = shape[1]
    x = (mean + std * normal(*shape)).to(dtype, memory_format=torch.channels_last)
    inputs = {"x": x, "weight": normal(channels), "bias": normal(channels)}
    statistics = {"running_mean": normal(channels), "running_var": normal(channels).abs()}
    return inputs | statistics | {"dy": normal(*shape).to(dtype, memory_format=torch.channels_last)}


def results(function: NormReLU, given: Tensors) -> Tensors:
    """The output, all gradients and the running statistics."""
    x, weight, bias = (given[name].detach().clone().requires_grad_() for name in ("x", "weight", "bias"))
    mean, var = given["running_mean"].clone(), given["running_var"].clone()
    y = function(x, weight, bias, mean, var, MOMENTUM, EPS)
    y.backward(given["dy"])
    gradients = {"dx": x.grad, "dweight": weight.grad, "dbias": bias.grad}
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    assert len(found) == 3
    return {"y": y.detach(), **found, "running_mean": mean, "running_var": var}


def plain(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float) -> Tensor:
    return batch_norm(x, mean, var, weight, bias, training=True, momentum=momentum, eps=eps).relu()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-12))


def same_bits(first: Tensors, second: Tensors) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_what_lies_on_the_cpu_does_not_suit() -> None:
    assert not suits(torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("channels", [1, 3, 16, 64, 100, 160, 512, 2048, 5000])
@pytest.mark.parametrize("rows", [2, 800, ALONE_ROWS, ALONE_ROWS + 1, 12800, 51200, 131072])
def test_a_plan_covers_every_row_and_channel_once(rows: int, channels: int) -> None:
    (blocks, parts), share, width, alone = plan(rows, channels)
    assert (blocks - 1) * width < channels <= blocks * width
    assert (parts - 1) * share < rows <= parts * share
    assert width & (width - 1) == 0
    assert parts == 1 or not alone


@cuda
def test_only_dense_channels_last_pictures_suit() -> None:
    pictures = torch.zeros(4, 8, 6, 6, device="cuda")
    last = pictures.to(memory_format=torch.channels_last)
    assert suits(last)
    assert suits(last.bfloat16())
    assert suits(last.half())
    assert not suits(pictures)
    assert not suits(last[:, :4])
    assert not suits(last.double())
    assert not suits(last[:0])
    assert not suits(pictures.flatten(1))
    assert not suits(pictures[:1, :, :1, :1])  # one row has no variance


@cuda
@shapes
@dtypes
def test_the_numbers_are_those_of_torch_in_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = drawn(shape, dtype)
    before = batch_norm(given["x"].double(), None, None, given["weight"].double(), given["bias"].double(), True, 0, EPS)
    given["dy"][before.abs() < 1e-4] = 0  # where rounding may decide on which side of the ReLU's kink it lies
    expected = results(plain, {name: tensor.double() for name, tensor in given.items()})
    got = results(norm_relu, given)
    assert got["y"].dtype == got["dx"].dtype == dtype
    assert got["y"].is_contiguous(memory_format=torch.channels_last)
    for name, tensor in got.items():
        assert error(tensor, expected[name]) < TOLERANCE[tensor.dtype], name


@cuda
@pytest.mark.parametrize("rows", [800, 12800])
def test_a_large_mean_costs_no_digits(rows: int) -> None:
    """A mean of 4096 deviations: of Σx² − (Σx)²/M in float32 nothing would be left."""
    given = drawn((rows // 16, 48, 4, 4), torch.float32, mean=1024.0, std=0.25)
    expected = results(plain, {name: tensor.double() for name, tensor in given.items()})
    got = results(norm_relu, given)
    assert error(got["running_var"], expected["running_var"]) < 1e-5
    assert error(got["y"], expected["y"]) < 1e-3  # the mean itself is rounded to 2⁻¹⁴, a 4000th of a deviation


@cuda
@shapes
def test_two_runs_have_the_same_bits(shape: tuple[int, ...]) -> None:
    given = drawn(shape, torch.bfloat16)
    assert same_bits(results(norm_relu, given), results(norm_relu, given))


@cuda
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_gradient_may_lie_in_memory_as_it_likes(layout: torch.memory_format) -> None:
    given = drawn((8, 24, 30, 30), torch.float16)
    moved = given | {"dy": given["dy"].contiguous(memory_format=layout)}
    assert same_bits(results(norm_relu, moved), results(norm_relu, given))


@cuda
@pytest.mark.parametrize("rows", [800, 12800])
def test_nan_stays_nan_in_its_channel(rows: int) -> None:
    given = drawn((rows // 16, 16, 4, 4), torch.bfloat16)
    given["x"][0, 3, 0, 0] = torch.nan
    got = results(norm_relu, given)
    for name in ("y", "dx"):
        assert got[name].isnan().any((0, 2, 3)).nonzero().tolist() == [[3]]
    assert got["running_var"].isnan().nonzero().tolist() == [[3]]


@cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(50, 64, 16, 16), (50, 256, 8, 8)], ids=str)
def test_compiled_it_is_the_same_to_the_bit(shape: tuple[int, ...]) -> None:
    given = drawn(shape, torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(norm_relu, fullgraph=True)
    for _ in range(2):
        assert same_bits(results(compiled, given), results(norm_relu, given))


@cuda
@pytest.mark.parametrize("shape", [(50, 64, 16, 16), (50, 256, 8, 8)], ids=str)
def test_it_fits_into_a_cuda_graph(shape: tuple[int, ...]) -> None:
    """Captured once and replayed twice: the running statistics have moved twice, the rest is the same to the bit."""
    given = drawn(shape, torch.bfloat16)
    x, weight, bias = (given[name].clone().requires_grad_() for name in ("x", "weight", "bias"))
    mean, var = given["running_mean"].clone(), given["running_var"].clone()
    once = results(norm_relu, given)  # before the capture, in which no kernel can be compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm_relu(x, weight, bias, mean, var, MOMENTUM, EPS)
        dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), given["dy"])
    twice = results(norm_relu, given | {name: once[name] for name in ("running_mean", "running_var")})
    for _ in range(2):
        graph.replay()
    got = {"y": y.detach(), "dx": dx, "dweight": dweight, "dbias": dbias, "running_mean": mean, "running_var": var}
    assert same_bits(got, twice)


@cuda
def test_a_second_derivative_is_refused() -> None:
    given = drawn((4, 8, 4, 4), torch.float32)
    x = given["x"].requires_grad_()
    statistics = given["running_mean"], given["running_var"]
    y = norm_relu(x, given["weight"], given["bias"], *statistics, MOMENTUM, EPS)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()
