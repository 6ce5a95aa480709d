"""Families of comparisons: what is tested, fixed before the runs, so that a verdict depends on its own runs alone.

A family belongs to one protocol, data set and network, and is a list of comparisons: a measure, and whose mean is said
to be lower than whose, by the ends of the recipes' names:

    paper/cifar10-preactresnet18       nll: amp < erm
                                       error: amp < erm, dropout, label_smoothing, flooding, mixup, adversarial, rmp

A comparison's p is Welch's times the size of the family (Bonferroni's correction). So it does not change when something
else is trained, unlike Holm's correction over whatever happens to be there. What is in no family is not tested.

planned.json holds the families of what was planned, and the day they were fixed. If it has none of a given name, the
family is made from the paper's claims (claims.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.stats import MIN_RUNS, welch


class Family(NamedTuple):
    comparisons: tuple[str, ...]
    fixed: str = ""  # the day


Families = Mapping[str, Family]


class NamedFamily(NamedTuple):
    """A family as a page names it."""

    name: str
    title: str  # data set and network
    family: Family

    @property
    def anchor(self) -> str:
        return f"family-{self.name.replace('/', '-')}"


def named_families(families: Families, recipes: Iterable[str]) -> dict[str, NamedFamily]:
    """The families of these recipes, by name; those without one are left out."""
    found = {}
    for name in dict.fromkeys(split_name(recipe)[0] for recipe in sorted(recipes)):
        if name in families:
            data, model = name.rpartition("/")[2].split("-")
            title = f"{TITLES.get(data, data)} with {TITLES.get(model, model)}"
            found[name] = NamedFamily(name, title, families[name])
    return found


def split_name(recipe: str) -> tuple[str, str]:
    """The family of a recipe's name, and the end that tells it apart there.

    >>> split_name("paper-v2/cifar10-preactresnet18-amp-start-0.5")
    ('paper-v2/cifar10-preactresnet18', 'amp-start-0.5')
    """
    protocol, slash, rest = recipe.rpartition("/")
    data, model, end = (*rest.split("-", 2), "", "")[:3]
    return f"{protocol}{slash}{data}-{model}", end


def comparison(measure: str, lower: str, higher: Iterable[str]) -> str:
    """A comparison as a family lists it; `lower` and `higher` are names of recipes.

    >>> comparison("nll", "paper/cifar10-vgg16-amp", ["paper/cifar10-vgg16-erm"])
    'nll: amp < erm'
    """
    return f"{measure}: {split_name(lower)[1]} < {', '.join(split_name(name)[1] for name in higher)}"


def corrected(p: float, family: Family) -> float:
    return min(1.0, p * len(family.comparisons))


def is_pair_planned(families: Families, measure: str, names: tuple[str, str]) -> bool:
    """Whether two recipes are to be compared, whichever is said to be the lower; those without a family always are."""
    one, other = names
    family = families.get(split_name(one)[0])
    known = {comparison(measure, one, [other]), comparison(measure, other, [one])}
    return family is None or bool(known & set(family.comparisons))


def p_of_pair(
    families: Families, measure: str, names: tuple[str, str], values: Sequence[float], base: Sequence[float]
) -> float | None:
    """The corrected p of two recipes; None if their family has no such comparison, or there is no such family.

    Nor is there a p for fewer than three runs, or for runs without any spread.
    """
    family = families.get(split_name(names[0])[0])
    if family is None or not is_pair_planned(families, measure, names) or min(len(values), len(base)) < MIN_RUNS:
        return None
    test = welch(values, base)
    return None if test is None else corrected(test.p, family)
