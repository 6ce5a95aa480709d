"""A captured step is the step: the same numbers, whatever the optimizer, schedule, model and batch."""

import copy
import gc
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

import flatmin
from flatmin.capture.captured_step import CapturedStep, captured_step
from flatmin.capture.cuda_graph import _check_result, _ScheduledSettings
from flatmin.capture.functional_step import FunctionalStep, PassRandom, SubstituteTensors
from flatmin.capture.step_spec import StepSpec, rehearsal
from flatmin.capture.weight_swap import weights_cast_once
from flatmin.core.capturable import GENERATOR_REPLACEMENTS, CannotCaptureError, no_host_sync
from flatmin.core.copies import Copies
from flatmin.core.packed_tensors import PackedTensors
from flatmin.core.random_state import HostRandom
from flatmin_lab.bench.timing import MIB, memory_in_use, peak_mib_since, release_memory, use_cublas_on_all_streams
from tests.support.cases import METHODS, MakeBase, Method, Params, Setup, run, same, setup, tensors_in
from tests.support.host_sync import fail_on_host_sync

on_cuda = pytest.mark.cuda


def sgd(**settings: Any) -> Callable[[Params], Optimizer]:
    return lambda params: SGD(params, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, **settings})


BASES: dict[str, Callable[[Params], Optimizer]] = {
    "nesterov": sgd(nesterov=True),
    "plain": sgd(momentum=0.0, weight_decay=0.0),
    "damped": sgd(dampening=0.3, foreach=False),
    "uphill": sgd(maximize=True, lr=0.01),
    "nesterov-fused": sgd(nesterov=True, fused=True, lr=0.125),  # a rate that float32 holds
    "adamw": lambda params: AdamW(params, lr=1e-2),
    # without decay, where torch computes 1 − lr·λ in double for a number and in float32 for a tensor
    "adamw-capturable": lambda params: AdamW(params, lr=2.0**-6, weight_decay=0.0, capturable=True),
    "adamw-fused": lambda params: AdamW(params, lr=2.0**-6, fused=True, capturable=True),
}


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).float(), y)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def on_gpu(model: str = "conv-batchnorm", **settings: Any) -> Setup:
    case = setup(model, **settings)
    return Setup(case.model.cuda(), case.x.cuda(), case.y.cuda())


def steps_of(case: Setup, optimizer: Optimizer, count: int, **settings: Any) -> tuple[CapturedStep, list[Tensor]]:
    """That many steps, and their losses."""
    step = captured_step(case.model, loss_fn, optimizer, **{"compile": False, **settings})
    return step, [step(case.x, case.y) for _ in range(count)]


# ---- anywhere


def test_on_the_cpu_it_is_the_ordinary_step(method: Method, model_name: str) -> None:
    plain, other = setup(model_name), setup(model_name)
    torch.manual_seed(1)
    expected = run(plain, method(sgd()(plain.model.parameters()), model=plain.model), 3)
    torch.manual_seed(1)
    step, _ = steps_of(other, method(sgd()(other.model.parameters()), model=other.model), 3)
    assert same(other.weights(), expected)
    assert not step.captured
    assert step.reason == "the weights are not on a CUDA device"


