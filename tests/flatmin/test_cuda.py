"""On a GPU: no step waits for the device, fp16 works for real, the laws hold under deterministic settings."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

import flatmin
from flatmin.ball import norms
from tests.support.cases import METHODS, Method, Params, Setup, run, same, setup, tensors_in
from tests.support.host_sync import run_without_host_sync

pytestmark = pytest.mark.cuda

BASES: dict[str, Callable[[Params], Optimizer]] = {
    "nesterov": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "nesterov-fused": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2, fused=True),
    "adamw": lambda params: AdamW(params, lr=1e-2, capturable=True),
    "adamw-fused": lambda params: AdamW(params, lr=1e-2, fused=True),
}


@pytest.fixture(params=BASES)
def make_cuda_base(request: pytest.FixtureRequest) -> Callable[[Params], Optimizer]:
    return BASES[request.param]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "synchronization debug mode is a prototype feature"
        torch.cuda.set_sync_debug_mode("default")
    yield
    torch.backends.cudnn.deterministic = False
    torch.cuda.set_sync_debug_mode("default")


def on_gpu(model: str = "conv-batchnorm", dtype: torch.dtype | None = None) -> Setup:
    case = setup(model, dtype=dtype)
    return Setup(case.model.cuda(), case.x.cuda(), case.y.cuda())


def test_epsilon_zero_is_the_base_optimizer(make_cuda_base: Callable[[Params], Optimizer], model_name: str) -> None:
    plain, wrapped = on_gpu(model_name), on_gpu(model_name)
    torch.manual_seed(1)
    expected = run(plain, make_cuda_base(plain.model.parameters()), 4)
    torch.manual_seed(1)
    assert same(run(wrapped, flatmin.AMP(make_cuda_base(wrapped.model.parameters()), epsilon=0.0), 4), expected)


def test_a_radius_on_the_device_is_read_where_it_is_given_but_not_in_a_step() -> None:
    case = on_gpu()
    base, make = SGD(case.model.parameters(), lr=0.1), cast(Any, flatmin.AMP)  # a tensor in place of a float
    with pytest.raises(ValueError, match=r"epsilon .* at least 0, got -1"):
        make(base, epsilon=torch.tensor(-1.0, device="cuda"))
    optimizer = make(base, epsilon=torch.tensor(0.1, device="cuda"))
    closure = case.closure(optimizer)
    run_without_host_sync(lambda: optimizer.step(closure))


@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_no_step_waits_for_the_device(
    method: Method, make_cuda_base: Callable[[Params], Optimizer], model_name: str, form: str
) -> None:
    case = on_gpu(model_name)
    optimizer = method(make_cuda_base(case.model.parameters()), model=case.model)
    run(case, optimizer, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    if form == "closure":
        optimizer.step(case.closure(optimizer))
    else:
        case.step_in_blocks(optimizer)
    torch.cuda.set_sync_debug_mode("default")
    assert not optimizer.last.skipped


def test_three_steps_save_load_three_steps_equal_six(
    method: Method, make_cuda_base: Callable[[Params], Optimizer], model_name: str
) -> None:
    case = on_gpu(model_name)
    optimizer = method(make_cuda_base(case.model.parameters()), model=case.model)
    run(case, optimizer, 3)
    again = on_gpu(model_name)
    optimizer_again = method(make_cuda_base(again.model.parameters()), model=again.model)
    again.model.load_state_dict(case.model.state_dict())
    optimizer_again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which else shares its tensors
    torch.manual_seed(1)
    expected = run(case, optimizer, 3)
    torch.manual_seed(1)
    assert same(run(again, optimizer_again, 3), expected)
    assert same(again.buffers(), case.buffers())


@pytest.mark.parametrize("spoilt", [0, 1, 2])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_gradient_that_is_not_finite_leaves_theta_and_a_finite_state(
    make_cuda_base: Callable[[Params], Optimizer], spoilt: int, steps_before: int
) -> None:
    case = on_gpu()
    optimizer = flatmin.AMP(make_cuda_base(case.model.parameters()), epsilon=0.1, inner_iter=2)
    run(case, optimizer, steps_before)
    theta, calls = case.weights(), 0

    def closure() -> Tensor:
        nonlocal calls
        loss = case.closure(optimizer)()
        if calls == spoilt:
            case.model[1].weight.grad[2, 0, 1, 1] = float("nan")  # type: ignore[index]
        calls += 1
        return loss

    optimizer.step(closure)
    assert optimizer.last.skipped
    assert same(case.weights(), theta)
    assert all(t.isfinite().all() for t in (*tensors_in(optimizer), *case.model.buffers()))
    assert all(t.abs().max() < 1e6 for t in tensors_in(optimizer))
    assert not same(run(case, optimizer, 1), theta)


@pytest.mark.parametrize("kind", METHODS)
def test_fp16_training_with_a_scaler_survives_overflow_and_learns(kind: str) -> None:
    case = on_gpu("conv-batchnorm")
    optimizer = METHODS[kind](SGD(case.model.parameters(), lr=0.1, momentum=0.9), model=case.model)
    scaler = GradScaler("cuda", init_scale=2.0**40)  # fp16 ends at 2¹⁶: the first steps overflow for real

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(case.model(case.x), case.y)
        scaler.scale(loss).backward()
        return loss

    losses, skipped = list[float](), list[bool]()
    for _ in range(80):
        theta = case.weights()
        losses.append(float(optimizer.step(closure, scaler=scaler).detach()))
        skipped.append(bool(optimizer.last.skipped))
        assert same(case.weights(), theta) == skipped[-1]
        scaler.update()
    assert skipped[0]
    assert sum(skipped[50:]) <= 3  # the scale has come down to where a step overflows now and then
    assert losses[-1] < 0.7 * losses[0]
    assert all(buffer.isfinite().all() for buffer in case.model.buffers())


def test_dropout_masks_are_shared_by_the_passes_of_a_step() -> None:
    case = on_gpu("dropout")
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=3, model=case.model)
    masks = list[Tensor]()
    case.model[2].register_forward_hook(lambda module, inputs, out: masks.append(out.detach() == 0))  # type: ignore[index]
    case.model[0].weight.data.abs_()  # type: ignore[index]
    case.x.abs_()
    for _ in range(2):
        optimizer.step(case.closure(optimizer))
    assert all(torch.equal(mask, masks[0]) for mask in masks[1:4])
    assert not torch.equal(masks[0], masks[4])


@pytest.mark.parametrize("size", [3, 4097, 20_000_000, 100_000_000])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_norms_are_right_to_a_millionth(size: int, norm: Any) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(size, device="cuda")
    exact = torch.linalg.vector_norm(tensor.double(), 2 if norm == "l2" else float("inf"))
    assert float(norms([tensor], norm=norm)[0]) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize(("inner_iter", "copies"), [(1, 1), (2, 2), (3, 2)])
def test_memory_beyond_the_base_is_one_copy_and_two_for_more_passes(inner_iter: int, copies: int) -> None:
    torch.cuda.empty_cache()
    weights = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(16)]
    size = sum(weight.nbytes for weight in weights)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([weight.square().sum() for weight in weights]).sum()
        loss.backward()
        return loss

    optimizer = flatmin.AMP(SGD(weights, lr=1e-3), epsilon=0.1, inner_iter=inner_iter)
    closure()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step(closure)
    assert torch.cuda.memory_allocated() - before == pytest.approx(copies * size, rel=0.01)


class Spread(nn.Module):
    """One layer on the CPU, one on the GPU, or both on one of them."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 3)])
        self.layers[0].to(first)
        self.layers[1].to(second)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[0](x.to(self.layers[0].weight.device)))  # type: ignore[arg-type]
        out: Tensor = self.layers[1](hidden.to(self.layers[1].weight.device))  # type: ignore[arg-type]
        return out.cpu()


@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("settings", [{}, {"inner_iter": 2}, {"ball": "tensor"}, {"norm": "linf", "epsilon": 0.01}])
def test_a_model_spread_over_devices_is_trained_as_one_on_a_single_device(
    first: str, grouped: bool, scaled: bool, settings: dict[str, Any]
) -> None:
    results = []
    for devices in (("cpu", "cpu"), (first, "cuda" if first == "cpu" else "cpu")):
        case = setup()
        case.model = Spread(*devices)
        params: Any = [{"params": layer} for layer in case.layers()] if grouped else case.model.parameters()
        optimizer = flatmin.AMP(SGD(params, lr=0.1, momentum=0.9), **{"epsilon": 0.1, "model": case.model, **settings})
        scaler = GradScaler("cuda", init_scale=1024.0, enabled=scaled)

        def closure(case: Setup = case, optimizer: flatmin.AMP = optimizer, scaler: GradScaler = scaler) -> Tensor:
            optimizer.zero_grad()
            loss = case.loss()
            scaler.scale(loss).backward()
            return loss

        for _ in range(4):
            optimizer.step(closure, scaler=scaler)
            scaler.update()
            assert not optimizer.last.skipped
        results.append([weight.cpu() for weight in case.weights()])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
