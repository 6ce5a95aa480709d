"""A step from outside: weights, buffers and storage come back, results pass through, nothing waits for the device."""

import copy
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import flatmin
from flatmin.optim import perturbed
from tests.support.cases import MakeBase, Method, Setup, run, same, setup, tensors_in
from tests.support.host_sync import HostReads


def test_weights_keep_their_storage_and_buffers_theirs(method: Method, make_base: MakeBase, model_name: str) -> None:
    case = setup(model_name)
    optimizer = method(make_base(case.model.parameters()), model=case.model)
    tensors = [*case.model.parameters(), *case.model.buffers()]
    pointers = [tensor.data_ptr() for tensor in tensors]
    run(case, optimizer, 2)
    case.step_in_blocks(optimizer)
    assert [tensor.data_ptr() for tensor in tensors] == pointers
    assert all(a is b for a, b in zip([*case.model.parameters(), *case.model.buffers()], tensors, strict=True))


def test_the_base_steps_from_exactly_theta(method: Method, model_name: str) -> None:
    """Also for bfloat16 weights, where θ + Δ − Δ is far from θ."""
    case = setup(model_name)
    base = SGD(case.model.parameters(), lr=0.1)
    optimizer = method(base)
    theta = case.weights()
    at_the_base: list[list[Tensor]] = []
    base.register_step_pre_hook(lambda *_: at_the_base.append(case.weights()))
    passes: list[list[Tensor]] = []
    optimizer.step(case.watched(optimizer, passes))
    assert same(at_the_base[0], theta)
    assert not same(passes[-1], theta)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_in_any_pass_leaves_everything_as_it_was(
    make_base: MakeBase, model_name: str, failing: int
) -> None:
    case = setup(model_name)
    optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.1, inner_iter=2, model=case.model)
    run(case, optimizer, 1)
    theta, buffers, state = case.weights(), case.buffers(), [t.clone() for t in tensors_in(optimizer)]
    attributes = {name: dict(vars(module)) for name, module in case.model.named_modules()}
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        loss = case.closure(optimizer)()
        calls += 1
        if calls == failing + 1:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert same(case.weights(), theta)
    assert same(case.buffers(), buffers)
    assert same(tensors_in(optimizer), state)
    for name, module in case.model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
    assert not same(run(case, optimizer, 1), theta)


def test_an_exception_in_a_block_leaves_weights_and_buffers_as_they_were(method: Method, model_name: str) -> None:
    case = setup(model_name)
    optimizer = method(SGD(case.model.parameters(), lr=0.1), model=case.model)
    case.loss().backward()
    theta, buffers = case.weights(), case.buffers()
    with pytest.raises(RuntimeError, match="does not require grad"), optimizer.perturbed():
        (case.loss().backward(), torch.zeros(1).backward())
    assert same(case.weights(), theta)
    assert same(case.buffers(), buffers)
    case.step_in_blocks(optimizer)
    assert not same(case.weights(), theta)