def test_what_loss_fn_returns_comes_back_without_a_graph() -> None:
    case = setup()

    def with_logits(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = model(x)
        return {"loss": cross_entropy(logits, y), "logits": logits}

    step = captured_step(case.model, with_logits, SGD(case.model.parameters(), lr=0.1))
    expected = with_logits(case.model, case.x, case.y)
    found = step(case.x, case.y)
    assert same(found.values(), expected.values())
    assert not any(value.requires_grad for value in found.values())


def test_batch_runs_once_a_step() -> None:
    case, calls = setup(), list[int]()

    def batch(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return x.flip(0), y.flip(0)

    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=2)
    step = captured_step(case.model, loss_fn, optimizer, batch=batch)
    step(case.x, case.y)
    assert len(calls) == 1


def test_autocast_is_around_every_pass() -> None:
    case, seen = setup(), list[torch.dtype]()

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        seen.append(logits.dtype)
        return cross_entropy(logits.float(), y)

    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    captured_step(case.model, watched, optimizer, autocast=torch.bfloat16)(case.x, case.y)
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_scaler_is_handed_on(wrapped: bool) -> None:
    case, other = setup(), setup()
    scaler = GradScaler("cpu", init_scale=2.0**8)
    bases = [SGD(c.model.parameters(), lr=0.1) for c in (case, other)]
    optimizers = [flatmin.AMP(base, epsilon=0.1) if wrapped else base for base in bases]
    captured_step(case.model, loss_fn, optimizers[0], scaler=scaler)(case.x, case.y)
    scaler.update()
    expected = run(other, optimizers[1], 1)
    torch.testing.assert_close(case.weights(), expected)


def test_an_error_on_the_way_to_a_graph_keeps_no_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a cycle of errors and frames, until Python comes round to collect it."""
    case, alive = setup(), list[weakref.ref[Tensor]]()

    def fail(*_: object) -> None:
        computed = case.model(case.x)
        alive.append(weakref.ref(computed))
        try:
            raise ValueError("not on this stream")
        except ValueError as error:
            kept = error  # a cycle: the error has this frame
            raise CannotCaptureError("it cannot") from kept

    step = captured_step(case.model, loss_fn, SGD(case.model.parameters(), lr=0.1))
    step(case.x, case.y)
    monkeypatch.setattr(CapturedStep, "reason", None)  # as on a GPU
    monkeypatch.setattr(CapturedStep, "_graph_for", fail)
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="runs eagerly: it cannot"):
            step(case.x, case.y)
        assert [one() for one in alive] == [None]
    finally:
        gc.enable()
    assert step._failure == "it cannot"
    step.reset()
    assert step._failure is None


def test_what_cannot_be_compiled_is_captured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: CapturedStep, _: object) -> None:
        raise Unsupported("no such thing\nand much more") if step.compile else CannotCaptureError("it cannot")

    case = setup()
    step = captured_step(case.model, loss_fn, SGD(case.model.parameters(), lr=0.1))
    step(case.x, case.y)
    monkeypatch.setattr(CapturedStep, "reason", None)
    monkeypatch.setattr(CapturedStep, "_graph_for", fail)
    with pytest.warns(UserWarning, match="cannot be compiled and is captured uncompiled: no such thing$"):
        step(case.x, case.y)
    assert (step.compile, step._failure) == (False, None)
    with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph and runs eagerly: it cannot"):
        step(case.x, case.y)


def test_a_base_that_steps_after_the_graph_may_change_its_settings() -> None:
    """OneCycleLR moves momentum or betas in every step; a graph without the base's step does not hold them."""
    case = setup()
    bases = {
        "adamw": AdamW(case.model.parameters()),
        "sgd": SGD(case.model.parameters(), lr=0.1, momentum=0.9),
        "fused": SGD(case.model.parameters(), lr=0.1, momentum=0.9, fused=True),
    }
    counts = {}
    for name, base in bases.items():
        step = captured_step(case.model, loss_fn, flatmin.AMP(base, epsilon=0.1))
        scheduler = OneCycleLR(base, max_lr=0.1, total_steps=20)
        keys = set()
        for _ in range(10):
            step(case.x, case.y)
            keys.add(step._key((case.x, case.y)))
            scheduler.step()
        counts[name] = len(keys)
    assert counts == {"adamw": 1, "sgd": 1, "fused": 10}  # on the CPU no kernel of ours takes SGD's step


def test_a_base_whose_settings_keep_moving_is_taken_out_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = setup(), list[bool]()

    def graph(*_: object, by_torch: bool, **__: object) -> str:
        made.append(by_torch)
        return "a graph"

    base = SGD(case.model.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = captured_step(case.model, loss_fn, base, compile=False)
    step(case.x, case.y)
    monkeypatch.setattr("flatmin.capture.captured_step.CapturedGraph", graph)
    monkeypatch.setattr("flatmin.capture.captured_step.Workspace", lambda spec: None)
    for number in range(10):
        base.param_groups[0]["momentum"] = 0.8 + number / 100
        step._graph_for((case.x, case.y))
    assert made == [True] * 4 + [False]


def test_wrong_arguments_are_named() -> None:
    case = setup()
    optimizer = SGD(case.model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got an object of type int"):
        captured_step(3, loss_fn, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got the class SGD"):
        captured_step(case.model, loss_fn, SGD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        captured_step(case.model, "loss", optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got an object of type bool"):
        captured_step(case.model, loss_fn, optimizer, scaler=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"autocast must be a torch\.dtype"):
        captured_step(case.model, loss_fn, optimizer, autocast=True)  # type: ignore[arg-type]
    step = captured_step(case.model, lambda model, x: 3.0, optimizer)
    with pytest.raises(TypeError, match="loss_fn must return the loss as a tensor"):
        step(case.x)


# ---- what a graph records, run without one


def spec_of(case: Setup, optimizer: Optimizer, **settings: Any) -> StepSpec:
    given: dict[str, Any] = {"autocast": None, "scaler": None, "loss_fn": loss_fn, "batch": lambda *inputs: inputs}
    return StepSpec(model=case.model, optimizer=optimizer, **{**given, **settings})


def aside(case: Setup, optimizer: Optimizer, **settings: Any) -> Callable[[], Any]:
    """A step whose weights stay where they are."""
    spec = spec_of(case, optimizer, **settings)
    passes = FunctionalStep(
        spec,
        partial(loss_fn, case.model),
        SubstituteTensors(),
        (case.x, case.y),
        theta=Copies(),
        pass_random=PassRandom(spec.device),
    )

    def step() -> Any:
        passes.step()
        return passes.result

    return step


@pytest.mark.parametrize("inner_iter", [1, 3])
def test_all_forms_of_a_step_begin_each_pass_with_the_buffers_of_the_clean_one(inner_iter: int) -> None:
    """Of a network that computes with its buffers: spectral_norm's vectors, which every pass moves."""
    ended = []
    for form in ("closure", "blocks", "aside"):
        case = setup()
        spectral_norm(next(part for part in case.model.modules() if isinstance(part, nn.Linear)))
        base = SGD(case.model.parameters(), lr=0.1)
        optimizer = flatmin.AMP(base, epsilon=0.3, inner_iter=inner_iter, model=case.model)
        closure, beside = case.closure(optimizer), aside(case, optimizer)
        for _ in range(3):
            if form == "closure":
                optimizer.step(closure)
            elif form == "aside":
                beside()
            else:
                closure()
                for _ in range(inner_iter):
                    with optimizer.perturbed():
                        closure()
                optimizer.step()
        ended.append([*case.weights(), *case.buffers()])
    assert same(ended[0], ended[1])
    assert same(ended[0], ended[2])


def test_after_an_error_in_the_bases_step_its_theta_is_not_restored() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    fails, infinite = [False], [False]

    def hook(*_: Any) -> None:
        if fails[0]:
            raise KeyboardInterrupt

    def loss(model: nn.Module, *inputs: Tensor) -> Tensor:
        return loss_fn(model, *inputs) * (float("inf") if infinite[0] else 1)

    optimizer.base.register_step_pre_hook(hook)
    passes = FunctionalStep(
        spec_of(case, optimizer, loss_fn=loss),
        partial(loss, case.model),
        SubstituteTensors(),
        (case.x, case.y),
        theta=Copies(),
        pass_random=PassRandom(torch.device("cpu")),
    )
    passes.step()
    fails[0] = True
    with pytest.raises(KeyboardInterrupt):
        passes.step()
    fails[0], infinite[0] = False, True
    with torch.no_grad():
        for param in case.model.parameters():
            param.fill_(5.0)  # as a checkpoint that is loaded
    passes.step()
    assert passes.skip
    assert all(bool((weight == 5.0).all()) for weight in case.weights())


def test_a_step_aside_is_the_step_bit_for_bit(make_base: MakeBase, method: Method, model_name: str) -> None:
    plain, other = setup(model_name), setup(model_name)
    expected = method(make_base(plain.model.parameters()), model=plain.model)
    optimizer = method(make_base(other.model.parameters()), model=other.model)
    torch.manual_seed(1)
    losses = [expected.step(plain.closure(expected)).detach() for _ in range(3)]
    torch.manual_seed(1)
    step = aside(other, optimizer)
    assert same([step() for _ in range(3)], losses)
    assert same(other.weights(), plain.weights())
    assert same(other.buffers(), plain.buffers())
    assert same(tensors_in(optimizer), tensors_in(expected))


def test_a_step_aside_in_half_precision_is_the_step_under_autocast(model_name: str) -> None:
    plain, other = setup(model_name), setup(model_name)
    bases = [sgd(nesterov=True)(case.model.parameters()) for case in (plain, other)]
    expected, optimizer = (
        flatmin.AMP(b, epsilon=0.1, model=c.model) for b, c in zip(bases, (plain, other), strict=True)
    )
    torch.manual_seed(1)
    step = captured_step(plain.model, loss_fn, expected, autocast=torch.bfloat16)
    losses = [step(plain.x, plain.y) for _ in range(3)]
    torch.manual_seed(1)
    step_aside = aside(other, optimizer, autocast=torch.bfloat16)
    torch.testing.assert_close([step_aside() for _ in range(3)], losses, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(other.weights(), plain.weights(), rtol=1e-6, atol=1e-7)


def test_a_weight_that_nobody_moves_is_never_touched() -> None:
    """One group with a radius of 0, a frozen layer, and one that gets no gradient."""
    case = setup("unused")
    twin = setup("unused")

    def optimizer_of(model: nn.Module) -> flatmin.AMP:
        weight, *rest = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": rest, "epsilon": 0.0}]
        return flatmin.AMP(SGD(groups, lr=0.1), epsilon=0.1)

    optimizer, expected = optimizer_of(case.model), optimizer_of(twin.model)
    pointers = [p.data_ptr() for p in case.model.parameters()]
    step = aside(case, optimizer)
    for _ in range(2):
        step()
        expected.step(twin.closure(expected))
    assert same(case.weights(), twin.weights())
    assert [p.data_ptr() for p in case.model.parameters()] == pointers


class Sum(nn.Module):
    """Two weights whose gradients are one tensor, and a third whose gradient is one number for all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(3, 6)), nn.Parameter(torch.ones(3, 6))
        self.third = nn.Parameter(torch.ones(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.linear(x, self.one + self.other) + self.third.sum()
        return out


def test_gradients_that_share_memory_are_taken_apart(method: Method) -> None:
    batch = setup()
    plain, other = (Setup(Sum(), batch.x, batch.y) for _ in range(2))
    expected = method(sgd()(plain.model.parameters()), model=plain.model)
    optimizer = method(sgd()(other.model.parameters()), model=other.model)
    step = aside(other, optimizer)
    for _ in range(2):
        torch.manual_seed(1)
        expected.step(plain.closure(expected))
        torch.manual_seed(1)
        step()
    assert same(other.weights(), plain.weights())


def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + torch.rand_like(x), y


@pytest.mark.parametrize("model", ["dropout", "conv-batchnorm"])
def test_a_batch_that_draws_does_not_change_the_masks(model: str, method: Method) -> None:
    plain, other = setup(model), setup(model)
    expected = method(sgd()(plain.model.parameters()), model=plain.model)
    optimizer = method(sgd()(other.model.parameters()), model=other.model)
    torch.manual_seed(1)
    steps_of(plain, expected, 3, batch=noisy)
    torch.manual_seed(1)
    step = aside(other, optimizer, batch=noisy)
    for _ in range(3):
        step()
    assert same(other.weights(), plain.weights())


def test_gradients_that_someone_left_are_not_stepped(method: Method) -> None:
    """Of a frozen layer, and of one that this loss does not use."""
    plain, other = setup("unused"), setup("unused")
    for case in (plain, other):
        for number, param in enumerate(case.model.parameters()):
            param.grad = torch.ones_like(param)
            param.requires_grad_(number > 0)
    torch.manual_seed(1)
    steps_of(plain, method(sgd()(plain.model.parameters()), model=plain.model), 1)
    torch.manual_seed(1)
    aside(other, method(sgd()(other.model.parameters()), model=other.model))()
    assert same(other.weights(), plain.weights())


class Scaled(torch.autograd.Function):
    """Its backward pass needs the weight in float32, as the forward pass got it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) + 0.1 * weight


def test_weights_that_more_than_a_cast_happens_to_stay_float32() -> None:
    plain, hooked, own = (nn.Parameter(torch.randn(3)) for _ in range(3))
    hooked.register_hook(lambda gradient: gradient / 3)
    x = torch.randn(4, 3, dtype=torch.bfloat16)

    def work() -> None:
        loss = (x * plain.to(torch.bfloat16) + x * hooked.to(torch.bfloat16) + Scaled.apply(x, own)).sum()  # type: ignore[no-untyped-call]
        torch.autograd.grad(loss, [plain, hooked, own])

    assert weights_cast_once([plain, hooked, own], torch.bfloat16, work) == {plain}


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.mean = 0.9 * self.mean + out.detach().mean()
        return out


def test_a_rehearsal_leaves_nothing_behind() -> None:
    batch = setup()
    case = Setup(Replacing(), batch.x, batch.y)
    generator = torch.Generator().manual_seed(3)
    optimizer = flatmin.RMP(sgd()(case.model.parameters()), epsilon=0.1, generator=generator)
    buffer, drawn, host = case.model.mean, generator.get_state(), HostRandom()
    centred = nn.BatchNorm1d(6)

    def run() -> None:
        with rehearsal(spec_of(case, optimizer, batch=centred)):
            optimizer.step(case.closure(optimizer))
            centred(case.x)
            torch.rand(3)
            random.random()
            np.random.rand()

    with pytest.raises(CannotCaptureError, match="replaces a buffer by a new tensor"):
        run()
    assert case.model.mean is buffer
    assert buffer == 0
    assert torch.equal(generator.get_state(), drawn)
    assert not host.has_moved()
    assert centred.num_batches_tracked == 0


def test_what_a_graph_would_not_notice_is_refused() -> None:
    case = setup()
    step = captured_step(case.model, loss_fn, SGD(case.model.parameters(), lr=0.1))
    step._check()
    handle = case.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[index]
    with pytest.raises(CannotCaptureError, match="a weight has a post-accumulate-grad hook"):
        step._check()
    handle.remove()
    case.model[0].weight.data = case.model[2].weight.data[:, :6].repeat(3, 1)[:8]  # type: ignore[index]
    case.model[2].bias.data = case.model[0].weight.data.view(-1)[:3]  # type: ignore[index]
    with pytest.raises(CannotCaptureError, match="two weights share memory"):
        step._check()
    with pytest.raises(CannotCaptureError, match="an object of type set"):
        step._key(({1, 2},))
    with pytest.raises(CannotCaptureError, match="loss_fn returns an object of type Setup"):
        _check_result((case.x, case), case.x.device)


class Recomputing(nn.Module):
    """Its first layer is recomputed in the backward pass; the inputs need a gradient, but no weight comes before it."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.use_reentrant = nn.Linear(6, 8), nn.Linear(8, 3), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.use_reentrant)
        out: Tensor = self.last(hidden)
        return out


def test_weights_that_only_backward_reaches_are_not_left_out() -> None:
    batch = setup()
    plain, other = (Setup(Recomputing(use_reentrant=False), batch.x, batch.y) for _ in range(2))
    expected, optimizer = (flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1) for case in (plain, other))
    step = aside(other, optimizer)
    other.model.last.bias.grad = torch.ones(3)  # type: ignore[union-attr]
    step()
    expected.step(plain.closure(expected))
    assert same(other.weights(), plain.weights())
    other.model.use_reentrant = True  # type: ignore[assignment]
    with pytest.raises(CannotCaptureError, match="give it use_reentrant=False"):
        aside(other, optimizer)()
    other.model.load_state_dict(copy.deepcopy(other.model.state_dict()), assign=True)
    with pytest.raises(CannotCaptureError, match="no weight got a gradient"):
        aside(other, optimizer)()


def test_the_modes_and_buffers_of_a_loss_that_is_a_module_are_seen() -> None:
    case = setup()

    class Criterion(nn.CrossEntropyLoss):
        def forward(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(model(x), y)

    criterion = Criterion(weight=torch.ones(3))
    step = captured_step(case.model, criterion, SGD(case.model.parameters(), lr=0.1))
    step._prepare_capture()
    key, addresses = step._key((case.x, case.y)), step._current_addresses()
    criterion.eval()
    assert step._key((case.x, case.y)) != key
    criterion.weight = torch.full((3,), 2.0)
    assert step._current_addresses() != addresses


def test_a_replaced_generator_makes_every_step_capture_again() -> None:
    case = setup()
    step = captured_step(case.model, loss_fn, SGD(case.model.parameters(), lr=0.1))
    step._prepare_capture()
    assert step._current_addresses() == step._addresses
    GENERATOR_REPLACEMENTS[0] += 1
    assert step._current_addresses() != step._addresses


def test_more_shapes_than_it_keeps_are_not_captured_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays between the captures do not excuse them, unless they are many."""
    monkeypatch.setattr("flatmin.capture.captured_step.CapturedGraph", lambda *_, **__: "a graph")
    monkeypatch.setattr("flatmin.capture.captured_step.Workspace", lambda spec: None)
    case, chosen = setup(), random.Random(0)
    for count, gives_up in ((8, False), (12, True)):
        step = captured_step(case.model, loss_fn, SGD(case.model.parameters(), lr=0.1), compile=False)
        given_up = False
        try:
            for _ in range(1000):
                step._graph_for((torch.zeros(chosen.randint(1, count)),))
        except CannotCaptureError as error:
            given_up = True
            assert "more shapes than the 8 kept" in str(error)  # noqa: PT017
        assert given_up == gives_up
        assert step._captures < 20


def test_what_is_kept_of_a_step_keeps_nothing_else() -> None:
    loss, logits = PackedTensors([torch.tensor(1.0), torch.zeros(100, 100)]).unpack()
    assert loss.untyped_storage().nbytes() < 100
    assert logits.shape == (100, 100)
    case = setup()
    optimizer = SGD(case.model.parameters(), lr=0.1)
    scheduled, alive = _ScheduledSettings(optimizer, case.x.device), weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer, scheduled
        assert alive() is None
    finally:
        gc.enable()


def test_an_autocast_around_the_call_is_that_of_the_passes() -> None:
    """Without its cache, which would hand the perturbed pass the weights of the clean one."""
    results = []
    for around, inside in ((torch.bfloat16, None), (None, torch.bfloat16)):
        case = setup()
        optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.5)
        with torch.autocast("cpu", torch.bfloat16, enabled=around is not None):
            _, losses = steps_of(case, optimizer, 3, autocast=inside)
        last = optimizer.last
        assert last.loss is not None
        assert last.loss_perturbed is not None
        assert last.loss_perturbed > last.loss
        results.append([*losses, *case.weights()])
    assert same(*results)


def test_schedules_do_not_change_what_a_graph_holds_fast() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.named_parameters(), lr=0.1, momentum=0.9), epsilon=0.1)
    step = captured_step(case.model, loss_fn, optimizer)
    step._fits_sgd_kernel = True
    group, known = optimizer.param_groups[0], step._key((case.x, 3))
    for key, value in {"lr": 0.2, "momentum": 0.8, "weight_decay": 0.0, "epsilon": 0.3, "inner_lr": 2}.items():
        group[key] = value
        assert step._key((case.x, 3)) == known
    for key, value in {"epsilon": 0.0, "momentum": 0.0, "nesterov": True, "weight_decay": 0.1}.items():
        before, group[key] = group[key], value
        assert step._key((case.x, 3)) != known
        group[key] = before
    for inputs in ((case.x, 4), (case.x, True), (case.x[:3], 3), (case.x.double(), 3), ({"x": case.x}, 3)):
        assert step._key(inputs) != known
    case.model[0].weight.requires_grad_(False)  # type: ignore[index]
    assert step._key((case.x, 3)) != known


# ---- on a GPU


def six_steps(model: str, method: Method, base: str, *, captured: bool) -> list[Tensor]:
    """All that can be known of six steps, five of them replays if captured, with lr, ε and ζ on the move."""
    case = on_gpu(model)
    optimizer = method(BASES[base](case.model.parameters()), model=case.model)
    step = captured_step(case.model, loss_fn, optimizer, compile=False, capture=captured)
    torch.manual_seed(1)
    seen = list[Tensor]()
    for number in range(6):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / 2  # which float32 holds
            group["epsilon"] = 0.1 / (number + 1)
            if "inner_lr" in group:
                group["inner_lr"] = 1.0 + number
        seen.append(step(case.x, case.y))
        assert step.captured == (captured and number > 0)
        seen += [value for value in vars(optimizer.last).values() if isinstance(value, Tensor)]
        seen.append(torch.rand(3, device="cuda"))  # the random state advances alike
    return [*seen, *case.weights(), *case.buffers(), *tensors_in(optimizer)]


@on_cuda
@pytest.mark.parametrize("base", BASES)
def test_captured_is_uncaptured_bit_for_bit(method: Method, base: str, deterministic: None) -> None:
    for model in ("conv-batchnorm", "dropout"):
        assert same(*(six_steps(model, method, base, captured=captured) for captured in (False, True)))


@on_cuda
def test_captured_is_uncaptured_for_every_model(method: Method, model_name: str, deterministic: None) -> None:
    assert same(*(six_steps(model_name, method, "nesterov", captured=captured) for captured in (False, True)))


@on_cuda
@pytest.mark.parametrize("base", BASES)
def test_a_plain_optimizer_is_captured_too(base: str, model_name: str, deterministic: None) -> None:
    results = []
    for captured in (False, True):
        case = on_gpu(model_name)
        optimizer = BASES[base](case.model.parameters())
        torch.manual_seed(1)
        step, losses = steps_of(case, optimizer, 5, capture=captured)
        assert step.captured == captured
        results.append([*losses, *case.weights(), *case.buffers(), *tensors_in(optimizer)])
    assert same(*results)


@on_cuda
def test_without_the_model_every_pass_counts_for_batchnorm_and_dropout(deterministic: None) -> None:
    for name in ("conv-batchnorm", "dropout"):
        results = []
        for captured in (False, True):
            case = on_gpu(name)
            optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, inner_iter=2)
            torch.manual_seed(1)
            steps_of(case, optimizer, 5, capture=captured)
            results.append([*case.weights(), *case.buffers()])
        assert same(*results)


@on_cuda
def test_dropout_masks_are_those_of_the_clean_pass_and_new_in_every_replay() -> None:
    case = on_gpu("dropout")
    case.model[0].weight.data.abs_()  # type: ignore[index]
    case.x.abs_()
    case.model[0].bias.data.fill_(1.0)  # type: ignore[index]

    def with_masks(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model[2](model[1](model[0](x)))
        pass_random.copy_(
            torch.cat([pass_random[1:], (hidden == 0)[None]])
        )  # a buffer of the graph: the last three passes
        return cross_entropy(model[3](hidden), y), hidden == 0

    pass_random = torch.zeros(3, 10, 16, dtype=torch.bool, device="cuda")
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=1e-3), epsilon=1e-3, inner_iter=2, model=case.model)
    step = captured_step(case.model, with_masks, optimizer, compile=False)
    seen = []
    for number in range(6):
        _, mask = step(case.x, case.y)
        assert step.captured == (number > 0)
        assert all(torch.equal(one, mask) for one in pass_random)
        seen.append(mask)
    assert len({tuple(mask.flatten().tolist()) for mask in seen}) == 6


@on_cuda
def test_a_scheduler_moves_the_rate_without_a_new_capture(deterministic: None) -> None:
    results = []
    for captured in (False, True):
        case = on_gpu()
        optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, model=case.model)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        step = captured_step(case.model, loss_fn, optimizer, compile=False, capture=captured)
        for _ in range(5):
            step(case.x, case.y)
            scheduler.step()
        assert len(step._graphs) == captured
        results.append(case.weights())
    assert same(*results)


