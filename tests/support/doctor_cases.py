"""What users' make_training functions return, for the doctor: healthy ones, and ones broken in one way each."""

import copy
import itertools
import random
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from flatmin import AMP, RMP, RadiusScheduler
from tests.support.cases import Tied, Unused, conv_batchnorm, dropout, frozen_layer, mlp

TrainingParts = tuple[Any, ...]
Wrap = Callable[[nn.Module], Optimizer]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(10, 6), torch.randint(0, 3, (10,))


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def amp(net: nn.Module, **settings: Any) -> AMP:
    return AMP(sgd(net), **{"epsilon": 0.1, "model": net, **settings})


def make(make_model: Callable[[], nn.Module] = mlp, wrap: Wrap = amp, **ways: Any) -> TrainingParts:
    """A model, its optimizer and a closure on one batch; `ways` change the closure."""
    model = make_model()
    optimizer = wrap(model)
    return model, optimizer, closure_of(model, optimizer, **ways)


def always_the_same_model(*, reset: bool, constant: float | None = None) -> Callable[[], TrainingParts]:
    """`constant`: all weights of the first layer at the start."""
    model = mlp()
    if constant is not None:
        nn.init.constant_(next(model.parameters()), constant)
    start = copy.deepcopy(model.state_dict())

    def make_training() -> TrainingParts:
        if reset:
            model.load_state_dict(start)
        return make(lambda: model)

    return make_training


def closure_of(
    model: Any,
    optimizer: Optimizer,
    *,
    zero: bool = True,
    data: Callable[[], tuple[Tensor, Tensor]] | None = None,
    loss_of: Callable[[Tensor], Tensor] = lambda loss: loss,
    backward: Callable[[Tensor], Any] = lambda loss: loss.backward(),
    clip: Callable[[], Any] = lambda: None,
    result: Callable[[Tensor], Any] = lambda loss: loss,
) -> Callable[[], Any]:
    fixed = batch()

    def closure() -> Any:
        if zero:
            optimizer.zero_grad()
        x, y = fixed if data is None else data()
        loss = loss_of(cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y))
        backward(loss)
        clip()
        return result(loss)

    return closure


# ---- healthy


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it, which begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def in_half_precision(*, scaled: bool) -> TrainingParts:
    model = mlp()
    optimizer, (x, y) = amp(model), batch()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        return loss

    return model, optimizer, closure, scaler


def unscaled_and_clipped_far_out() -> TrainingParts:
    model = mlp()
    optimizer, scaler, (x, y) = amp(model), torch.amp.GradScaler("cpu"), batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
        return loss

    return model, optimizer, closure, scaler


def accumulating() -> TrainingParts:
    model = conv_batchnorm()
    optimizer, batches = amp(model), [batch(), batch()]

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [cross_entropy(model(x), y) / len(batches) for x, y in batches]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum().detach()

    return model, optimizer, closure


class Trainer:
    """A closure that is a method."""

    def __init__(self) -> None:
        self.model, self.steps = dropout(), 0
        self.optimizer, self.batch = amp(self.model), batch()

    def closure(self) -> dict[str, Tensor]:
        self.steps += 1
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.batch[0]), self.batch[1])
        loss.backward()
        return {"loss": loss}


def by_method() -> TrainingParts:
    trainer = Trainer()
    return trainer.model, trainer.optimizer, trainer.closure


class Flagged(nn.Module):
    """Has a buffer that says whether it was ever called."""

    called: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("called", torch.tensor(False))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.called.fill_(True)
        out: Tensor = self.layer(x)
        return out


