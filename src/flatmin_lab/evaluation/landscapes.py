"""Landscapes of trained models: the loss over a plane through the weights, on training and on test images.

All models share the same two directions: the same noise, scaled to each model's filters. The middle row of a plane is
the line of the paper's figure 2.
"""

from collections.abc import Callable
from typing import Any

import torch

from flatmin import flatness
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.system.json_data import numbers

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
    # images as NHWC in memory: half the time on a CPU, three quarters on an H200
    layout = torch.channels_last if subject.test.is_images else torch.contiguous_format
    subject.model.to(memory_format=layout)  # type: ignore[call-overload]
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


def count_points(points: int, *, lines_only: bool) -> int:
    """How many losses the landscape of one model takes, over both splits."""
    return 2 * points * (1 if lines_only else points)