@on_cuda
def test_new_shapes_and_settings_capture_anew(deterministic: None) -> None:
    results = []
    for captured in (False, True):
        case = on_gpu()
        optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, model=case.model)
        step = captured_step(case.model, loss_fn, optimizer, compile=False, capture=captured)
        for number in range(8):
            count = 7 if number % 4 == 3 else 10  # the last, smaller batch
            if number == 4:
                optimizer.param_groups[0]["weight_decay"] = 0.5  # which moves like a rate
            if number == 5:
                optimizer.param_groups[0]["nesterov"] = True
            if number == 6:
                optimizer.param_groups[0]["epsilon"] = 0.0
            step(case.x[:count], case.y[:count])
        assert len(step._graphs) == (5 if captured else 0)
        results.append([*case.weights(), *case.buffers(), *tensors_in(optimizer)])
    assert same(*results)


@on_cuda
def test_three_steps_save_load_three_steps_equal_six(method: Method, deterministic: None) -> None:
    case = on_gpu()
    optimizer = method(sgd(nesterov=True)(case.model.parameters()), model=case.model)
    step, _ = steps_of(case, optimizer, 3)
    saved = copy.deepcopy((case.model.state_dict(), optimizer.state_dict()))
    again = on_gpu(seed=1)
    optimizer_again = method(sgd(nesterov=True)(again.model.parameters()), model=again.model)
    step_again, _ = steps_of(again, optimizer_again, 2)
    again.model.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    for number in range(3):
        torch.manual_seed(number)
        step(case.x, case.y)
        torch.manual_seed(number)
        step_again(case.x, case.y)
    assert step_again.captured
    assert same(again.weights(), case.weights())
    assert same(again.buffers(), case.buffers())
    assert same(tensors_in(optimizer_again), tensors_in(optimizer))