HEALTHY: dict[str, Callable[[], TrainingParts]] = {
    "numpy's numbers, put back": lambda: noisy(np.random.standard_normal),
    "Python's numbers, put back": lambda: noisy(random.random),
    "a base that maximises": lambda: make(
        wrap=lambda model: AMP(SGD(model.parameters(), lr=0.1, maximize=True), epsilon=0.1, model=model)
    ),
    "a plain optimizer": lambda: make(wrap=sgd),
    "one model for all, reset each time": always_the_same_model(reset=True),
    "one model for all, reset to a constant": always_the_same_model(reset=True, constant=0.5),
    "AdamW": lambda: make(wrap=lambda model: AMP(AdamW(model.parameters()), epsilon=0.1)),
    "BatchNorm": lambda: make(conv_batchnorm),
    "dropout": lambda: make(dropout),
    "a buffer of bool": lambda: make(Flagged),
    "tied weights": lambda: make(Tied, data=lambda: (torch.ones(10, 6) / 3, torch.arange(10) % 6)),
    "a frozen layer": lambda: make(frozen_layer),
    "a low-rank adapter": lambda: make(Adapted),
    "two ascents": lambda: make(dropout, lambda model: amp(model, inner_iter=2)),
    "a ball a tensor": lambda: make(wrap=lambda model: amp(model, ball="tensor")),
    "L∞": lambda: make(wrap=lambda model: amp(model, norm="linf", epsilon=0.01)),
    "random": lambda: make(conv_batchnorm, lambda model: RMP(sgd(model), epsilon=0.1, model=model)),
    "ε = 0": lambda: make(wrap=lambda model: amp(model, epsilon=0.0)),
    "LBFGS, not perturbed": lambda: make(wrap=lambda model: AMP(LBFGS(model.parameters()), epsilon=0.0)),
    "fp16 autocast": lambda: in_half_precision(scaled=False),
    "fp16 autocast, scaled": lambda: in_half_precision(scaled=True),
    "unscaled in the closure": unscaled_and_clipped_far_out,
    "accumulated gradients": accumulating,
    "a method": by_method,
    "bfloat16 weights": lambda: make(lambda: mlp().bfloat16()),
}


# ---- broken in one way


def from_a_loader() -> TrainingParts:
    batches = itertools.cycle([batch() for _ in range(7)])
    return make(data=lambda: next(batches))


def from_a_named_loader() -> TrainingParts:
    model = mlp()
    optimizer, batches = amp(model), iter([batch() for _ in range(100)])

    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = next(batches)
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return model, optimizer, closure


def noisy(draw: Callable[[], float], **settings: Any) -> TrainingParts:
    x, y = batch()
    return make(data=lambda: (x + draw(), y), **settings)


def beside_a_thread() -> TrainingParts:
    """One that draws as it likes while the closure runs."""
    (x, y), counts = batch(), itertools.count(1)

    def data() -> tuple[Tensor, Tensor]:
        thread = Thread(target=lambda: [random.random() for _ in range(next(counts))])
        thread.start()
        thread.join()
        return x, y

    return make(data=data)


def in_eval_mode(model: nn.Module) -> AMP:
    model.eval()
    return amp(model)


def returning_the_scaled_loss() -> TrainingParts:
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    optimizer, (x, y) = amp(model), batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(x), y))
        loss.backward()
        return loss

    return model, optimizer, closure, scaler


def without_model(model: nn.Module) -> AMP:
    return AMP(sgd(model), epsilon=0.1)


def starting_late_without_model(*, keep: bool) -> TrainingParts:
    model, optimizer, closure = make(dropout, without_model)
    scheduler = RadiusScheduler(optimizer, 100, start=0.75)
    if not keep:
        return model, optimizer, closure
    kept = {"model": model, "optimizer": optimizer, "closure": lambda _: closure(), "batches": [(None,)]}
    return {**kept, "scheduler_per_step": scheduler}  # type: ignore[return-value]


def with_own_generator() -> TrainingParts:
    model = mlp()
    optimizer, generator, (x, y) = amp(model), np.random.default_rng(0), batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x + generator.normal()), y)
        loss.backward()
        return loss

    return model, optimizer, closure


def changing_its_batch() -> TrainingParts:
    model = mlp()
    optimizer, (x, y) = amp(model), batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x.div_(2)), y)
        loss.backward()
        return loss

    return model, optimizer, closure


def changing_its_batches() -> Any:
    model = mlp()
    optimizer = amp(model)

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x.div_(2)), y)
        loss.backward()
        return loss

    return {"model": model, "optimizer": optimizer, "closure": closure, "batches": [batch()]}


def scaled(*, passed: bool, used: bool) -> TrainingParts:
    scaler = torch.amp.GradScaler("cpu")
    model, optimizer, closure = make(backward=lambda loss: (scaler.scale(loss) if used else loss).backward())
    return (model, optimizer, closure, scaler) if passed else (model, optimizer, closure)


def clipped(clip: Callable[[Any], Any]) -> TrainingParts:
    model = mlp()
    optimizer = amp(model)
    return model, optimizer, closure_of(model, optimizer, clip=lambda: clip(model.parameters()))


def stepping() -> TrainingParts:
    model = mlp()
    base = sgd(model)
    return model, base, closure_of(model, base, clip=base.step)


