"""Whatever its options, a run in Lightning, Hugging Face's Trainer or Accelerate is a few plain lines in float64.

Random runs: batches of which the last is short, accumulation with a short last window, clipping, schedules of the
learning rate and of the radius, N ascent steps, both balls and norms, BatchNorm and dropout; and hooks that draw from
torch's, Python's and numpy's generators before a pass, after it and after a step, which must draw what they would draw
without a perturbation.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset

import flatmin

pytest.importorskip("lightning", reason="needs Lightning: pip install 'flatmin[lightning]'")
pytest.importorskip("transformers")

import accelerate
import lightning.pytorch as pl
import transformers

from flatmin.integrations.accelerate import Window
from flatmin.integrations.lightning import FlatMinima
from flatmin.integrations.transformers import AMPTrainer
from flatmin.optim.radius import RadiusSchedule
from tests.integrations.trainers import test_lightning as on_lightning
from tests.integrations.trainers import test_transformers as on_transformers
from tests.integrations.trainers.small_transformer import arguments

pytestmark = [*on_lightning.pytestmark, pytest.mark.usefixtures("fresh_accelerator")]
fresh_accelerator = on_transformers.fresh_accelerator

RUNS = 16
BASES: tuple[Callable[[Any], Optimizer], ...] = (
    lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    lambda params: AdamW(params, lr=0.01),
)


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "labels": self.labels[row]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Linear(4, 6, bias=False)  # its gradient would be 0 but for rounding, which Adam magnifies
        self.layers = nn.Sequential(first, nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.layers(x), labels)}


class Draws:
    """What hooks draw, from generators that begin anew in every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []

    def seed(self, step: int) -> None:
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)

    def __call__(self) -> None:
        self.seen.append((float(torch.rand(())), random.random(), float(np.random.rand())))


@dataclass
class Run:
    """The options of a run, and what it leaves behind."""

    number: int
    draws: Draws = field(default_factory=Draws)
    net: Net = field(default_factory=Net)

    def __post_init__(self) -> None:
        draw = random.Random(self.number)
        self.size, self.window, self.epochs = draw.choice([2, 4]), draw.choice([1, 2, 3]), draw.randint(1, 3)
        self.rows = draw.randint(2, 5) * self.size + draw.choice([0, self.size - 2])
        self.clip, self.make_base = draw.choice([0.0, 0.2]), draw.choice(BASES)
        self.amp: dict[str, Any] = {"epsilon": draw.choice([0.05, 0.5]), "inner_lr": draw.choice([0.3, 1.0])}
        self.amp |= {"inner_iter": draw.choice([1, 2]), "ball": draw.choice(["global", "tensor"])}
        self.amp |= {"norm": draw.choice(["l2", "linf"])}
        growth: Any = draw.choice(["constant", "linear"])
        self.schedule: dict[str, Any] = {"start": draw.choice([0.0, 0.5]), "growth": growth}
        self.schedule |= {"every": draw.choice([1, 2])}

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Rows(self.rows), batch_size=self.size, generator=torch.Generator())

    def windows(self) -> list[list[dict[str, Tensor]]]:
        batches = list(self.loader())
        return [batches[at : at + self.window] for at in range(0, len(batches), self.window)]


def reference(run: Run, *, divides_by_full_window: bool) -> None:
    """The algorithm, pass by pass."""
    net, draws, steps = run.net.train(), run.draws, run.windows() * run.epochs
    params, buffers = list(net.parameters()), list(net.buffers())
    base = run.make_base(params)
    rate, schedule = ExponentialLR(base, 0.9), RadiusSchedule(**run.schedule)
    for step, window in enumerate(steps):
        draws.seed(step)
        share = 1 / (run.window if divides_by_full_window else len(window))
        epsilon = run.amp["epsilon"] * schedule.share(step, len(steps))
        gradient, started = [torch.zeros_like(p) for p in params], []
        for number, batch in enumerate(window):
            draws()
            started.append(random_states())
            add(gradient, net(**batch)["loss"] * share, params)
            draws()
            if number + 1 < len(window):
                draws()
        drawn, clean, theta = random_states(), copies(buffers), copies(params)
        delta = [torch.zeros_like(p) for p in params]
        for _ in range(run.amp["inner_iter"] if epsilon else 0):
            delta = project([d + run.amp["inner_lr"] * g for d, g in zip(delta, gradient, strict=True)], epsilon, run)
            put(params, [at + d for at, d in zip(theta, delta, strict=True)])
            gradient = [torch.zeros_like(p) for p in params]
            for batch, state in zip(window, started, strict=True):
                set_random_states(state)
                add(gradient, net(**batch)["loss"] * share, params)
            put(buffers, clean)
        put(params, theta)
        set_random_states(drawn)
        for p, g in zip(params, gradient, strict=True):
            p.grad = g
        if run.clip:
            nn.utils.clip_grad_norm_(params, run.clip)
        base.step()
        rate.step()
        draws()


