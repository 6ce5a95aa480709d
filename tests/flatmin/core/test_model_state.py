"""With `model=`, statistics and masks are those of the clean pass; without, every pass counts, as documented."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD

import flatmin
from flatmin.core.copies import Copies
from flatmin.core.model_state import Snapshot
from flatmin.core.tensors import written_once
from tests.support.cases import Method, Setup, same, setup


@pytest.mark.parametrize("form", ["closure", "blocks"])
@pytest.mark.parametrize("inner_iter", [1, 2])
def test_with_a_model_batchnorm_statistics_are_those_of_the_clean_pass(form: str, inner_iter: int) -> None:
    case, clean = setup("conv-batchnorm"), setup("conv-batchnorm")
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.5, inner_iter=inner_iter, model=case.model)
    clean.loss()
    if form == "closure":
        optimizer.step(case.closure(optimizer))
    else:
        case.step_in_blocks(optimizer)
    assert same(case.buffers(), clean.buffers())


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_without_a_model_every_pass_counts(inner_iter: int) -> None:
    case = setup("conv-batchnorm")
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.5, inner_iter=inner_iter)
    optimizer.step(case.closure(optimizer))
    assert case.model[2].num_batches_tracked == inner_iter + 1  # type: ignore[index]


class Masks(nn.Module):
    """Dropout that remembers what it let through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.seen = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones_like(x), 0.5)
        self.seen.append(kept)
        out: Tensor = self.linear(x * kept)
        return out


@pytest.mark.parametrize("form", ["closure", "blocks"])
@pytest.mark.parametrize("with_model", [True, False])
def test_dropout_masks_are_shared_by_the_passes_of_a_step_and_new_in_the_next(form: str, with_model: bool) -> None:
    case = setup("dropout")
    case.model = model = Masks()
    optimizer = flatmin.AMP(
        SGD(model.parameters(), lr=0.1), epsilon=0.1, inner_iter=2, model=model if with_model else None
    )
    for _ in range(2):
        if form == "closure":
            optimizer.step(case.closure(optimizer))
        else:
            case.step_in_blocks(optimizer)
    assert len(model.seen) == 6
    shared = [all(torch.equal(mask, masks[0]) for mask in masks) for masks in (model.seen[:3], model.seen[3:])]
    assert shared == [with_model, with_model]
    assert not torch.equal(model.seen[0], model.seen[3])