def without_the_head() -> TrainingParts:
    return make(wrap=lambda model: AMP(SGD(model[0].parameters(), lr=0.1), epsilon=0.1))  # type: ignore[index]


def not_seeded() -> TrainingParts:
    model, optimizer, closure = make()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(random.SystemRandom().random())
    return model, optimizer, closure


def crashing() -> TrainingParts:
    return make(loss_of=lambda loss: loss + torch.ones(2) @ torch.ones(3))


def carrying_a_hidden_state() -> TrainingParts:
    model = nn.GRU(6, 3)
    optimizer, (x, y) = amp(model), batch()
    hidden = torch.zeros(1, 3)

    def closure() -> Tensor:
        nonlocal hidden
        optimizer.zero_grad()
        output, hidden = model(x, hidden.detach())
        loss = cross_entropy(output, y)
        loss.backward()
        return loss

    return model, optimizer, closure


class Siblings(nn.Module):
    """Its forward pass moves a second layer towards the first."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        out: Tensor = self.online(x) + self.target(x)
        return out


def beside_a_discriminator(*, has_batches: bool) -> Any:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    generator, discriminator = mlp(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    optimizer, (x, y) = amp(generator), batch()

    def closure(*_: object) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(discriminator(generator(x)), y)
        loss.backward()
        return loss

    if not has_batches:
        return generator, optimizer, closure
    return {"model": generator, "optimizer": optimizer, "closure": closure, "batches": [batch()]}


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which a pass moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        out: Tensor = self.layer(x - self.mean)
        return out


def behind_another() -> Any:
    """Both networks are given, so AMP restores the buffer of the one that is not trained too."""
    model, other = nn.Linear(6, 6), Centred().requires_grad_(False)
    optimizer = amp(model, model=nn.ModuleList([model, other]))
    x, y = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(other(model(x)), y)
        loss.backward()
        return loss

    return model, optimizer, closure


class Restless(AMP):
    """Moves the weights after its step."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1e-3)
        return result


def hooked() -> TrainingParts:
    """A hook of the base writes into the weights that it steps from."""
    model, optimizer, closure = make()

    def shrink(*_: object) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.999)

    optimizer.base.register_step_pre_hook(shrink)
    return model, optimizer, closure