@pytest.mark.parametrize("inner_iter", [1, 2, 3])
@pytest.mark.parametrize("quiet", [0, 1, 2, 3])
def test_a_parameter_without_a_gradient_in_one_pass_is_restored(inner_iter: int, quiet: int) -> None:
    case = setup()
    base = SGD(case.model.parameters(), lr=0.0)
    optimizer = flatmin.AMP(base, epsilon=0.1, inner_iter=inner_iter)
    theta, calls = case.weights(), 0

    def closure() -> Tensor:
        nonlocal calls
        loss = case.closure(optimizer)()
        if calls == quiet:
            case.model[0].weight.grad = None  # type: ignore[index]
        calls += 1
        return loss

    optimizer.step(closure)
    assert calls == inner_iter + 1
    assert same(case.weights(), theta)


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)])
def test_a_loss_of_exactly_zero_steps(method: Method, zero: float | Tensor) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = method(SGD([weight], lr=0.1))

    def closure() -> float | Tensor:
        optimizer.zero_grad()
        weight.sum().backward()
        return zero

    assert optimizer.step(closure) is zero
    assert weight.tolist() == pytest.approx([0.9, 1.9])


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "float": lambda loss: 0.25,
    "none": lambda loss: None,
    "dict": lambda loss: {"logits": torch.zeros(1), "loss": loss},
    "tuple": lambda loss: ("name", loss, torch.zeros(1)),
    "object": lambda loss: object(),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_any_closure_result_is_passed_through_and_its_loss_found(method: Method, kind: str) -> None:
    case = setup()
    optimizer = method(SGD(case.model.parameters(), lr=0.1))
    results, losses = [], []

    def closure() -> Any:
        losses.append(case.closure(optimizer)())
        results.append(RESULTS[kind](losses[-1]))
        return results[-1]

    assert optimizer.step(closure) is results[0]
    if kind in ("tensor", "dict", "tuple"):
        assert optimizer.last.loss is not None
        assert optimizer.last.loss_perturbed is not None
        assert torch.equal(optimizer.last.loss, losses[0])
        assert torch.equal(optimizer.last.loss_perturbed, losses[-1])
        assert not optimizer.last.loss.requires_grad
    else:
        assert optimizer.last.loss is None


def test_last_tells_what_happened() -> None:
    case = setup(dtype=torch.float64)
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=100.0, inner_lr=0.5)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(case.loss(), list(case.model.parameters()))])
    optimizer.step(case.closure(optimizer))
    last = optimizer.last
    assert last.loss_perturbed is not None
    assert last.loss is not None
    assert last.loss_perturbed > last.loss
    assert last.grad_norm == pytest.approx(float(gradient.norm()))
    assert last.delta_norm == pytest.approx(0.5 * float(gradient.norm()))
    assert last.on_ball == 0
    assert not last.skipped


def normalised(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))


class Growing(nn.Module):
    """Registers a buffer, and adds a module with buffers, when it first runs."""

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(x.shape[1]))
            self.norm = nn.BatchNorm1d(x.shape[1], affine=False)
        self.mean += x.detach().mean(dim=0)
        found: Tensor = self.norm(x)
        return found


class Emerging(nn.Module):
    """A buffer that is None, and a module that is another one, until it first runs."""

    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.norm: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean, self.norm = torch.zeros(x.shape[1], dtype=x.dtype), nn.BatchNorm1d(x.shape[1], affine=False)
        self.mean += x.detach().mean(dim=0)
        found: Tensor = self.norm(x)
        return found


def an_emerging_module(model: nn.Sequential) -> None:
    model[2] = Emerging()


def another_norm(model: nn.Sequential) -> None:
    model[1] = nn.BatchNorm1d(4, affine=False)


def another_buffer(model: nn.Sequential) -> None:
    model[1].running_mean = torch.ones(4)


def a_growing_module(model: nn.Sequential) -> None:
    model[2] = Growing()


def moved_weights(model: nn.Sequential) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def another_precision(model: nn.Sequential) -> None:
    model.double()


