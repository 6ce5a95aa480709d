"""Launches that are recorded and replayed give the bits of launches one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

import flatmin
from flatmin.core import recorded_launches, recurring_work
from flatmin.core.recorded_launches import DeviceNumbers, RecordedLaunches, Results
from tests.support.cases import same

pytestmark = pytest.mark.cuda
MakeBase = Callable[[Any], Optimizer]
BASES: dict[str, MakeBase] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd fused": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda params: AdamW(params, lr=1e-2),
    "adamw fused": lambda params: AdamW(params, lr=1e-2, fused=True),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 36, 5)]
    return nn.Sequential(*layers).cuda()


def train(
    make_base: MakeBase, *, steps: int = 12, spoilt: Sequence[int] = (), change: bool = False, **settings: Any
) -> tuple[list[Tensor], flatmin.AMP]:
    """Everything that a training leaves: weights, buffers, the base's state, and what each step measured."""
    model = network()
    optimizer = flatmin.AMP(make_base(model.parameters()), epsilon=0.1, **{"model": model, **settings})
    generator = torch.Generator("cuda").manual_seed(1)
    batches = [torch.randn(16, 3, 8, 8, device="cuda", generator=generator) for _ in range(3)]
    labels = torch.arange(16, device="cuda") % 5
    left: list[Tensor] = []
    measured = []
    for n in range(steps):
        if change:
            optimizer.param_groups[0]["epsilon"] = 0.05 * (1 + n % 4)
        x = batches[n % 3] * (float("nan") if n in spoilt else 1.0)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), labels)
            loss.backward()
            return loss

        left.append(optimizer.step(closure).detach())
        measured.append(optimizer.last)
    for last in measured:  # read at the end: a later step must not have overwritten them
        left += [value for value in vars(last).values() if isinstance(value, Tensor)]
    left += [*model.state_dict().values(), torch.cuda.get_rng_state(), torch.get_rng_state()]
    left += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return left, optimizer


@pytest.mark.parametrize("settings", [{}, {"model": None}, {"ball": "group"}, {"ball": "tensor"}, {"inner_iter": 2}])
@pytest.mark.parametrize("base", BASES)
def test_a_recorded_step_has_the_bits_of_one_launched_kernel_by_kernel(
    base: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for change, spoilt in ((False, ()), (True, ()), (False, (4, 9))):
        recorded, _ = train(BASES[base], change=change, spoilt=spoilt, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(recorded_launches, "MAX_RECORDINGS", 0)
            plain, _ = train(BASES[base], change=change, spoilt=spoilt, **settings)
        assert same(recorded, plain)


@pytest.mark.parametrize("base", ["sgd", "sgd fused"])  # Adam would divide a bias's gradient by its own rounding
def test_the_kernels_compute_what_plain_torch_does(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, optimizer = train(BASES[base], steps=3, spoilt=(1,))
    assert recordings(optimizer)
    monkeypatch.setattr(recurring_work, "has_gradient_kernels", lambda *_: False)
    plain, optimizer = train(BASES[base], steps=3, spoilt=(1,))
    assert not recordings(optimizer)
    for here, there in zip(kernels, plain, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6, equal_nan=True)


def recordings(optimizer: flatmin.AMP) -> list[int]:
    return [len(piece.launches._recordings) for piece in optimizer._storage.recurring._pieces if piece.kernels]


@pytest.mark.parametrize("change", [False, True])
def test_an_ordinary_training_is_recorded_also_while_its_radius_changes(change: bool) -> None:
    _, optimizer = train(BASES["sgd"], change=change)
    assert recordings(optimizer) == [1, 1]  # the ascent, and the check of the last gradients
    assert optimizer._theta._lists is not None
    assert len(optimizer._theta._lists._take._recordings) == 1


def test_a_gradient_that_is_not_finite_in_the_first_of_several_micro_batches_is_not_forgotten() -> None:
    model = network()
    optimizer = flatmin.AMP(BASES["sgd"](model.parameters()), epsilon=0.1, model=model)
    x, y = torch.randn(2, 8, 3, 8, 8, device="cuda"), torch.arange(8, device="cuda") % 5

    def closure(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch), y)
        loss.backward()
        return loss

    for n in range(6):
        spoilt = n == 4
        before = [p.detach().clone() for p in model.parameters()]
        batches = [x[0] * float("nan") if spoilt else x[0], x[1]]
        optimizer.step([lambda batch=batch: closure(batch) for batch in batches])  # type: ignore[misc]
        assert bool(optimizer.last.skipped) == spoilt
        assert same(before, [p.detach() for p in model.parameters()]) == spoilt


def test_numbers_may_change_and_results_are_new_ones() -> None:
    launches, x = RecordedLaunches(), torch.arange(4.0, device="cuda")

    def scaled(numbers: Sequence[float | Tensor]) -> Results:
        return (x.sum() * numbers[0],), (x * numbers[0],)

    found = [launches.run(x.data_ptr(), scaled, [factor]) for factor in (1.0, 2.0, 2.0, 3.0)]
    assert [float(kept[0]) for kept, _ in found] == [6.0, 12.0, 12.0, 18.0]
    assert found[-1][1][0].tolist() == [0.0, 3.0, 6.0, 9.0]
    assert len(launches._recordings) == 1


def test_tensors_elsewhere_are_not_mistaken_and_recordings_are_few() -> None:
    launches = RecordedLaunches()
    tensors = [torch.full((), float(n), device="cuda") for n in range(40)]
    for _ in range(3):
        for tensor in tensors:
            kept, _ = launches.run(tensor.data_ptr(), lambda _, t=tensor: ((t + 1,), ()))  # type: ignore[misc]
            assert float(kept[0]) == float(tensor) + 1
    assert 0 < len(launches._recordings) <= recorded_launches.MAX_RECORDINGS


def test_inside_a_capture_of_the_users_own_nothing_is_recorded() -> None:
    launches, x = RecordedLaunches(), torch.ones((), device="cuda")

    def double(_: object) -> Results:
        x.mul_(2)
        return (), ()

    for _ in range(3):
        launches.run(0, double)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches.run(0, double)
    assert float(x) == 8.0
    graph.replay()
    assert float(x) == 16.0


def test_work_that_cannot_be_recorded_runs_plainly() -> None:
    launches, x = RecordedLaunches(), torch.zeros((), device="cuda")

    def work(_: object) -> Results:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not here")
        return (), ()

    for _ in range(4):
        launches.run(0, work)
    assert float(x) == 4.0
    assert not launches._recordings
    assert float(torch.rand(1, device="cuda")) >= 0  # the generator is as usable as before


def test_numbers_on_the_device_are_written_when_they_change() -> None:
    numbers = DeviceNumbers([1.0, 2.0], torch.float64, torch.device("cuda"))
    numbers.write([1.0, 3.0])
    assert numbers.on_device.tolist() == [1.0, 3.0]