@on_cuda
def test_momentum_of_another_layout_is_laid_out_anew(deterministic: None) -> None:
    """As a checkpoint brings it, which does not keep channels-last; also after a capture."""
    results = []
    for captured in (False, True):
        case = on_gpu()
        case.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        base = sgd(nesterov=True)(case.model.parameters())
        step, _ = steps_of(case, flatmin.AMP(base, epsilon=0.1, model=case.model), 3, capture=captured)
        for state in base.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].clone(memory_format=torch.contiguous_format)
        losses = [step(case.x, case.y) for _ in range(2)]
        results.append([*losses, *case.weights()])
    assert same(*results)


@on_cuda
def test_weights_changed_between_steps_are_seen(deterministic: None) -> None:
    for autocast in (None, torch.bfloat16):
        results = []
        for captured in (False, True):
            case = on_gpu()
            optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, model=case.model)
            step, _ = steps_of(case, optimizer, 3, capture=captured, autocast=autocast)
            with torch.no_grad():
                for param in case.model.parameters():
                    param.mul_(0.5)
            loss = step(case.x, case.y)
            for module in case.model.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.data = module.weight.data.clone() * 2  # other memory
            results.append([loss, step(case.x, case.y), *case.weights()])
        assert same(*results)


@on_cuda
def test_a_gradient_that_is_not_finite_leaves_theta(method: Method, deterministic: None) -> None:
    for base in ("nesterov", "nesterov-fused", "adamw-capturable", "adamw"):
        case = on_gpu()
        optimizer = method(BASES[base](case.model.parameters()), model=case.model)
        step, _ = steps_of(case, optimizer, 3)
        theta = case.weights()
        x = case.x.clone()
        x[0, 0] = float("nan")
        step(x, case.y)
        assert step.captured
        assert optimizer.last.skipped
        assert same(case.weights(), theta)
        assert all(t.isfinite().all() for t in tensors_in(optimizer))
        step(case.x, case.y)
        assert not optimizer.last.skipped