@pytest.mark.parametrize(
    "change",
    [another_norm, another_buffer, a_growing_module, an_emerging_module, moved_weights, another_precision],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("in_blocks", [False, True])
def test_what_is_kept_from_step_to_step_follows_the_model(
    change: Callable[[nn.Sequential], None], in_blocks: bool
) -> None:
    """After any change the next steps are those of an optimizer that has kept nothing."""
    ended = []
    for keeps in (True, False):
        model = normalised()
        optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
        for number in range(6):
            torch.manual_seed(number)
            if number == 3:
                change(model)
            if not keeps:
                optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
            x = torch.randn(10, 6, dtype=next(model.parameters()).dtype)

            def closure(x: Tensor = x, model: nn.Module = model, optimizer: Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).square().mean()
                loss.backward()
                return loss

            if in_blocks:
                closure()
                with optimizer.perturbed():
                    closure()
                optimizer.step()
            else:
                optimizer.step(closure)
        ended.append([*model.parameters(), *model.buffers()])
    assert same(*ended)


@pytest.mark.parametrize("module", [Growing, Emerging])
def test_what_the_first_clean_pass_makes_has_its_statistics_alone(module: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(6, 4), module())
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.0), epsilon=0.1, inner_iter=2, model=model)
    x = torch.randn(10, 6)
    expected = model[0](x).detach().mean(dim=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    buffers = dict(model[1].named_buffers())
    assert torch.allclose(buffers["mean"], expected)
    assert buffers["norm.num_batches_tracked"] == 1


def test_groups_without_a_radius_get_it_in_every_step() -> None:
    """A checkpoint of the plain optimizer, loaded into the base again and again, brings groups that have none."""
    case = setup()
    base = SGD(case.model.parameters(), lr=0.1)
    plain = copy.deepcopy(base.state_dict())
    optimizer = flatmin.AMP(base, epsilon=0.1)
    for _ in range(3):
        base.load_state_dict(plain)
        run(case, optimizer, 1)
        assert optimizer.param_groups[0]["epsilon"] == 0.1


def test_weights_that_were_replaced_are_freed() -> None:
    case = setup("conv-batchnorm")
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, model=case.model)
    run(case, optimizer, 2)
    there = [tensor for tensor in (*case.model.parameters(), *case.model.buffers()) if tensor.is_floating_point()]
    old = [weakref.ref(tensor.untyped_storage()) for tensor in there]
    case.model.double()
    del there
    gc.collect()
    assert [storage() for storage in old] == [None] * len(old)


def host_reads(case: Setup, optimizer: Optimizer) -> int:
    run(case, optimizer, 2)
    with HostReads() as reads:
        run(case, optimizer, 1)
    return int(reads.count)


def test_a_step_reads_nothing_from_the_device_that_its_base_does_not(
    method: Method, make_base: MakeBase, model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perturbed, "READ_AT_ONCE", ())  # the CPU in the place of a GPU
    plain, wrapped = setup(model_name), setup(model_name)
    own = host_reads(plain, make_base(plain.model.parameters()))
    assert host_reads(wrapped, method(make_base(wrapped.model.parameters()), model=wrapped.model)) == own


def test_no_more_than_two_results_of_the_closure_are_kept() -> None:
    class Result:
        pass

    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=5)
    alive = list[int]()
    seen = weakref.WeakSet[Result]()

    def closure() -> Result:
        case.closure(optimizer)()
        alive.append(len(seen))
        result = Result()
        seen.add(result)
        return result

    optimizer.step(closure)
    assert max(alive) == 2


def test_a_closure_may_leave_zero_grad_to_the_loop(method: Method, make_base: MakeBase) -> None:
    first, second = setup(), setup()
    torch.manual_seed(1)
    expected = run(first, method(make_base(first.model.parameters())), 3)
    torch.manual_seed(1)
    optimizer = method(make_base(second.model.parameters()))

    def closure() -> Tensor:
        loss = second.loss()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(closure)
    assert same(second.weights(), expected)


def test_an_optimizer_shows_its_settings_and_its_base() -> None:
    params = setup().layers()[0]
    shown = repr(flatmin.AMP(SGD(params, lr=0.1), epsilon=0.3))
    assert shown.startswith("AMP(inner_iter=1, ball='global', norm='l2') around SGD")
    assert "epsilon: 0.3" in shown
    assert repr(flatmin.RMP(SGD(params, lr=0.1), epsilon=0.3)).startswith(
        "RMP(ball='global', norm='l2', noise='ball') around SGD"
    )


