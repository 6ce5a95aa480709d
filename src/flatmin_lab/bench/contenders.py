"""The contenders of a benchmark: training steps of a method in a form.

    method   erm (SGD alone) · amp (SGD in AMP) · sam (pytorch_optimizer's SAM around SGD, called as its users do)
             and the steps of cheaper training modes: amp-idle (AMP with ε = 0, a step without a perturbation),
             amp-quarter (Δ from a quarter of the batch), amp-half (Δ from images of half the size)
    form     eager     plain PyTorch, kernel by kernel
             graph     the whole step as one CUDA graph
             compiled  the same, with the passes compiled by torch.compile
             at-once   several such models, each with a graph and a stream of its own

A step includes its data: it gathers images from a data set on the device, crops, flips and normalises them. All
contenders get the same batches in the same order. The images are random; what is learned from them does not matter.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import flatmin
from flatmin_lab.bench.workload import Workload
from flatmin_lab.training.learner import AUTOCAST

METHODS = ("erm", "amp", "sam")
MODES = ("amp-idle", "amp-quarter", "amp-half")  # AMP's cheaper steps
FORMS = ("eager", "graph", "compiled", "at-once")
EPSILON, RHO = 0.1, 0.05
SGD_SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}

Step = Callable[..., Any]
Ascent = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class CannotStepError(RuntimeError):
    """A contender cannot take part; the message says why."""


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).float(), y)


def _quarter(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The first quarter of the batch, rounded up; at least two images, for BatchNorm, as in the learner."""
    count = max(-(-len(x) // 4), 2)
    return x[:count], y[:count]


def _half(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Every second row and column."""
    return x[..., ::2, ::2].contiguous(memory_format=torch.channels_last), y


ASCENTS: dict[str, Ascent] = {"amp-quarter": _quarter, "amp-half": _half}


class Contender:
    """A model and its step: `contender(3)` takes three steps."""

    def __init__(self, step: Step, inputs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.step = step
        self.inputs: Iterator[tuple[Tensor, Tensor]] = cycle(inputs)

    def __call__(self, count: int) -> None:
        for _ in range(count):
            self.step(*next(self.inputs))

    def check(self, form: str) -> None:
        """Raise if the step is not in that form: a step that cannot be captured runs without a graph."""
        if form != "eager" and not getattr(self.step, "captured", False):
            raise CannotStepError(f"not captured: {getattr(self.step, 'reason', None) or 'no reason given'}")


class ConcurrentContenders:
    """Several contenders, each with its own stream; the host launches their steps in turn."""

    def __init__(self, contenders: Sequence[Contender], streams: Sequence[torch.cuda.Stream]) -> None:
        self.pairs = list(zip(contenders, streams, strict=True))

    def __call__(self, count: int) -> None:
        for _ in range(count):
            for contender, stream in self.pairs:
                with torch.cuda.stream(stream):
                    contender(1)


def build_contender(workload: Workload, method: str, form: str, *, data: bool = True) -> Contender:
    """A new model that has not stepped yet. Without `data`, every step gets the same batch, prepared beforehand."""
    inputs = workload.inputs if data else [workload.batch(*workload.inputs[0])]
    if method == "sam":
        return Contender(_sam_step(workload), inputs)
    model = workload.new_model()
    optimizer: torch.optim.Optimizer = SGD(model.parameters(), **SGD_SETTINGS)
    if method != "erm":
        optimizer = flatmin.AMP(optimizer, epsilon=0.0 if method == "amp-idle" else EPSILON, model=model)
    scaler = GradScaler(workload.device.type) if workload.precision == "fp16" else None
    step = flatmin.captured_step(
        model,
        loss_of,
        optimizer,
        autocast=AUTOCAST.get(workload.precision),
        compile=form == "compiled",
        batch=workload.batch if data else None,
        ascent=ASCENTS.get(method),
        scaler=scaler,
        capture=form != "eager",
    )
    return Contender(step if scaler is None else ScaledStep(step, scaler), inputs)


class ScaledStep:
    """A captured fp16 step, followed by the update of its scaler, which is the training loop's task."""

    def __init__(self, step: Any, scaler: GradScaler) -> None:
        self.whole, self.scaler = step, scaler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __call__(self, *inputs: Any) -> None:
        self.whole(*inputs)
        self.scaler.update()


def _sam_step(workload: Workload) -> Step:
    """Forward, backward, first_step, forward, backward, second_step."""
    model = workload.new_model()
    optimizer = import_module("pytorch_optimizer").SAM(model.parameters(), SGD, rho=RHO, **SGD_SETTINGS)

    def step(index: Tensor, u: Tensor) -> Tensor:
        with workload.autocast():
            x, y = workload.batch(index, u)
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        with workload.autocast():
            again = loss_of(model, x, y)
        again.backward()
        optimizer.second_step(zero_grad=True)
        return loss.detach()

    return step


def why_left_out(method: str, form: str, *, device: torch.device, precision: str) -> str | None:
    """Why there is no such contender on this device; None if there is one. SAM is eager only."""
    if form != "eager" and device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if method == "sam" and find_spec("pytorch_optimizer") is None:
        return "pytorch_optimizer is not installed here"
    if method == "sam" and precision == "fp16":
        return "SAM's two steps do not support a GradScaler"
    return None