# make_training, the one finding about it, its verdict, and words of it
BROKEN: dict[str, tuple[Callable[[], TrainingParts], str, str, str]] = {
    "zero_grad forgotten": (lambda: make(zero=False), "zero_grad", "warning", "begin the closure with optimizer.zero"),
    "a loader in the closure": (from_a_loader, "closure repeats", "error", "once per step, before the closure"),
    "a named iterator": (from_a_named_loader, "closure repeats", "error", "it takes from the iterator batches"),
    "numpy in the closure": (
        lambda: noisy(np.random.standard_normal, wrap=without_model),
        "closure repeats",
        "error",
        "numpy.random",
    ),
    "random in the closure": (
        lambda: noisy(random.random, wrap=without_model),
        "closure repeats",
        "error",
        "Python's random",
    ),
    "a thread that draws": (beside_a_thread, "closure repeats", "warning", "its own generator"),
    "a generator of its own": (with_own_generator, "closure repeats", "error", "it draws from generator"),
    "one model for all": (always_the_same_model(reset=False), "set-up", "error", "create the model, or reset its"),
    "a batch changed in place": (changing_its_batch, "closure repeats", "error", ": it changes x "),
    "batches changed in place": (changing_its_batches, "closure repeats", "error", ": it changes batch[0] "),
    "a hidden state": (carrying_a_hidden_state, "closure repeats", "error", ": it replaces hidden, or"),
    "a momentum encoder": (lambda: make(Siblings), "θ comes back", "warning", "target.weight, target.bias"),
    **{
        f"another network's BatchNorm{', with batches' if has_batches else ''}": (
            partial(beside_a_discriminator, has_batches=has_batches),
            "BatchNorm",
            "warning",
            "model=torch.nn.ModuleList([model, discriminator])",
        )
        for has_batches in (False, True)
    },
    "another network's buffer": (behind_another, "closure repeats", "warning", "a pass changes (other's mean)"),
    "a closure that steps": (stepping, "closure repeats", "error", "leave optimizer.step() to the loop"),
    "a buffer that the loss uses": (lambda: make(Centred), "closure repeats", "warning", "a pass changes (mean)"),
    **{
        f"dropout without model=, perturbed later, its scheduler {'kept' if keep else 'dropped'}": (
            partial(starting_late_without_model, keep=keep),
            "dropout",
            "warning",
            "flatmin.AMP(base, epsilon=…, model=model)",
        )
        for keep in (True, False)
    },
    "an unused layer": (lambda: make(Unused), "gradients", "warning", "none in unused.weight, unused.bias"),
    "no backward": (lambda: make(backward=lambda _: None), "gradients", "error", "call loss.backward()"),
    "nan": (lambda: make(loss_of=lambda loss: loss * float("nan")), "gradients", "error", "not finite in 0.weight"),
    "a loss times 0": (lambda: make(loss_of=lambda loss: loss * 0), "gradients", "error", "all are 0"),
    "a forgotten head": (without_the_head, "parameters", "warning", "2.weight, 2.bias"),
    "eval mode": (lambda: make(wrap=in_eval_mode), "mode", "warning", "model.train()"),
    "the scaled loss is returned": (returning_the_scaled_loss, "loss", "warning", "return the loss itself"),
    "None is returned": (lambda: make(result=lambda _: None), "loss", "warning", "return loss"),
    "a number is returned": (lambda: make(result=Tensor.item), "loss", "warning", "returns a float without a tensor"),
    "BatchNorm without model=": (
        lambda: make(conv_batchnorm, lambda model: amp(model, model=None)),
        "BatchNorm",
        "warning",
        "2.num_batches_tracked grows by 2 in a step and by 1 in a pass",
    ),
    "a part as model=": (
        lambda: make(conv_batchnorm, lambda model: amp(model, model=model[1])),  # type: ignore[index]
        "BatchNorm",
        "warning",
        "model= is a Conv2d that lacks a part of the model",
    ),
    "dropout without model=": (
        lambda: make(dropout, lambda model: amp(model, model=None)),
        "dropout",
        "warning",
        "flatmin.AMP(base, epsilon=…, model=model)",
    ),
    "the scaler forgotten": (lambda: scaled(passed=False, used=True), "GradScaler", "error", "step(closure, scaler="),
    "a scaler not in use": (lambda: scaled(passed=True, used=False), "GradScaler", "error", "does not use"),
    "clipping": (
        lambda: clipped(lambda params: nn.utils.clip_grad_norm_(params, 0.1)),
        "clipping",
        "warning",
        "the same norm, 0.1: the closure clips",
    ),
    "clipping of values": (
        lambda: clipped(lambda params: nn.utils.clip_grad_value_(params, 0.02)),
        "clipping",
        "warning",
        "the same largest entry, 0.02",
    ),
    "bfloat16 weights and a tiny ε": (
        lambda: make(lambda: mlp().bfloat16(), lambda model: amp(model, epsilon=1e-4)),
        "rounding",
        "warning",
        "float32",
    ),
    "ε far too large": (
        lambda: make(wrap=lambda model: amp(model, epsilon=30.0, inner_lr=100.0)),
        "radius",
        "warning",
        "ε is too large",
    ),
    "ε beyond all numbers": (
        lambda: make(dropout, lambda model: amp(model, epsilon=1e18, inner_lr=1e30)),
        "radius",
        "error",
        "not finite in 5 of 5 steps",
    ),
    "another loss is returned": (
        lambda: make(result=lambda loss: -loss),
        "ascent",
        "warning",
        "does the closure return the loss it differentiates?",
    ),
    "a hook that writes weights": (hooked, "θ comes back", "error", "in 5 of 5 steps the base did not start from θ"),
    "an optimizer that does more": (
        lambda: make(wrap=lambda model: Restless(sgd(model), epsilon=0.1, model=model)),
        "ε = 0",
        "error",
        "differ from the optimizer's own in",
    ),
    "weights from nowhere": (not_seeded, "set-up", "warning", "until then ε = 0 cannot be compared"),
    "LBFGS": (lambda: make(wrap=lambda model: LBFGS(model.parameters())), "flatmin.AMP(optimizer)", "error", "LBFGS"),
    "AMP around LBFGS": (
        lambda: make(wrap=lambda model: AMP(LBFGS(model.parameters()), epsilon=0.1)),
        "make_training()",
        "error",
        "LBFGS evaluates its closure itself",
    ),
    "a crash": (crashing, "calling the closure", "error", "torch.ones(2) @ torch.ones(3)"),
}