def test_with_a_model_a_step_draws_as_many_random_numbers_as_a_plain_one() -> None:
    plain, wrapped = setup("dropout"), setup("dropout")
    torch.manual_seed(1)
    base = SGD(plain.model.parameters(), lr=0.1)
    plain.closure(base)()
    after = torch.rand(3)
    torch.manual_seed(1)
    optimizer = flatmin.AMP(SGD(wrapped.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=3, model=wrapped.model)
    optimizer.step(wrapped.closure(optimizer))
    assert torch.equal(torch.rand(3), after)


def test_rmp_keeps_the_statistics_of_its_only_pass(method: Method) -> None:
    case = setup("conv-batchnorm")
    optimizer = method(SGD(case.model.parameters(), lr=0.1), model=case.model)
    optimizer.step(case.closure(optimizer))
    assert case.model[2].num_batches_tracked == 1  # type: ignore[index]


class Rebinding(nn.Module):
    """Buffers that are replaced, not written into, one that grows, one that is None at first, and one that appears."""

    mean: Tensor
    cache: Tensor
    centre: Tensor | None
    late: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("centre", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        self.cache = torch.ones(len(self.cache.fill_(7)) + 1)
        self.centre = x.mean(0)
        self.register_buffer("late", torch.ones(1), persistent=False)
        return x


def test_buffers_that_are_replaced_come_back_and_new_ones_stay() -> None:
    model = Rebinding()
    snapshot = Snapshot(model)
    for _ in range(2):
        snapshot.take_buffers()
        model(torch.ones(2, 3))
        snapshot.put_back_buffers()
        assert model.mean.tolist() == [0, 0, 0]
        assert model.cache.tolist() == [0]
        assert model.centre is None
        assert model.late.tolist() == [1]


def test_a_snapshot_that_was_not_taken_to_the_end_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    model = Rebinding()
    snapshot = Snapshot(model)
    snapshot.take_buffers()
    model(torch.ones(2, 3))
    monkeypatch.setattr(Copies, "take", fail)
    with pytest.raises(MemoryError):
        snapshot.take_buffers()
    snapshot.put_back_buffers()
    assert model.mean.tolist() == [1, 1, 1]
    assert model.cache.tolist() == [1, 1]
    assert model.centre is not None


class Holding(nn.Module):
    """Two layers that share a buffer, which a pass replaces; one that keeps its input; one that a pass removes."""

    last: Tensor
    removed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        shared = torch.zeros(1)
        for part in (self.first, self.second):
            part.register_buffer("queue", shared)
        self.register_buffer("last", torch.zeros(2, 3))
        self.register_buffer("removed", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        grown = torch.cat([self.first.get_buffer("queue"), torch.ones(1)])
        self.first.queue = self.second.queue = grown
        self.last = x
        if hasattr(self, "removed"):
            del self.removed
        return x


def test_shared_buffers_stay_shared_inputs_stay_and_what_is_gone_stays_gone() -> None:
    model, x = Holding(), torch.ones(2, 3)
    snapshot = Snapshot(model)
    snapshot.take_buffers()
    model(x)
    snapshot.put_back_buffers()
    assert model.first.queue is model.second.queue
    assert model.first.get_buffer("queue").tolist() == [0]
    assert torch.equal(x, torch.ones(2, 3))  # the user's, although it was the buffer for a while
    assert torch.equal(model.last, torch.zeros(2, 3))
    assert not hasattr(model, "removed")


def test_a_buffer_that_a_pass_has_cast_in_place_keeps_its_type() -> None:
    model = nn.BatchNorm1d(2)
    snapshot, mean = Snapshot(model), model.running_mean
    assert mean is not None
    snapshot.take_buffers()
    mean.data = torch.ones(2, dtype=torch.bfloat16)
    snapshot.put_back_buffers()
    assert model.running_mean is mean
    assert (mean.dtype, mean.tolist()) == (torch.bfloat16, [0, 0])


class Growing(nn.Module):
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("queue", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.queue = torch.cat([self.queue, torch.ones(1)])
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("scripted", [False, True])
def test_a_queue_grows_by_one_a_step(scripted: bool) -> None:
    case = setup()
    case.model = model = torch.jit.script(Growing()) if scripted else Growing()
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, inner_iter=2, model=model)
    for _ in range(3):
        optimizer.step(case.closure(optimizer))
    assert dict(model.named_buffers())["queue"].tolist() == [1, 1, 1]


SPECIAL: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(6).to_sparse(),
    "expanded": lambda: torch.ones(6, 1).expand(6, 6),
    "conjugate": lambda: torch.ones(6, 6, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(6, 6, dtype=torch.complex64).conj().imag,
}


class WithBuffer(nn.Module):
    """Has written to its buffer when it has run, if it can be written to."""

    kept: Tensor

    def __init__(self, kept: Tensor, *, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(6, 3), writes
        self.register_buffer("kept", kept)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        dense = self.kept.to_dense().resolve_conj().resolve_neg()
        out: Tensor = self.linear(x) + dense.real.mean()
        if self.writes:
            self.get_buffer("count").add_(1)
            written_once(self.kept).mul_(2) if self.kept.layout == torch.strided else self.kept.mul_(2)
        return out


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("kind", SPECIAL)
def test_buffers_that_cannot_be_overwritten_as_a_whole_are_those_of_the_clean_pass(kind: str, writes: bool) -> None:
    case = setup()
    case.model = model = WithBuffer(SPECIAL[kind](), writes=writes)
    before = model.kept.to_dense().clone()
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, inner_iter=2, model=model)
    for step in range(1, 3):
        optimizer.step(case.closure(optimizer))
        assert torch.equal(model.kept.to_dense(), before * 2**step if writes else before)
        assert model.get_buffer("count") == (step if writes else 0)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_a_model_of_torchscript_counts_one_pass_a_step(form: str) -> None:
    case = setup()
    case.model = model = torch.jit.script(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    )
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    for _ in range(3):
        if form == "closure":
            optimizer.step(case.closure(optimizer))
        else:
            case.step_in_blocks(optimizer)
    assert dict(model.named_buffers())["1.num_batches_tracked"] == 3


def test_buffers_made_in_inference_mode_are_left_alone() -> None:
    with torch.inference_mode():
        kept = torch.ones(6, 6)
    case = setup()
    case.model = model = WithBuffer(kept, writes=False)
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    optimizer.step(case.closure(optimizer))
    assert model.kept is kept


def test_a_snapshot_can_be_taken_again() -> None:
    model = nn.BatchNorm1d(2)
    snapshot = Snapshot(model)
    for value in (1.0, 2.0):
        model.running_mean.fill_(value)  # type: ignore[union-attr]
        snapshot.take_buffers()
        model.running_mean.zero_()  # type: ignore[union-attr]
        snapshot.put_back_buffers()
        assert model.running_mean.tolist() == [value, value]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_buffers_that_are_not_made_yet_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 3))
    case = setup()
    case.model = model
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    for _ in range(2):
        optimizer.step(case.closure(optimizer))
    assert model[1].num_batches_tracked == 2


def test_a_compiled_model_is_compiled_once() -> None:
    """Whatever a step does to weights, buffers and random states, nothing that the compiler guards on changes."""
    case = setup("conv-batchnorm")
    counter = CompileCounter()
    model = case.model
    case.model = torch.compile(model, backend=counter)  # type: ignore[assignment]
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, inner_iter=2, model=model)
    optimizer.step(case.closure(optimizer))
    after_one_step = counter.frame_count
    for _ in range(3):
        optimizer.step(case.closure(optimizer))
        case.step_in_blocks(optimizer)
    assert after_one_step == counter.frame_count == 1


@pytest.mark.parametrize("draw", [random.random, np.random.standard_normal, lambda: float(torch.rand(()))])
@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_numbers_drawn_on_the_host_are_shared_by_the_passes_and_new_in_the_next_step(
    draw: Callable[[], float], form: str
) -> None:
    """Some models and augmentations draw with Python or numpy."""
    case, drawn = setup(), list[float]()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=2, model=case.model)

    def loss() -> Tensor:
        drawn.append(draw())
        return Setup.loss(case)

    case.loss = loss  # type: ignore[method-assign]
    for _ in range(3):
        if form == "closure":
            optimizer.step(case.closure(optimizer))
        else:
            case.step_in_blocks(optimizer)
    assert drawn[0::3] == drawn[1::3] == drawn[2::3]
    assert len(set(drawn)) == 3
