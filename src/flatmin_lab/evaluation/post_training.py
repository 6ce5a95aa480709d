"""The measurements after a training run: taken from its last checkpoint, written to its result file.

Always: the risk on the training set without augmentation, in eval mode (`clean_train_…`); NLL and ECE after temperature
scaling, all the calibration that one number can give; for label smoothing the smoothed loss, which the paper's NLL of
that method seems to be; and, if test images are also in the training set, the error without them. On request: attacks,
flatness, the rise of the loss on batches, the density of the Hessian's eigenvalues, the risk of the most confident
answers, the detection of another data set's images, the landscape and, for points in a plane, the decision boundary.

The paper attacks with a radius of 4 per pixel, but does not say whether before or after normalisation. `attack`
takes it as 4/255 of the pixel range, `attack_normalised` as 4/255 of the normalised inputs. Both are measured.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatmin_lab.data.dataset import Split
from flatmin_lab.data.outside import load_outside
from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.evaluation import confidence, landscapes, measurements
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.system.json_data import number, numbers
from flatmin_lab.training.build import build_method
from flatmin_lab.training.evaluation import logits_of, score_logits

PLANE_REACH, GRID_POINTS = 1.2, 241  # the grid of a decision boundary: half its side, and points along it

# data from outside, for those that have some: other objects of the same size, and house numbers
OUTSIDE = {"cifar10": ("svhn", "cifar100"), "cifar100": ("svhn", "cifar10"), "svhn": ("cifar10", "cifar100")}

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
    spectrum_steps: int = measurements.SPECTRUM_STEPS
    spectrum_probes: int = measurements.SPECTRUM_PROBES


EFFORTS = {
    "paper": Effort(),
    "paper-v2": Effort(),
    "short": Effort(restarts=1, with_trace=False, radii=(0.5,)),
    "smoke": Effort(
        images=50,
        restarts=1,
        with_trace=False,
        landscape_points=5,
        boundary_points=21,
        batches=3,
        spectrum_steps=5,
        spectrum_probes=3,
    ),
}


class Conditions(NamedTuple):
    """What a measurement needs to know besides the model and its data."""

    effort: Effort
    data: str  # the name of the data set
    root: str = "data"  # the folder with data sets: others are measured too
    say: Say = lambda _: None


def measure_every_run(subject: Subject, recipe: Recipe) -> dict[str, Any]:
    """Risk on the training set, temperature scaling, the smoothed loss and the error without repeated images."""
    train = logits_of(subject.model, subject.train, subject.normalise)
    test = logits_of(subject.model, subject.test, subject.normalise)
    assert train is not None
    assert test is not None
    risk = score_logits(train, subject.train.y)
    found: dict[str, Any] = {"clean_train_error": risk["error"], "clean_train_nll": risk["nll"]}
    found["scaled"] = measurements.temperature_scaled(test, subject.test.y)
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


def _attack(subject: Subject, how: Conditions) -> dict[str, Any]:
    return {
        "attack": measurements.robustness(subject, images=how.effort.images, say=how.say),
        "attack_normalised": measurements.robustness(subject, images=how.effort.images, normalised=True, say=how.say),
    }


def _flatness(subject: Subject, how: Conditions) -> dict[str, Any]:
    found = measurements.flatness_of(
        subject,
        images=how.effort.images,
        restarts=how.effort.restarts,
        with_trace=how.effort.with_trace,
        radii=how.effort.radii,
        say=how.say,
    )
    return {"flatness": found}


def _batch_rise(subject: Subject, how: Conditions) -> dict[str, Any]:
    return {"batch_rise": measurements.rise_on_batches(subject, batches=how.effort.batches, say=how.say)}


def _spectrum(subject: Subject, how: Conditions) -> dict[str, Any]:
    found = measurements.spectrum_of(
        subject,
        images=how.effort.images,
        steps=how.effort.spectrum_steps,
        probes=how.effort.spectrum_probes,
        say=how.say,
    )
    return {"spectrum": found}


def _selective(subject: Subject, how: Conditions) -> dict[str, Any]:
    how.say("risk over coverage")
    return {"selective": confidence.risk_over_coverage(measurements.logits_on_test(subject), subject.test.y)}


def _scaled(subject: Subject, how: Conditions) -> dict[str, Any]:
    """Every run trained with this version has it; earlier ones do not."""
    how.say("temperature scaling")
    return {"scaled": measurements.temperature_scaled(measurements.logits_on_test(subject), subject.test.y)}


def _outside(subject: Subject, how: Conditions) -> dict[str, Any]:
    inside, found = measurements.logits_on_test(subject), {}
    for name in outside_names(how.data):
        how.say(f"comparing with {name}")
        found[name] = confidence.detection(subject, inside, load_outside(name, how.root, like=subject.test))
    return {"outside": found}


def outside_names(data: str) -> tuple[str, ...]:
    """The data sets that a network trained on this one is tested with, generated ones for generated ones.

    >>> outside_names("cifar10")
    ('svhn', 'cifar100')
    >>> outside_names("cifar10-made")
    ('svhn-made', 'cifar100-made')
    """
    original = original_name(data)
    if original not in OUTSIDE:
        raise ValueError(f"outside data are known for {', '.join(OUTSIDE)}, got {data}; use flatmin evaluate --outside")
    return tuple(f"{name}{data.removeprefix(original)}" for name in OUTSIDE[original])


def _landscape(subject: Subject, how: Conditions) -> dict[str, Any]:
    how.say("loss landscape")
    images = how.effort.images or landscapes.IMAGES
    return {"landscape": landscapes.landscape(subject, points=how.effort.landscape_points, images=images)}


def _boundary(subject: Subject, how: Conditions) -> dict[str, Any]:
    """The second class's probability on a grid over the plane, for data that are points in the plane."""
    if subject.test.is_images or subject.test.shape[0] != 2:
        raise ValueError(f"a boundary is drawn between points of a plane, got {subject.test.kind}")
    side, shares = class_probabilities(subject.with_normalisation(), points=how.effort.boundary_points)
    return {"boundary": {"side": numbers(side), "shares": numbers(shares)}}


PARTS: dict[str, Callable[[Subject, Conditions], dict[str, Any]]] = {
    "attack": _attack,
    "flatness": _flatness,
    "batch_rise": _batch_rise,
    "spectrum": _spectrum,
    "scaled": _scaled,
    "selective": _selective,
    "outside": _outside,
    "landscape": _landscape,
    "boundary": _boundary,
}


def measure(subject: Subject, part: str, how: Conditions) -> dict[str, Any]:
    """One of PARTS, and the seconds it took."""
    begun = perf_counter()
    found = PARTS[part](subject, how)
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
