"""What is measured of a network after its training, from its last checkpoint, for its result file.

Always: the risk on the training set as it is, without augmentation, in eval mode (`clean_train_…`); for label smoothing
the smoothed loss, which the paper's NLL of that method seems to be; and, where test pictures stand in the training set
too, the error without them. On request: attacks, flatness, the landscape.

The paper attacks with a radius of 4 and does not say of what. `attack` takes it as 4/255 of a pixel's range,
`attack_normalised` as 4/255 of the normalised inputs; both are measured.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from flatmin_lab import examine, landscapes
from flatmin_lab.data.repeated import repeated
from flatmin_lab.evaluate import logits_of, measured
from flatmin_lab.json_numbers import number
from flatmin_lab.learner import method_of
from flatmin_lab.recipe import Recipe
from flatmin_lab.subject import Subject

Say = Callable[[str], object]
SMALL = {"pictures": 50, "points": 5}  # of a recipe that is for seeing that everything runs
POINTS = 25  # a side of the landscape


def always(subject: Subject, recipe: Recipe) -> dict[str, Any]:
    """Risk on the training set, the smoothed loss, and the error without repeated pictures, as far as they apply."""
    train = logits_of(subject.model, subject.train, subject.normalise)
    test = logits_of(subject.model, subject.test, subject.normalise)
    assert train is not None
    assert test is not None
    risk = measured(train, subject.train.y)
    found: dict[str, Any] = {"clean_train_error": risk["error"], "clean_train_nll": risk["nll"]}
    if recipe.method == "label_smoothing":
        smoothed = method_of(recipe, subject.normalise).regulariser.loss(test, subject.test.y)
        found[f"{subject.which}_smoothed_loss"] = number(smoothed)
    again = repeated(subject.train, subject.test).to(test.device)
    found[f"{subject.which}_repeated"] = len(again)
    if len(again):
        wrong = (test.argmax(dim=1) != subject.test.y).float()
        wrong[again] = 0.0
        found[f"{subject.which}_error_without_repeated"] = number(wrong.sum() / (len(wrong) - len(again)))
    return found


def _attack(subject: Subject, pictures: int | None, say: Say) -> dict[str, Any]:
    return {
        "attack": examine.robustness(subject, pictures=pictures, say=say),
        "attack_normalised": examine.robustness(subject, pictures=pictures, normalised=True, say=say),
    }


def _flatness(subject: Subject, pictures: int | None, say: Say) -> dict[str, Any]:
    return {"flatness": examine.flatness_of(subject, pictures=pictures, say=say)}


def _landscape(subject: Subject, pictures: int | None, say: Say) -> dict[str, Any]:
    points = SMALL["points"] if pictures else POINTS
    say("the landscape")
    return {"landscape": landscapes.landscape(subject, points=points, pictures=pictures or landscapes.PICTURES)}


PARTS: dict[str, Callable[[Subject, int | None, Say], dict[str, Any]]] = {
    "attack": _attack,
    "flatness": _flatness,
    "landscape": _landscape,
}


def further(subject: Subject, part: str, *, small: bool, say: Say = lambda _: None) -> dict[str, Any]:
    """One of PARTS, and how long it took; `small` is for seeing that it runs."""
    begun = perf_counter()
    found = PARTS[part](subject, SMALL["pictures"] if small else None, say)
    return {**found, f"{part}_seconds": round(perf_counter() - begun, 3)}