def test_micro_batches_of_an_unperturbed_step_leave_the_buffers_as_their_passes_did() -> None:
    """After a radius that a schedule took to 0."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        return loss

    states = []
    for epsilon in (0.1, 0.0, 0.0):
        optimizer.param_groups[0]["epsilon"] = epsilon
        optimizer.step([closure, closure])
        states.append(torch.get_rng_state())
    assert model[1].num_batches_tracked == 6
    assert not torch.equal(states[1], states[2])


def test_a_zero_grad_of_the_base_s_own_is_called_between_passes() -> None:
    weight = nn.Parameter(torch.ones(2))
    base, calls = SGD([weight], lr=0.1), list[bool]()

    def zero_grad(set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        weight.grad = None

    base.zero_grad = zero_grad  # type: ignore[method-assign]

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    flatmin.AMP(base, epsilon=0.1).step(closure)
    assert len(calls) == 1


@pytest.mark.parametrize("form", ["closure", "list", "blocks"])
def test_where_the_loop_zeroes_in_place_gradients_stay_where_they_are(form: str) -> None:
    """As views of one buffer that the loop exchanges; and a weight that a batch does not use keeps a gradient of 0."""
    torch.manual_seed(0)
    used, unused = nn.Linear(4, 2), nn.Parameter(torch.ones(3))
    params, x = [*used.parameters(), unused], torch.randn(8, 4)
    buffer = torch.zeros(sum(param.numel() for param in params))
    for param, part in zip(params, buffer.split([param.numel() for param in params]), strict=True):
        param.grad = part.view_as(param)
    optimizer = flatmin.AMP(SGD(params, lr=0.1, weight_decay=0.5), epsilon=0.1, inner_iter=2)
    seen = []

    def backward() -> Tensor:
        loss: Tensor = used(x).square().mean()
        loss.backward()
        seen.append(bool((buffer[:-3] != 0).all()))
        buffer.mul_(0.5)
        return loss

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        return backward()

    if form == "blocks":
        closure()
        for _ in range(2):
            with optimizer.perturbed():
                backward()
        optimizer.step()
    else:
        optimizer.step([closure, closure] if form == "list" else closure)
    assert seen == [True] * (6 if form == "list" else 3)
    assert all(param.grad is not None and param.grad.untyped_storage() == buffer.untyped_storage() for param in params)
    assert torch.equal(unused.detach(), torch.full((3,), 0.95))  # the decay goes on, as with SGD alone


def test_gradients_may_be_those_of_autograd_grad_expanded_ones_too() -> None:
    """The gradient of a sum is one number, expanded."""
    results = []
    for differentiate in (True, False):
        torch.manual_seed(0)
        layer, shift, x = nn.Linear(4, 2), nn.Parameter(torch.ones(3)), torch.randn(8, 4)
        params = [*layer.parameters(), shift]
        optimizer = flatmin.AMP(SGD(params, lr=0.1, momentum=0.9), epsilon=0.1, inner_iter=2)

        def closure(
            params: list[nn.Parameter] = params,
            layer: nn.Linear = layer,
            x: Tensor = x,
            differentiate: bool = differentiate,
            optimizer: flatmin.AMP = optimizer,
        ) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = layer(x).square().mean() + params[-1].sum()
            if differentiate:
                for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
                    param.grad = gradient
            else:
                loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        results.append([param.detach() for param in params])
    assert same(*results)


@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_gradients_may_be_those_of_torch_func(form: str) -> None:
    """At the detached weights: at the parameters themselves they have a graph, and an error says to detach them."""
    plain, case = setup("dropout"), setup("dropout")
    params = dict(case.model.named_parameters())

    def step(*, detached: bool) -> None:
        def run() -> None:
            at = {name: param.detach() if detached else param for name, param in params.items()}
            found = torch.func.grad(loss_at)(at)
            for name, param in params.items():
                param.grad = found[name]

        if form == "closure":
            optimizer.step(run)
        else:
            optimizer.zero_grad()
            run()
            with optimizer.perturbed():
                run()
            optimizer.step()

    def loss_at(weights: dict[str, Tensor]) -> Tensor:
        out = torch.func.functional_call(case.model, weights, (case.x,))
        return nn.functional.cross_entropy(out, case.y)

    torch.manual_seed(1)
    run(plain, flatmin.AMP(SGD(plain.model.parameters(), lr=0.1), epsilon=0.1, model=plain.model), 2)
    torch.manual_seed(1)
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, model=case.model)
    for _ in range(2):
        step(detached=True)
    assert all(torch.allclose(a, b) for a, b in zip(case.weights(), plain.weights(), strict=True))
    theta = case.weights()
    with pytest.raises(RuntimeError, match=r"have a graph .*torch\.func\.grad.*; detach them, or"):
        step(detached=False)
    assert same(case.weights(), theta)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at the loss's
@pytest.mark.parametrize(
    "form", ["a loop with a closure", "a loop with a block", "a loop that zeroes in its block", "step itself"]
)
@pytest.mark.parametrize("with_model", [True, False])
def test_inside_torch_compile_it_is_the_same_step(form: str, with_model: bool) -> None:
    def training(*, is_compiled: bool) -> Setup:
        case = setup("conv-batchnorm")
        base = SGD(case.model.parameters(), lr=0.1, momentum=0.9)
        optimizer = flatmin.AMP(base, epsilon=0.1, model=case.model if with_model else None)

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, backend="eager") if is_compiled else function

        def zeroes_in_block() -> None:
            optimizer.zero_grad()
            case.loss().backward()
            with optimizer.perturbed():
                optimizer.zero_grad()
                case.loss().backward()
            optimizer.step()

        steps: dict[str, Callable[..., Any]] = {
            "a loop with a closure": compiled(lambda: optimizer.step(case.closure(optimizer))),
            "a loop with a block": compiled(lambda: case.step_in_blocks(optimizer)),
            "a loop that zeroes in its block": compiled(zeroes_in_block),
            "step itself": partial(compiled(optimizer.step), case.closure(optimizer)),
        }
        for _ in range(3):
            steps[form]()
        return case

    compiled, plain = training(is_compiled=True), training(is_compiled=False)
    assert same(compiled.weights(), plain.weights())
    assert same(compiled.buffers(), plain.buffers())


def one_step(form: str) -> tuple[nn.Module, flatmin.AMP, Callable[[], None]]:
    """A model, its optimizer, and a function that takes one step."""
    torch.manual_seed(0)
    first, x = nn.Linear(3, 2), torch.randn(4, 3)
    model = nn.Sequential(first, nn.BatchNorm1d(2))
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.5, model=model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean() + first.weight.square().sum()
        loss.backward()
        return loss

    def step() -> None:
        if form == "closure":
            optimizer.step(closure)
            return
        closure()
        with optimizer.perturbed():
            closure()
        optimizer.step()

    return model, optimizer, step


def interrupted_at(place: int, step: Callable[[], None]) -> bool:
    """Run it, with Ctrl-C at that line of perturbed.py, counted as they are run; False: there are fewer.

    But for the lines of `_pass`: one that is interrupted while it restores everything cannot restore everything.
    """
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith("optim/perturbed.py") or frame.f_code.co_name == "_pass":
            return None
        if event == "line" and next(lines) == place:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_ctrl_c_at_any_line_of_a_step_leaves_theta_and_an_optimizer_that_goes_on(form: str) -> None:
    expected = []  # θ after no step, one, and two
    model, _, step = one_step(form)
    for _ in range(3):
        expected.append([p.detach().clone() for p in model.parameters()])
        step()
    for place in itertools.count(1):
        model, optimizer, step = one_step(form)
        if not interrupted_at(place, step):
            break
        done = 0 if same(list(model.parameters()), expected[0]) else 1
        assert same(list(model.parameters()), expected[done])
        optimizer.zero_grad()
        step()  # it is not inside a pass, and has no blocks of before
        assert same(list(model.parameters()), expected[done + 1])
    assert place > 50