def add(gradient: list[Tensor], loss: Tensor, params: list[nn.Parameter]) -> None:
    for total, g in zip(gradient, torch.autograd.grad(loss, params), strict=True):
        total.add_(g)


def project(delta: list[Tensor], epsilon: float, run: Run) -> list[Tensor]:
    if run.amp["norm"] == "linf":
        return [d.clamp(-epsilon, epsilon) for d in delta]
    lengths = [d.norm() for d in delta]
    if run.amp["ball"] == "global":
        lengths = [torch.stack(lengths).norm()] * len(delta)
    return [d * (epsilon / length).clamp(max=1) for d, length in zip(delta, lengths, strict=True)]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


# ---- the three trainers


def in_lightning(run: Run, folder: Path) -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.net

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % run.window == 0:
                run.draws.seed(self.trainer.global_step)
            run.draws()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def on_after_backward(self) -> None:
            run.draws()

        def on_train_batch_end(self, *_: Any) -> None:
            run.draws()

        def configure_optimizers(self) -> Any:
            base = run.make_base(self.parameters())
            return [base], [{"scheduler": ExponentialLR(base, 0.9), "interval": "step"}]

    settings: dict[str, Any] = {"max_epochs": run.epochs, "accumulate_grad_batches": run.window}
    callback = FlatMinima(**run.amp, **run.schedule)
    fitted = on_lightning.trainer(callback, gradient_clip_val=run.clip, precision="64-true", **settings)
    fitted.fit(Module(), run.loader())


class Hooks(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.draws.seed(state.global_step)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.draws()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.draws()


def in_transformers(run: Run, folder: Path) -> None:
    class Drawing(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any) -> Tensor:
            run.draws()
            loss: Tensor = super().training_step(*arguments)
            run.draws()
            return loss

    class Trainer(AMPTrainer, Drawing):
        pass

    base = run.make_base(run.net.parameters())
    args = arguments(
        folder,
        num_train_epochs=run.epochs,
        per_device_train_batch_size=run.size,
        gradient_accumulation_steps=run.window,
        max_grad_norm=run.clip,
        label_names=["labels"],
    )
    Trainer(
        run.net,
        args,
        train_dataset=Rows(run.rows),
        optimizers=(base, ExponentialLR(base, 0.9)),
        callbacks=[Hooks(run.draws)],
        **run.amp,
        **run.schedule,
    ).train()


def in_accelerate(run: Run, folder: Path) -> None:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=run.window, cpu=True)
    amp = flatmin.AMP(run.make_base(run.net.parameters()), model=run.net, **run.amp)
    radius = flatmin.RadiusScheduler(amp, len(run.windows()) * run.epochs, **run.schedule)
    model, optimizer, loader, rate = accelerator.prepare(run.net, amp, run.loader(), ExponentialLR(amp, 0.9))
    window, step, begins = Window(accelerator, model, optimizer), 0, True
    for batch in (batch for _ in range(run.epochs) for batch in loader):
        if begins:
            run.draws.seed(step)
        run.draws()
        with accelerator.accumulate(model):
            window.backward(model, **batch)
            run.draws()
            if (begins := accelerator.sync_gradients) and run.clip:
                accelerator.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
        if begins:
            radius.step()
            step += 1
        run.draws()


@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("train", [in_lightning, in_transformers, in_accelerate])
def test_a_run_is_a_few_plain_lines(train: Callable[[Run, Path], None], number: int, tmp_path: Path) -> None:
    run, expected = Run(number), Run(number)
    train(run, tmp_path)
    reference(expected, divides_by_full_window=train is not in_transformers)
    assert run.draws.seen == expected.draws.seen
    for tensor, other in zip(run.net.state_dict().values(), expected.net.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-8, atol=1e-10)
