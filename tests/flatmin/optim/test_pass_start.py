"""In blocks, the dropout masks are those of the clean pass, in whatever order a loop calls things."""

import copy
import copyreg
import gc
import io
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatmin
from flatmin.optim import pass_start
from tests.support.flatness_cases import DEVICES


class Masks(nn.Module):
    """Remembers the mask of every run with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 32), nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x).square() + 1)
        if torch.is_grad_enabled():
            self.seen.append(hidden.detach() != 0)
        mean: Tensor = hidden.mean()
        return mean


class Loop:
    def __init__(self, model: nn.Module | None = None, device: str = "cpu", **settings: object) -> None:
        torch.manual_seed(0)
        self.masks = Masks().to(device)
        self.model = self.masks if model is None else model
        base = torch.optim.SGD(self.masks.parameters(), lr=0.1)
        self.optimizer = flatmin.AMP(base, epsilon=0.1, model=self.model, **settings)  # type: ignore[arg-type]
        self.x = torch.randn(8, 4, device=device)

    def forward(self) -> Tensor:
        return self.model(self.x + 0 * torch.rand_like(self.x))  # type: ignore[no-any-return]  # an augmentation that draws

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        return loss

    def block(self, runs: int = 1) -> None:
        with self.optimizer.perturbed():
            for _ in range(runs):
                self.model(self.x).backward()
        self.optimizer.step()

    def block_that_raises(self) -> None:
        with suppress(MemoryError), self.optimizer.perturbed():
            self.model(self.x).backward()
            raise MemoryError

    def check(self, runs: int = 1) -> None:
        """The last runs, of the block, have the masks of as many before them."""
        clean, perturbed = self.masks.seen[-2 * runs : -runs], self.masks.seen[-runs:]
        assert len(clean) == len(perturbed) == runs
        assert all(map(torch.equal, clean, perturbed))


def usual(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.forward().backward()
    loop.block()
    loop.check()


def after_the_forward_pass(loop: Loop) -> None:
    loss = loop.forward()
    loop.optimizer.zero_grad()
    loss.backward()
    loop.block()
    loop.check()


def after_the_step(loop: Loop) -> None:
    loop.forward().backward()
    loop.block()
    loop.optimizer.zero_grad()
    loop.check()


def of_the_model(loop: Loop) -> None:
    loop.model.zero_grad()
    loop.forward().backward()
    loop.block()
    loop.check()


def noise_drawn_by_the_loss_function(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.forward().backward()
    with loop.optimizer.perturbed():
        loop.forward().backward()
    loop.optimizer.step()
    loop.check()


def such_noise_before_zero_grad(loop: Loop) -> None:
    """Where a pass began is not known then: the noise may differ, the masks may not."""
    loss = loop.forward()
    loop.optimizer.zero_grad()
    loss.backward()
    with loop.optimizer.perturbed():
        loop.forward().backward()
    loop.optimizer.step()
    loop.check()


def two_runs_in_one_loss(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    (loop.model(loop.x) + loop.model(loop.x)).backward()
    loop.block(runs=2)
    loop.check(runs=2)


def two_micro_batches(loop: Loop) -> None:
    first = loop.model(loop.x)
    loop.optimizer.zero_grad()
    first.backward()
    loop.model(loop.x).backward()
    loop.block(runs=2)
    loop.check(runs=2)


def three_micro_batches_augmented_one_by_one(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    for _ in range(3):
        loop.forward().backward()
    torch.rand(1)  # the next batch is loaded early
    loop.block(runs=3)
    loop.check(runs=3)


def a_pass_that_is_given_up(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.forward()
    usual(loop)


def a_pass_that_is_given_up_with_its_gradient(loop: Loop) -> None:
    loop.forward().backward()
    usual(loop)


def a_block_that_raises(loop: Loop) -> None:
    loss = loop.forward()
    loop.optimizer.zero_grad()
    loss.backward()
    loop.block_that_raises()
    after_the_forward_pass(loop)


def a_closure_after_a_block_that_raises(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.forward().backward()
    loop.block_that_raises()
    loop.optimizer.step(loop.closure)
    loop.optimizer.zero_grad()
    loop.model(loop.x).backward()  # not watched: the first pass after a closure
    loop.block()
    loop.check()


def a_step_of_the_scaler_without_a_block(loop: Loop) -> None:
    scaler = torch.amp.GradScaler(loop.x.device.type)
    (group,) = loop.optimizer.param_groups
    radius, group["epsilon"] = group["epsilon"], 0.0
    loss = loop.forward()
    loop.optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(loop.optimizer)
    group["epsilon"] = radius
    after_the_forward_pass(loop)


def a_validation_between(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with torch.no_grad():
        loop.forward()
    loop.forward().backward()
    with torch.no_grad():
        loop.forward()
    loop.block()
    loop.check()


ORDERS = (
    usual,
    after_the_forward_pass,
    after_the_step,
    of_the_model,
    noise_drawn_by_the_loss_function,
    such_noise_before_zero_grad,
    two_runs_in_one_loss,
    two_micro_batches,
    three_micro_batches_augmented_one_by_one,
    a_pass_that_is_given_up,
    a_pass_that_is_given_up_with_its_gradient,
    a_block_that_raises,
    a_closure_after_a_block_that_raises,
    a_step_of_the_scaler_without_a_block,
    a_validation_between,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_step_draws_its_masks_again(order: Callable[[Loop], None], device: str) -> None:
    loop = Loop(device=device)
    for _ in range(5):
        order(loop)
    firsts = loop.masks.seen[:: len(loop.masks.seen) // 5]
    assert not any(map(torch.equal, firsts, firsts[1:]))  # new ones in the next step


def test_orders_may_change_from_step_to_step() -> None:
    loop = Loop()
    for order in (*ORDERS, *reversed(ORDERS)):
        order(loop)


def test_calls_without_a_step_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_start, "MAX_CALLS", 3)
    loop = Loop()
    for _ in range(9):
        loop.model(loop.x)
    assert loop.optimizer._pass_start is not None
    assert len(loop.optimizer._pass_start._calls) == 3
    usual(loop)


def test_a_pass_that_does_not_call_the_model_draws_from_zero_grad_on() -> None:
    loop = Loop()
    for _ in range(3):
        loop.optimizer.zero_grad()
        loop.masks.forward(loop.x).backward()
        with loop.optimizer.perturbed():
            loop.masks.forward(loop.x).backward()
        loop.optimizer.step()
        loop.check()


def test_a_loop_with_a_closure_has_no_hook_after_its_first_step() -> None:
    loop = Loop()
    assert len(loop.model._forward_pre_hooks) == 1
    loop.optimizer.step(loop.closure)
    assert not loop.model._forward_pre_hooks
    loop.optimizer.zero_grad()
    loop.model(loop.x).backward()
    loop.block()  # has a hook again, for the next step
    after_the_forward_pass(loop)
    assert len(loop.model._forward_pre_hooks) == 1


def test_the_hook_goes_with_the_optimizer_or_with_another_model() -> None:
    loop = Loop()
    model = loop.model
    loop.optimizer.model = nn.Sequential(model)
    assert not model._forward_pre_hooks
    loop.optimizer.model = model
    assert len(model._forward_pre_hooks) == 1
    del loop
    gc.collect()
    assert not model._forward_pre_hooks


def test_copies_and_files_of_the_model_do_not_know_the_optimizer() -> None:
    loop = Loop()
    loop.model.register_forward_pre_hook(print)  # somebody else's stays
    loop.masks.seen.clear()
    file = io.BytesIO()
    torch.save(loop.model, file)
    assert b"ForwardHook" not in file.getvalue()
    file.seek(0)
    with torch.serialization.safe_globals([Masks, nn.Linear, nn.Dropout, print]):  # as without flatmin
        loaded = torch.load(file)
    start = loop.optimizer._pass_start
    for model in (copy.copy(loop.model), copy.deepcopy(loop.model), loaded):
        assert list(model._forward_pre_hooks.values()) == [print]
        model(loop.x).backward()
        assert start is not None
        assert start.known is None  # no forward pass of a step has begun
    assert len(loop.model._forward_pre_hooks) == 2


def watched(model: nn.Module) -> flatmin.AMP:
    return flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)


def test_a_class_is_free_to_go_with_its_last_watched_model() -> None:
    class Net(nn.Linear):
        """Made in a function, as in notebooks and factories of models."""

    one, other = watched(Net(2, 2)), watched(model := Net(2, 2))
    del one
    gc.collect()
    assert not copy.deepcopy(model)._forward_pre_hooks  # it is still watched
    kind = weakref.ref(Net)
    del other, model, Net
    gc.collect()
    assert kind() is None


def test_a_reducer_that_is_not_flatmins_stays() -> None:
    class Net(nn.Linear):
        pass

    optimizer = watched(Net(2, 2))
    copyreg.pickle(Net, own := lambda model: (Net, (2, 2)))
    del optimizer
    gc.collect()
    assert copyreg.dispatch_table.pop(Net) is own


def test_a_model_that_reduces_itself_can_be_saved_too() -> None:
    loop = Loop()
    traced = torch.fx.symbolic_trace(loop.masks.first)
    optimizer = flatmin.AMP(torch.optim.SGD(traced.parameters(), lr=0.1), epsilon=0.1, model=traced)
    file = io.BytesIO()
    torch.save(traced, file)
    file.seek(0)
    for model in (copy.deepcopy(traced), torch.load(file, weights_only=False)):
        assert torch.equal(model(loop.x), traced(loop.x))
    assert optimizer._pass_start is not None


class Described(nn.Linear):
    """Its state is what it was made with."""

    def __getstate__(self) -> dict[str, int]:
        return {"in_features": self.in_features, "out_features": self.out_features}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def test_a_model_with_a_state_of_its_own_is_copied_as_before() -> None:
    model = Described(4, 2)
    optimizer = flatmin.AMP(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    assert copy.deepcopy(model).out_features == 2
    assert optimizer.model is model


def test_a_model_that_is_recomputed_in_the_backward_pass_keeps_the_masks_of_its_forward_pass() -> None:
    """Clean, two micro-batches have one backward pass; in the block each has its own."""
    found = []
    for recomputes in (False, True):
        loop = Loop()
        run: Callable[[Tensor], Tensor] = loop.model
        if recomputes:
            run = partial(checkpoint, loop.model, use_reentrant=False)
        loop.optimizer.zero_grad()
        (run(loop.x) + run(loop.x)).backward()
        with loop.optimizer.perturbed():
            run(loop.x).backward()
            run(loop.x).backward()
        found.append([p.grad for p in loop.masks.parameters()])
    assert all(map(torch.equal, *found))


def test_a_copied_optimizer_watches_its_own_model() -> None:
    loop = Loop()
    usual(loop)
    loop.masks, loop.model, loop.optimizer = copy.deepcopy((loop.masks, loop.model, loop.optimizer))
    for order in ORDERS:
        order(loop)


def test_a_compiled_model_is_one_graph_as_before() -> None:
    loop = Loop()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(nn.Sequential(loop.masks.first, loop.masks.drop), backend=count)
    loop.optimizer.model = compiled  # type: ignore[assignment]
    x = loop.x
    for _ in range(3):
        loss = compiled(x).mean()
        loop.optimizer.zero_grad()
        loss.backward()
        with loop.optimizer.perturbed():
            compiled(x).mean().backward()
        loop.optimizer.step()
    assert len(graphs) == 1
