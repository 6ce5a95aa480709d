"""What the steps of a training run measure, logged alongside its other curves.

    log = flatmin.StepLog(optimizer, "steps.jsonl")          # or a .csv, a SummaryWriter, a wandb run, a function

The numbers in `optimizer.last` are on the device, and reading one makes the host wait. So the tensors are collected,
and read together every so many steps: means of the losses, of the sharpness L(θ + Δ) − L(θ), of ‖∇J‖ and ‖Δ‖, the share
of balls whose edge was reached, how many steps were skipped, and ε and the learning rate.

A step whose gradient is not finite is skipped silently, by design. Many in a row mean that nothing is being trained,
and cause a warning.
"""

import csv
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flatmin.core import distributed
from flatmin.core.messages import describe
from flatmin.optim.telemetry.step_info import Last
from flatmin.optim.wrapper import whole_number

Numbers = dict[str, float]
Write = Callable[[int, Numbers], object]

NAMES = ("loss", "loss_perturbed", "sharpness", "grad_norm", "delta_norm", "on_ball", "skipped", "epsilon", "lr")
MEASURED = ("loss", "loss_perturbed", "grad_norm", "delta_norm", "on_ball")
SKIPS_IN_A_ROW = 10  # then there is a warning: fp16's scaler needs up to three or four to find its scale


class StepLog:
    """Logs what the steps of a flatmin.AMP or flatmin.RMP measure, as means over `every` steps.

        log = flatmin.StepLog(optimizer, "steps.csv", SummaryWriter("runs/mine"), every=50)
        ...                                                      # the training loop as it is
        log.close()

    targets   a path that ends in .jsonl or .csv, to which lines are appended; a TensorBoard SummaryWriter; a wandb run;
              the mlflow module; a Lightning or Python logger; or a function of the step and a dict of numbers
    every     steps per line; the host reads from the device once per line
    prefix    of the names in TensorBoard, wandb, MLflow and Lightning, which also show other curves

    Numbers that were not measured are left out: the losses in loops with `perturbed()` blocks, unless they are given to
    `optimizer.step(losses=…)`; all but the loss in steps with ε = 0; RMP's sharpness. Skipped steps count only in
    `skipped`. The learning rate is that of the first perturbed group in the last of the steps, and ε that in the last
    one that was perturbed. On several ranks, only rank 0 writes, and only its own numbers. To resume, save
    `state_dict()` with the rest. `close` writes what is left; a `with` block does so at its end.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> from flatmin import AMP
    >>> optimizer = AMP(torch.optim.SGD([weight], lr=0.0), epsilon=0.5)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = weight.square().sum() / 2
    ...     loss.backward()
    ...     return loss
    >>> with StepLog(optimizer, lambda step, numbers: print(step, numbers["sharpness"], numbers["epsilon"]), every=2):
    ...     for _ in range(4):
    ...         _ = optimizer.step(closure)
    2 2.625 0.5
    4 2.625 0.5
    """

    def __init__(self, optimizer: Optimizer, *targets: Any, every: int = 50, prefix: str = "amp/") -> None:
        if not isinstance(getattr(optimizer, "last", None), Last):
            raise TypeError(
                f"StepLog reads `last` of a flatmin.AMP or flatmin.RMP, got {describe(optimizer)}; give it the flatmin "
                "optimizer itself (with Accelerate, `optimizer.optimizer`)"
            )
        self.optimizer, self.every = optimizer, whole_number("every", every, least=1)
        self._writes = [_writer(target, prefix) for target in targets]
        self.steps = 0
        self._kept: list[Last] = []
        self._rate: Any = None  # the learning rate of the last kept step
        self._group: int | None = None  # the first that was perturbed in the last perturbed step
        self._skipped_in_a_row, self._has_warned = 0, False
        self._handle = optimizer.register_step_post_hook(self._keep)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a StepLog belongs to one optimizer and its files, and cannot be copied or pickled; create one for the "
            "copy, and load this one's state_dict() into it"
        )

    def _keep(self, *_: object) -> None:
        self._kept.append(self.optimizer.last)  # type: ignore[attr-defined]
        self._rate = self.optimizer.param_groups[self._find_group()].get("lr")
        self.steps += 1
        if len(self._kept) >= self.every:
            self.write()

    def _find_group(self) -> int:
        """The first perturbed group; in a step that is not perturbed, the one that others are."""
        optimizer: Any = self.optimizer
        perturbed = optimizer.perturbed_groups()
        if perturbed:
            self._group = next(n for n, group in enumerate(optimizer.param_groups) if group is perturbed[0])
        elif self._group is None and any(optimizer.scheduled_radii):
            return next(n for n, radius in enumerate(optimizer.scheduled_radii) if radius)
        return self._group if self._group is not None and self._group < len(optimizer.param_groups) else 0

    def write(self) -> None:
        """Write the means of the steps since the last line, if there were any."""
        numbers = self.read()
        if numbers and _is_first_rank():
            for write in self._writes:
                write(self.steps, numbers)

    def read(self) -> Numbers:
        """Return the means of the steps since the last line instead of writing them; empty if there were none."""
        if not self._kept:
            return {}
        kept, self._kept = self._kept, []
        rows, rate = _on_host(kept), self._rate
        epsilon = next((one.epsilon for one in reversed(kept) if one.on_ball is not None), 0)  # the last that was used
        self._look_for_skips(rows)
        numbers = _means(rows)
        if not getattr(self.optimizer, "starts_clean", True):  # RMP has one loss, at θ + Δ
            numbers.pop("sharpness", None)
        return {**numbers, "epsilon": float(epsilon or 0), **({} if rate is None else {"lr": float(rate)})}

    def _look_for_skips(self, rows: list[Numbers]) -> None:
        for row in rows:
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if row.get("skipped") else 0
            if self._skipped_in_a_row == SKIPS_IN_A_ROW and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{SKIPS_IN_A_ROW} steps in a row were skipped because their gradients were not finite: nothing "
                    "is being trained. Look for nan or inf in inputs and loss, or lower the learning rate or epsilon",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Write what is left, and stop watching the optimizer."""
        self._handle.remove()
        self.write()

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Also writes what has not been written yet."""
        self.write()
        return {"steps": self.steps, "skipped_in_a_row": self._skipped_in_a_row, "has_warned": self._has_warned}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._kept = []
        self.steps = state_dict["steps"]
        self._skipped_in_a_row, self._has_warned = state_dict["skipped_in_a_row"], state_dict["has_warned"]


