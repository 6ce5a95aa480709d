"""The measurements after a training run: taken from its last checkpoint, written to its result file.

Always: the risk on the training set without augmentation, in eval mode (`clean_train_…`); for label smoothing the
smoothed loss, which the paper's NLL of that method seems to be; and, if test images are also in the training set, the
error without them. On request: attacks, flatness, the rise of the loss on batches, the landscape and, for points in a
plane, the decision boundary.

The paper attacks with a radius of 4 per pixel, but does not say whether before or after normalisation. `attack`
takes it as 4/255 of the pixel range, `attack_normalised` as 4/255 of the normalised inputs. Both are measured.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatmin_lab.data.dataset import Split
from flatmin_lab.evaluation import landscapes, measurements
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.system.json_data import number, numbers
from flatmin_lab.training.build import build_method
from flatmin_lab.training.evaluation import logits_of, score_logits

PLANE_REACH, GRID_POINTS = 1.2, 241  # the grid of a decision boundary: half its side, and points along it

Say = Callable[[str], object]


class Effort(NamedTuple):
    """How much is measured. `images` None: all of the test set, and 1000 training images."""

    images: int | None = None
    restarts: int = 4  # random starts of the search for the worst loss, beside the centre
    with_trace: bool = True  # of the Hessian: the longest part
    radii: tuple[float, ...] = (0.25, 0.5, 1.0)  # further radii, searched for the worst loss from the centre
    landscape_points: int = 25  # along a side
    boundary_points: int = 61  # along a side
    batches: int = 50  # of which the rise of the loss is measured


EFFORTS = {
    "paper": Effort(),
    "paper-v2": Effort(),
    "short": Effort(restarts=1, with_trace=False, radii=(0.5,)),
    "smoke": Effort(images=50, restarts=1, with_trace=False, landscape_points=5, boundary_points=21, batches=3),
}


def measure_every_run(subject: Subject, recipe: Recipe) -> dict[str, Any]:
    """Risk on the training set, the smoothed loss, and the error without repeated images, where they apply."""
    train = logits_of(subject.model, subject.train, subject.normalise)
    test = logits_of(subject.model, subject.test, subject.normalise)
    assert train is not None
    assert test is not None
    risk = score_logits(train, subject.train.y)
    found: dict[str, Any] = {"clean_train_error": risk["error"], "clean_train_nll": risk["nll"]}
    if recipe.method == "label_smoothing":
        smoothed = build_method(recipe, subject.normalise).regulariser.loss(test, subject.test.y)
        found[f"{subject.split_name}_smoothed_loss"] = number(smoothed)
    repeated = find_repeated(subject.train, subject.test).to(test.device)
    found[f"{subject.split_name}_repeated"] = len(repeated)
    if len(repeated):
        wrong = (test.argmax(dim=1) != subject.test.y).float()
        wrong[repeated] = 0.0
        found[f"{subject.split_name}_error_without_repeated"] = number(wrong.sum() / (len(wrong) - len(repeated)))
    return found


def _attack(subject: Subject, effort: Effort, say: Say) -> dict[str, Any]:
    return {
        "attack": measurements.robustness(subject, images=effort.images, say=say),
        "attack_normalised": measurements.robustness(subject, images=effort.images, normalised=True, say=say),
    }


def _flatness(subject: Subject, effort: Effort, say: Say) -> dict[str, Any]:
    found = measurements.flatness_of(
        subject,
        images=effort.images,
        restarts=effort.restarts,
        with_trace=effort.with_trace,
        radii=effort.radii,
        say=say,
    )
    return {"flatness": found}


def _batch_rise(subject: Subject, effort: Effort, say: Say) -> dict[str, Any]:
    return {"batch_rise": measurements.rise_on_batches(subject, batches=effort.batches, say=say)}


def _landscape(subject: Subject, effort: Effort, say: Say) -> dict[str, Any]:
    say("loss landscape")
    images = effort.images or landscapes.IMAGES
    return {"landscape": landscapes.landscape(subject, points=effort.landscape_points, images=images)}


def _boundary(subject: Subject, effort: Effort, say: Say) -> dict[str, Any]:
    """The second class's probability on a grid over the plane, for data that are points in the plane."""
    if subject.test.is_images or subject.test.shape[0] != 2:
        raise ValueError(f"a boundary is drawn between points of a plane, got {subject.test.kind}")
    side, shares = class_probabilities(subject.with_normalisation(), points=effort.boundary_points)
    return {"boundary": {"side": numbers(side), "shares": numbers(shares)}}


PARTS: dict[str, Callable[[Subject, Effort, Say], dict[str, Any]]] = {
    "attack": _attack,
    "flatness": _flatness,
    "batch_rise": _batch_rise,
    "landscape": _landscape,
    "boundary": _boundary,
}


def measure(subject: Subject, part: str, effort: Effort, *, say: Say = lambda _: None) -> dict[str, Any]:
    """One of PARTS, and the seconds it took."""
    begun = perf_counter()
    found = PARTS[part](subject, effort, say)
    return {**found, f"{part}_seconds": round(perf_counter() - begun, 3)}


# ---- test images that are also in the training set: a network that memorised them gets them right


def find_repeated(train: Split, test: Split) -> Tensor:
    """The indices in `test` of images or points that are also in `train`, whatever their labels.

    >>> train = Split(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]))
    >>> find_repeated(train, Split(torch.tensor([[3.0], [2.0]]), torch.tensor([0, 0])))
    tensor([1])
    """
    known = set(_row_bytes(train))
    return torch.tensor(
        [place for place, content in enumerate(_row_bytes(test)) if content in known], dtype=torch.int64
    )


def _row_bytes(split: Split) -> list[bytes]:
    return [row.tobytes() for row in split.x.cpu().numpy()]


@torch.no_grad()
def class_probabilities(model: nn.Module, points: int = GRID_POINTS) -> tuple[Tensor, Tensor]:
    """The coordinates along a side of a grid, and the probability of the second class on it."""
    side = torch.linspace(-PLANE_REACH, PLANE_REACH, points)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    share: Tensor = model(torch.cartesian_prod(side, side).to(device)).softmax(dim=1)[:, 1].view(points, points).T
    return side, share.cpu()
