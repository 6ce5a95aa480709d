"""Landscapes of trained models: the loss over a plane through the weights, on training and on test images.

All models share the same two directions: the same noise, scaled to each model's filters. The middle row of a plane is
the line of the paper's figure 2.

Or the line between two models, which says whether they are in one valley.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatmin import flatness, metrics
from flatmin.core.model_state import Snapshot, eval_mode
from flatmin_lab.data.batches import Batches
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.system.json_data import number, numbers

POINTS = 41  # along a side; odd, so that the weights themselves are a point
REACH = 1.0  # half a side; at 1 a filter has moved by its own length
IMAGES = 1000  # of each split


def check_options(points: int, reach: float, images: int) -> None:
    if points < 3 or points % 2 == 0:
        raise ValueError(
            f"--points must be odd and at least 3, so that the weights themselves are a point, got {points}"
        )
    if not 0 < reach < float("inf"):
        raise ValueError(f"--reach must be above 0 and finite, got {reach}")
    if images < 1:
        raise ValueError(f"--images must be at least 1, got {images}")


def landscape(
    subject: Subject,
    *,
    points: int = POINTS,
    reach: float = REACH,
    images: int = IMAGES,
    seed: int = 0,
    lines_only: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, Any]:
    """For each split the loss along a line, and over a plane (rows: y, columns: x) unless `lines_only`."""
    check_options(points, reach, images)
    axis = torch.linspace(-reach, reach, points, dtype=torch.float64)
    axis[points // 2] = 0.0  # not −1e-17
    layout = _fastest_layout(subject)
    first, second = flatness.directions(subject.model, number=2, generator=torch.Generator().manual_seed(seed))
    ys = axis[points // 2 : points // 2 + 1] if lines_only else axis
    splits: dict[str, Any] = {}
    done = 0
    for name, split in subject.splits().items():
        x, y = subject.inputs(split, images)
        loss = flatness.empirical_risk(x.contiguous(memory_format=layout), y)
        before = done
        plane = flatness.plane(
            subject.model,
            loss,
            xs=axis,
            ys=ys,
            along=(first, second),
            progress=lambda n: progress(before + n),  # noqa: B023
        )
        done += plane.losses.numel()
        losses = numbers(plane.losses)
        splits[name] = {
            "pictures": min(images, len(split)),
            "line": losses[len(ys) // 2],
            "plane": None if lines_only else losses,
        }
    return {"seed": seed, "reach": reach, "points": points, "axis": numbers(axis), "splits": splits}


def _fastest_layout(subject: Subject) -> torch.memory_format:
    """NHWC in memory, in which the model then is: half the time on a CPU, two thirds on an H200.

    Not every network takes it: `x.view(len(x), -1)` of such activations raises, and so do five-dimensional weights.
    """
    model: Any = subject.model
    before = Snapshot(model)
    try:
        if subject.test.is_images:
            model.to(memory_format=torch.channels_last)
            x, _ = subject.inputs(subject.test, 2)
            before.take({subject.device})
            try:
                with torch.no_grad(), eval_mode(model):
                    model(x.contiguous(memory_format=torch.channels_last))
            finally:
                before.put_back()
            return torch.channels_last
    except RuntimeError:
        model.to(memory_format=torch.contiguous_format)
    return torch.contiguous_format


def count_points(points: int, *, lines_only: bool) -> int:
    """How many losses the landscape of one model takes, over both splits."""
    return 2 * points * (1 if lines_only else points)


def line_between(
    first: Subject,
    second: Subject,
    *,
    points: int = POINTS,
    images: int = IMAGES,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, Any]:
    """For each split the loss and the error on the line between two models, and how high they rise there.

    If the models have BatchNorm, its statistics are recomputed at each point, on as many training images, augmented as
    in the first model's training.
    """
    _check_same_data(first, second)
    batches = _training_batches(first, images) if _has_batchnorm(first.model) else None
    splits: dict[str, Any] = {}
    ts: list[float] = []
    for place, (name, split) in enumerate(first.splits().items()):
        x, y = first.inputs(split, images)
        found = flatness.between(
            first.model,
            second.model,
            flatness.empirical_risk(x, y),
            points=points,
            error=flatness.empirical_risk(x, y, criterion=metrics.error),
            renew=batches,
            progress=lambda n: progress(place * points + n),  # noqa: B023
        )
        assert found.errors is not None
        assert found.error_barrier is not None
        ts = numbers(found.ts)
        splits[name] = {
            "pictures": len(y),
            "losses": numbers(found.losses),
            "errors": numbers(found.errors),
            "barrier": number(found.barrier),
            "highest": number(found.highest),
            "error_barrier": number(found.error_barrier),
        }
    renewed = (
        {"pictures": sum(len(x) for x, _ in batches), "augmented": bool(first.augment.stages)} if batches else None
    )
    return {"points": points, "ts": ts, "kind": first.kind, "renewed": renewed, "splits": splits}


def _check_same_data(first: Subject, second: Subject) -> None:
    same = first.test.x.shape == second.test.x.shape and torch.equal(first.test.x, second.test.x)
    if not same:
        raise ValueError(
            "the line between two models needs two that take the same images, and these were trained or evaluated on "
            "different ones; name two runs on one data set"
        )
    one, other = first.normalise, second.normalise
    if not torch.equal(one.mean, other.mean) or not torch.equal(one.std, other.std):
        raise ValueError(
            "the line between two models needs two that take the same inputs, and these normalise their images by "
            "different numbers; name two runs with one --normalise"
        )


def _has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _training_batches(subject: Subject, images: int) -> list[tuple[Tensor, Tensor]]:
    """As many whole batches as these images fill, one at least, of the training's size and augmentation."""
    size = min(subject.batch_size, len(subject.train))
    made = Batches(
        split=subject.train, batch_size=size, normalise=subject.normalise, augment=subject.augment, seed=0
    ).epoch(0)
    taken = itertools.islice(made, max(images // size, 1))
    return [batch for batch in taken if len(batch[0]) == size]
