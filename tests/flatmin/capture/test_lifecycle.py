"""What happens to a captured step in its life: frozen layers, new groups, loaded states, other modes.

A graph repeats what it was captured with, so the step must notice whatever changes. That is Python, and the same with
and without a GPU: here a substitute that captures nothing, and runs its passes again, takes the place of a CUDA graph.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.sgd import sgd
from torch.utils._pytree import tree_leaves, tree_map_only

import flatmin
from flatmin.capture.captured_step import CapturedStep, captured_step
from flatmin.capture.cuda_graph import StateMissingError, _own_memory, _ScheduledSettings
from flatmin.capture.functional_step import FunctionalStep, PassRandom, SubstituteTensors
from flatmin.capture.step_spec import StepSpec, rehearsal
from flatmin.core import multi_tensor
from flatmin.core.copies import Copies
from flatmin.core.recorded_launches import DeviceNumbers
from tests.support.cases import same

STEPS = 14
MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "sgd without momentum": lambda m: SGD(m.parameters(), lr=0.1),
    "amp": lambda m: flatmin.AMP(SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1), epsilon=0.1, model=m),
    "amp twice": lambda m: flatmin.AMP(SGD(m.parameters(), lr=0.1), epsilon=0.1, inner_iter=2, model=m),
    "amp around adamw": lambda m: flatmin.AMP(AdamW(m.parameters(), lr=0.01), epsilon=0.1, model=m),
    "rmp": lambda m: flatmin.RMP(SGD(m.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, model=m),
}


class RepeatedStep:
    """In place of a CapturedGraph: it repeats what was given at its construction."""

    def __init__(
        self,
        spec: StepSpec,
        forward: Callable[..., Any],
        space: SubstituteTensors,
        inputs: Sequence[Any],
        *,
        by_kernel: bool,
        by_torch: bool,
    ) -> None:
        self.spec = spec
        self.inputs = tree_map_only(Tensor, lambda given: _own_memory(given, device=spec.device), tuple(inputs))
        self.scheduled = _ScheduledSettings(spec.optimizer, spec.device)
        self.rates: DeviceNumbers | None = None
        if by_kernel:
            self.rates = DeviceNumbers(multi_tensor.rates_of(spec.base), torch.float64, spec.device)
        self.inside = by_kernel or by_torch
        self.functional_step = FunctionalStep(
            spec,
            forward,
            space,
            self.inputs,
            theta=Copies(),
            pass_random=PassRandom(spec.device),
            rates=None if self.rates is None else self.rates.on_device,
            with_base=self.inside,
        )
        with rehearsal(spec), self.scheduled.in_groups():
            gradients = self.functional_step.run()
            if self.rates is not None and not multi_tensor.has_state(spec.base, gradients):
                raise StateMissingError

    @torch.no_grad()
    def replay(self, inputs: Sequence[Any]) -> Any:
        for here, given in zip(tree_leaves(self.inputs), tree_leaves(tuple(inputs)), strict=True):
            here.copy_(given)
        self.scheduled.refresh()
        if self.rates is not None:
            self.rates.write(multi_tensor.rates_of(self.spec.base))
        with self.scheduled.in_groups():
            self.functional_step.step()
        if not self.inside:
            self.functional_step.step_base()
        return self.functional_step.result


def sgd_by_torch(base: Optimizer, gradients: Mapping[Tensor, Tensor], rates: Tensor, skip: Tensor) -> None:
    """In the place of the kernel."""
    assert not skip
    for group, rate in zip(base.param_groups, rates.tolist(), strict=True):
        lr, weight_decay, momentum, dampening = rate
        params = [p for p in group["params"] if p in gradients]
        sgd(
            params,
            [gradients[p] for p in params],
            [base.state[p]["momentum_buffer"] if momentum else None for p in params],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            dampening=dampening,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            foreach=False,
        )


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatmin.capture.captured_step.CapturedGraph", RepeatedStep)
    monkeypatch.setattr("flatmin.capture.captured_step.Workspace", lambda spec: SubstituteTensors())
    monkeypatch.setattr(CapturedStep, "reason", property(lambda step: step._failure))
    monkeypatch.setattr(multi_tensor, "sgd", sgd_by_torch)
    real = CapturedStep._prepare_capture

    def prepare(step: CapturedStep) -> None:
        real(step)
        step._fits_sgd_kernel = True  # for our kernel, where the base is SGD
        step._addresses = step._current_addresses()

    monkeypatch.setattr(CapturedStep, "_prepare_capture", prepare)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 3)]
    return nn.Sequential(*parts)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


class Life:
    """What is done before each step; a method for each kind of change."""

    def __init__(self, model: nn.Sequential, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def nothing(self, number: int) -> None:
        pass

    def freeze(self, number: int) -> None:
        for when, layer, trains in ((1, 0, False), (6, 0, True), (9, 4, False)):
            if number == when:
                self.model[layer].requires_grad_(trains)

    def add_a_group(self, number: int) -> None:
        last = list(self.model[5].parameters())
        if number == 0:
            group = self.optimizer.param_groups[0]
            group["params"][:] = [p for p in group["params"] if all(p is not other for other in last)]
        if number == 5:
            self.optimizer.add_param_group({"params": last, "lr": 0.02, "weight_decay": 0.1})

    def change_settings(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            if "momentum" in group and not group["nesterov"]:
                group["momentum"] = 0.0 if number < 4 or 8 <= number < 11 else 0.8
            group["weight_decay"] = 0.05 if number < 7 else 0.0
            group["maximize"] = number == 9

    def change_modes(self, number: int) -> None:
        if number in (4, 6):
            self.model.train(number == 6)
        if number == 8:
            self.model[1].eval()

    def load(self, number: int) -> None:
        if number == 3:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        if number == 6:
            self.model.load_state_dict(self.saved[0])
            self.optimizer.load_state_dict(self.saved[1])
        if number == 9:
            self.optimizer.state.clear()

    def move_radius_and_rate(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            if "epsilon" in group:
                group["epsilon"] = (0.1, 0.2, 0.0, 0.0, 0.3, 0.3)[number % 6]
            group["lr"] = 0.1 / (number + 1)

    def leave_gradients(self, number: int) -> None:
        if number in (4, 7):
            for param in self.model.parameters():
                param.grad = torch.ones_like(param)

    def change_passes(self, number: int) -> None:
        if isinstance(self.optimizer, flatmin.AMP):
            self.optimizer.inner_iter = (1, 2, 0)[number // 5]

    def change_model(self, number: int) -> None:
        if isinstance(self.optimizer, flatmin.AMP | flatmin.RMP):
            self.optimizer.model = None if 4 <= number < 9 else self.model


CHANGES = [name for name in vars(Life) if not name.startswith("_")]


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MAKE)
def test_whatever_changes_the_step_is_the_ordinary_one(name: str, change: str) -> None:
    results = []
    for captured in (False, True):
        model = network()
        optimizer = MAKE[name](model)
        step = captured_step(model, loss_fn, optimizer, compile=False, capture=captured)
        life, generator = Life(model, optimizer), torch.Generator().manual_seed(5)
        torch.manual_seed(3)
        losses = []
        for number in range(STEPS):
            getattr(life, change)(number)
            x = torch.randn(10, 6, generator=generator)
            losses.append(step(x, torch.randint(0, 3, (10,), generator=generator)))
        assert step.captured == captured
        results.append([*losses, *model.state_dict().values()])
    assert same(*results)