@on_cuda
def test_results_are_tensors_of_their_own() -> None:
    case = on_gpu()
    optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1)
    step, losses = steps_of(case, optimizer, 4)
    lasts = []
    for _ in range(3):
        losses.append(step(case.x, case.y))
        lasts.append(optimizer.last)
    assert len({float(loss) for loss in losses}) == len(losses)
    assert len({float(last.loss_perturbed) for last in lasts}) == 3  # type: ignore[arg-type]
    assert all(param.grad is None for param in case.model.parameters())


class Deciding(nn.Module):
    """Its forward pass depends on a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * 2 if float(out.detach().sum()) > 0 else out


class DrawingOnTheHost(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * (1 + torch.rand(()).item())


@on_cuda
@pytest.mark.parametrize(
    ("kind", "word"), [(Deciding, "reads a number back"), (DrawingOnTheHost, "draws random numbers on")]
)
@pytest.mark.parametrize("compile_", [False, True])
def test_what_cannot_be_captured_runs_eagerly_and_says_so(kind: type[Deciding], word: str, compile_: bool) -> None:
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        case = Setup(kind().cuda(), torch.randn(10, 6, device="cuda"), torch.randint(0, 3, (10,), device="cuda"))
        optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, model=case.model)
        step = captured_step(case.model, loss_fn, optimizer, compile=compile_, capture=captured)
        torch.manual_seed(1)
        step(case.x, case.y)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(case.x, case.y)
        messages = [str(each.message) for each in said]
        assert sum(f"runs eagerly: it {word}" in message for message in messages) == captured, messages
        assert len(messages) == captured or compile_, messages  # torch's compiler has much to say
        step(case.x, case.y)  # and does not say so again
        assert not step.captured
        results.append([*case.weights(), torch.rand(3, device="cuda")])
    assert same(*results)
    fresh = on_gpu()  # and others can still be captured
    assert steps_of(fresh, sgd()(fresh.model.parameters()), 3)[0].captured


@on_cuda
@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_a_batch_that_draws_on_the_host_is_not_captured(draw: Callable[[], float]) -> None:
    case = on_gpu()
    step = captured_step(
        case.model,
        loss_fn,
        sgd()(case.model.parameters()),
        compile=False,
        batch=lambda x, y: (draw() * x + (1 - draw()) * x.flip(0), y),
    )
    step(case.x, case.y)
    before = HostRandom()
    with pytest.warns(UserWarning, match="draws random numbers on the CPU"):
        step(case.x, case.y)
    drawn = HostRandom()
    before.put_back()
    draw(), draw()
    assert not drawn.has_moved()  # two in the ordinary step, and none of the look are left


@on_cuda
@pytest.mark.parametrize("inner_iter", [1, 2])
def test_a_captured_batch_that_draws_does_not_change_the_masks(inner_iter: int, deterministic: None) -> None:
    results = []
    for captured in (False, True):
        case = on_gpu("dropout")
        optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, model=case.model, inner_iter=inner_iter)
        torch.manual_seed(1)
        step, losses = steps_of(case, optimizer, 5, capture=captured, batch=noisy)
        assert step.captured == captured
        results.append([*losses, *case.weights()])
    assert same(*results)


@on_cuda
def test_only_this_thread_must_not_wait() -> None:
    number = torch.ones((), device="cuda")

    def elsewhere() -> None:
        thread = threading.Thread(target=number.item)
        thread.start()
        thread.join()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with no_host_sync():
            elsewhere()
    with pytest.raises(CannotCaptureError, match="reads a number back"), no_host_sync():
        number.item()


@on_cuda
def test_lbfgs_runs_eagerly() -> None:
    case = on_gpu("mlp")
    step = captured_step(case.model, loss_fn, LBFGS(case.model.parameters()), compile=False)
    first = step(case.x, case.y)
    with pytest.warns(UserWarning, match="LBFGS"):
        assert step(case.x, case.y) < first


@on_cuda
def test_a_step_with_a_hook_on_the_base_calls_it() -> None:
    case, calls = on_gpu(), list[int]()
    base = sgd()(case.model.parameters())
    base.register_step_pre_hook(lambda *_: calls.append(1))
    step, _ = steps_of(case, flatmin.AMP(base, epsilon=0.1), 4)
    assert step.captured
    assert len(calls) == 4


@on_cuda
@pytest.mark.parametrize("wrapped", [True, False])
def test_fp16_with_a_scaler(wrapped: bool) -> None:
    results = []
    for captured in (False, True):
        case = on_gpu()
        base = sgd()(case.model.parameters())
        optimizer = flatmin.AMP(base, epsilon=0.1, model=case.model) if wrapped else base
        scaler = GradScaler("cuda", init_scale=2.0**20)
        settings: dict[str, Any] = {"autocast": torch.float16, "scaler": scaler, "capture": captured}
        step = captured_step(case.model, loss_fn, optimizer, compile=False, **settings)
        for _ in range(12):
            step(case.x, case.y)
            scaler.update()
        assert step.captured == captured
        results.append(([*case.weights(), *case.buffers()], scaler.get_scale()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)
    assert results[0][1] == results[1][1] < 2.0**20


@on_cuda
def test_half_precision_weights_stand_in_for_casts(deterministic: None) -> None:
    results = []
    for captured in (False, True):
        case = on_gpu()
        optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, model=case.model)
        step, losses = steps_of(case, optimizer, 5, capture=captured, autocast=torch.bfloat16)
        if captured:
            (graph,) = step._graphs.values()
            assert {p.dim() for p in graph.functional_step.half} >= {
                2,
                4,
            }  # convolution and linear layer, not BatchNorm
            assert all(p.dtype == torch.float32 for p in case.model.parameters())
        results.append([*losses, *case.weights(), *case.buffers(), *tensors_in(optimizer)])
    assert same(*results)


@on_cuda
@pytest.mark.filterwarnings("ignore")  # of torch, about its compiler
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["conv-batchnorm", "dropout"])
def test_compiled_is_uncompiled_within_rounding(autocast: torch.dtype | None, name: str) -> None:
    """For a few steps, in bfloat16 fewer; dropout has a generator of the compiler's own, so it just has to learn."""
    results = []
    precise = autocast is None
    count = 12 if precise or name == "dropout" else 4
    for compiled in (False, True):
        case = on_gpu(name)
        optimizer = flatmin.AMP(sgd()(case.model.parameters()), epsilon=0.1, model=case.model)
        torch.manual_seed(1)
        step, losses = steps_of(case, optimizer, count, compile=compiled, autocast=autocast)
        assert step.captured, step.reason
        results.append([torch.stack(losses), *case.weights(), *case.buffers()])
    if name == "dropout":
        assert results[1][0][-1] < results[1][0][0]
        return
    torch.testing.assert_close(*results, rtol=1e-3 if precise else 0.1, atol=1e-5 if precise else 2e-2)


