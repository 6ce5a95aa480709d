"""What is compared, as recipes: the plain one, the plain one stretched to AMP's passes, and AMP at a few radii.

A schedule is a function of the share of the run that is done, so a longer run has the same schedule, stretched; the
warm-up, in epochs, is stretched with it. All are trained without a tenth of the training set, and measured on that
tenth: no number comes from the test set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatmin.comparison import AUTO, LONGER, PLAIN, Contender, contenders_for
from flatmin.comparison.contenders import SPREAD
from flatmin_lab import methods
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.recipe import Recipe


@dataclass(frozen=True)
class Entry:
    """A contender, and the recipe that trains it."""

    contender: Contender
    recipe: Recipe


def entries_for(
    name: str,
    data: Dataset,
    *,
    changes: Mapping[str, Any],
    settings: Mapping[str, Any],
    radii: Sequence[float] | None = None,
) -> list[Entry]:
    """The contenders on a data set.

    changes    fields of the recipe, for all
    settings   of AMP, except the radius
    radii      default: the radius that suits data, model and length, a third of it, and three times it
    """
    if "epsilon" in settings:
        raise ValueError(
            f"a comparison tries several radii, got epsilon={settings['epsilon']}; name them with --radii, as in "
            "--radii 0.03,0.1,0.3"
        )
    plain = default_recipe(name, data, method="erm", **{**changes, "validation": True})
    amp = default_recipe(name, data, method="amp", settings=settings, **{**changes, "validation": True})
    if radii is None:
        suited = float(amp.settings["epsilon"])
        radii = [float(f"{suited * factor:.2g}") for factor in (1 / SPREAD, 1, SPREAD)]
    passes = methods.mean_passes(amp.method, amp.settings)
    contenders = contenders_for(radii, auto=_can_be_matched(settings), passes=passes)
    return [Entry(contender, _recipe(contender, plain, amp)) for contender in contenders]


def _can_be_matched(settings: Mapping[str, Any]) -> bool:
    """Can the radius be found while training, with these settings of AMP?"""
    return bool(settings.get("growth", "constant") == "constant" and settings.get("ascent_share", 1) == 1)


def _recipe(contender: Contender, plain: Recipe, amp: Recipe) -> Recipe:
    if contender.key == PLAIN:
        return plain
    if contender.key == LONGER:
        epochs = round(contender.length * plain.epochs)
        return replace(plain, epochs=epochs, warmup=plain.warmup * epochs / plain.epochs)
    radius = methods.AUTO if contender.key == AUTO else contender.epsilon
    return replace(amp, settings={**amp.settings, "epsilon": radius})