def _is_first_rank() -> bool:
    return not distributed.has_several_ranks() or torch.distributed.get_rank() == 0


def _on_host(kept: list[Last]) -> list[Numbers]:
    """The measured numbers of each step, read from the device at once."""
    places: list[tuple[int, str]] = []
    columns: list[Tensor] = []
    for name in (*MEASURED, "skipped"):
        found = [(at, value) for at, last in enumerate(kept) if (value := getattr(last, name)) is not None]
        single = [(at, value.detach().reshape(())) for at, value in found if value.numel() == 1]
        if single:
            places += [(at, name) for at, _ in single]
            columns.append(torch.stack([value.to(single[0][1].device) for _, value in single]).float())
    rows: list[Numbers] = [{} for _ in kept]
    if columns:
        for (at, name), value in zip(
            places, torch.cat([c.to(columns[0].device) for c in columns]).tolist(), strict=True
        ):
            rows[at][name] = value
    return rows


def _means(rows: list[Numbers]) -> Numbers:
    """The mean of each number, over the steps that have it and were not skipped.

    >>> _means([{"loss": 1.0, "loss_perturbed": 3.0}, {"loss": 2.0, "loss_perturbed": 5.0}, {"skipped": 1.0}])
    {'loss': 1.5, 'loss_perturbed': 4.0, 'sharpness': 2.5, 'skipped': 1}
    """
    taken = [row for row in rows if not row.get("skipped")]
    for row in taken:
        if "loss" in row and "loss_perturbed" in row:
            row["sharpness"] = row["loss_perturbed"] - row["loss"]
    columns = {name: [row[name] for row in taken if name in row] for name in NAMES if name != "skipped"}
    means = {name: sum(column) / len(column) for name, column in columns.items() if column}
    return {**means, "skipped": len(rows) - len(taken)}


# ---- targets


def _writer(target: Any, prefix: str) -> Write:
    """A function that writes a line to the target, recognised by its methods: no tracker is imported."""
    if isinstance(target, str | os.PathLike):
        return _file_writer(Path(target))
    if isinstance(target, logging.Logger):  # its `log` is not wandb's
        return lambda step, numbers: target.info("step %d: %s", step, numbers)

    def named(numbers: Numbers) -> Numbers:
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    if callable(getattr(target, "add_scalar", None)):  # TensorBoard

        def add_all(step: int, numbers: Numbers) -> None:
            for name, value in named(numbers).items():
                target.add_scalar(name, value, step)

        return add_all
    if callable(getattr(target, "log_metrics", None)):  # MLflow, Lightning's loggers
        return lambda step, numbers: target.log_metrics(named(numbers), step=step)
    if callable(getattr(target, "log", None)):  # wandb
        return lambda step, numbers: target.log(named(numbers), step=step)
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise TypeError(
        "a target must be a path, a SummaryWriter, a wandb run, mlflow, a Lightning logger, or a function of the step "
        f"and its numbers, got {describe(target)}"
    )


def _file_writer(path: Path) -> Write:
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"the path of a step log must end in .jsonl or .csv, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)

    def write_line(step: int, numbers: Numbers) -> None:
        is_new = not path.exists() or path.stat().st_size == 0
        with path.open("a", newline="", encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
                file.write(json.dumps({"step": step, **finite}) + "\n")  # JSON has no nan
                return
            rows = csv.writer(file)
            if is_new:
                rows.writerow(("step", *NAMES))
            rows.writerow((step, *(numbers.get(name, "") for name in NAMES)))

    return write_line