@on_cuda
def test_no_step_waits_for_the_device() -> None:
    for make_base in BASES.values():
        case = on_gpu()
        optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1, model=case.model)
        step, _ = steps_of(case, optimizer, 3)
        torch.cuda.synchronize()
        optimizer.param_groups[0]["lr"] = 0.01
        with fail_on_host_sync():
            step(case.x, case.y)
        assert step.captured


@on_cuda
def test_memory_beyond_the_base_is_one_copy() -> None:
    """In float32, one for θ + Δ; with half precision none, because it goes where the clean pass had θ."""
    sizes = {}
    use_cublas_on_all_streams(torch.device("cuda"), torch.float32)
    for autocast in (None, torch.bfloat16):
        for name, wrap in (("erm", lambda base, **_: base), ("amp", partial(flatmin.AMP, epsilon=0.1))):
            release_memory(torch.device("cuda"))
            before = memory_in_use(torch.device("cuda"))
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
            x = torch.randn(8, 2048, device="cuda")
            size = sum(p.nbytes for p in model.parameters())
            optimizer = wrap(SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
            step = captured_step(
                model, lambda model, x: model(x).float().square().mean(), optimizer, compile=False, autocast=autocast
            )
            for _ in range(3):
                step(x)
            peak = peak_mib_since(before, lambda _, step=step, x=x: step(x), torch.device("cuda"))  # type: ignore[misc]
            assert peak is not None
            sizes[name] = peak * MIB / size
            del step, optimizer, model
        assert sizes["amp"] - sizes["erm"] < (1.1 if autocast is None else 0.1), autocast


@pytest.mark.parametrize("kind", METHODS)
@on_cuda
def test_streams_do_not_matter(kind: str, deterministic: None) -> None:
    results = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        case = on_gpu("dropout")
        optimizer = METHODS[kind](sgd()(case.model.parameters()), model=case.model)
        torch.manual_seed(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            steps_of(case, optimizer, 5)
        torch.cuda.synchronize()
        results.append(case.weights())
    assert same(*results)
