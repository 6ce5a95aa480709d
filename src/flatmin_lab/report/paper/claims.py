"""The paper's claims, tested on our results, one protocol at a time.

A claim that one method has a lower value than another is tested by Welch's test if there are three runs of each, and
corrected for the size of its family (families.py). With fewer runs there is no test, only whether every value of one
method lies below every value of the other. A method has the lowest value of all if it has a lower one than each
other method: its p is the largest of theirs, and needs no further correction (an intersection-union test).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean

from flatmin_lab.data.augment.transforms import Kind
from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.recipes.experiments import experiment, paper_tables, readings
from flatmin_lab.recipes.experiments.experiment import RESNET, SETS
from flatmin_lab.recipes.experiments.paper_tables import AUGMENTATIONS
from flatmin_lab.recipes.paper_numbers import METHODS
from flatmin_lab.recipes.protocols import NAMES, TABLE_2, Protocol
from flatmin_lab.report.columns import column_named
from flatmin_lab.report.figures.style import NAMES as NAMES_OF_METHODS
from flatmin_lab.report.html import mean_and_std
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Run
from flatmin_lab.report.paper.families import Families, Family, comparison, corrected, split_name
from flatmin_lab.report.stats import LEVEL, MIN_RUNS, welch

Runs = Mapping[str, Sequence[Run]]
HOLDS, UNDECIDED, FAILS, NOT_CONTRADICTED, NO_SPREAD, NOT_PLANNED, NO_DATA = (
    "holds",
    "not significantly different",
    "does not hold",
    "not contradicted",
    "no spread to judge by",
    "not among the planned comparisons, not tested",
    "not trained or not measured yet",
)
POINTS_THAT_WAY, OVERLAPS, POINTS_OTHER_WAY = "points that way", "the runs overlap", "points the other way"  # too few

MEASURES = {"error": "a lower error", "nll": "a lower NLL", "ece": "better calibration"}
FLATNESS_MEASURES = {
    "landscape_rise": "the training loss one filter's length away",
    "worst_at_half": "the worst training loss within a radius of 0.5",
    "eigenvalue": "largest eigenvalue of the training loss",
}


@dataclass(frozen=True)
class Claim:
    """`lower` has a lower value of the measure than each of `higher`; with `no_better`, it does not."""

    says: str
    measure: str
    lower: str  # these are names of recipes
    higher: tuple[str, ...]
    no_better: bool = False
    ours: bool = False  # not in the paper, but readers will ask

    @property
    def comparison(self) -> str:
        """As its family lists it."""
        return comparison(self.measure, self.lower, self.higher)


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim, and what our numbers say about it."""

    says: str
    verdict: str
    numbers: str  # both sides, in words
    p: float | None = None  # corrected
    ours: bool = False
    too_few: bool = False  # runs for a test: the verdict is a direction
    claim: Claim | None = None  # None where it compares more than two


def claims(protocol: Protocol) -> list[Claim]:
    """All claims under a protocol, with the names of their recipes."""

    def cell(data: str, method: str, model: str = RESNET, augment: Kind = "vanilla") -> str:
        return experiment.cell(protocol, data, model, method, augment=augment).name

    found = []
    for data in SETS:
        title, erm, amp = TITLES[data], (cell(data, "erm"),), cell(data, "amp")
        says = f"AMP has a lower error than ERM with VGG16 on {title}"
        found.append(Claim(says, "error", cell(data, "amp", "vgg16"), (cell(data, "erm", "vgg16"),)))
        for measure, words in MEASURES.items():
            found.append(Claim(f"AMP has {words} than ERM on {title}", measure, amp, erm))
        says = f"AMP has the lowest error of the eight methods on {title}"
        found.append(Claim(says, "error", amp, tuple(cell(data, other) for other in METHODS if other != "amp")))
        says = f"RMP is no better than ERM on {title}"
        found.append(Claim(says, "error", cell(data, "rmp"), erm, no_better=True))
        says = f"label smoothing worsens calibration on {title}"
        found.append(Claim(says, "ece", cell(data, "erm"), (cell(data, "label_smoothing"),)))
        says = f"AMP is more robust than ERM on {title} (PGD)"
        found.append(Claim(says, "pgd_normalised", amp, erm))
        for measure, words in FLATNESS_MEASURES.items():
            says = f"AMP is flatter than ERM on {title} ({words})"
            found.append(Claim(says, measure, amp, erm, ours=measure != "landscape_rise"))
        for model in TABLE_2:
            for augment in AUGMENTATIONS:
                wide, plain = (cell(data, method, model, augment) for method in ("amp", "erm"))
                says = f"AMP has a lower error than ERM with {TITLES[model]} and {TITLES[augment]} on {title}"
                found.append(Claim(says, "error", wide, (plain,)))
    others = tuple(cell("cifar10", other) for other in METHODS if other != "flooding")
    says = "flooding has the best calibration of the eight methods on CIFAR-10"
    found.append(Claim(says, "ece", cell("cifar10", "flooding"), others))
    twice = next(recipe.name for recipe in readings.compute(protocol).recipes if recipe.method == "erm")
    for measure, words in MEASURES.items():
        says = f"AMP has {words} than ERM at twice the epochs on CIFAR-10"
        found.append(Claim(says, measure, cell("cifar10", "amp"), (twice,), ours=True))
    says = "MixUp has a lower error than AMP with VGG16 on CIFAR-10"
    found.append(Claim(says, "error", cell("cifar10", "mixup", "vgg16"), (cell("cifar10", "amp", "vgg16"),)))
    erm_spiral, amp_spiral = (recipe.name for recipe in paper_tables.spiral(protocol).recipes)
    if amp_spiral.startswith(f"{protocol}/"):  # not where another protocol has these runs
        says = "AMP has a lower error than ERM on the spiral"
        found.append(Claim(says, "error", amp_spiral, (erm_spiral,), ours=True))
    return found


@cache
def claimed_families(protocol: Protocol) -> dict[str, Family]:
    """The families that the paper's claims make."""
    found: dict[str, list[str]] = {}
    for claim in claims(protocol):
        found.setdefault(split_name(claim.lower)[0], []).append(claim.comparison)
    return {name: Family(tuple(comparisons)) for name, comparisons in found.items()}


def families_with(planned: Families) -> dict[str, Family]:
    """Those of a plan, and those of the claims where it has none."""
    return {**{name: one for protocol in NAMES for name, one in claimed_families(protocol).items()}, **planned}


def families_of(recipes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The comparisons that the claims make of these recipes, by family, as a plan records them."""
    known = families_with({})
    names = dict.fromkeys(split_name(recipe)[0] for recipe in recipes)
    return {name: known[name].comparisons for name in names if name in known}


def check_claims(runs: Runs, protocol: Protocol, families: Families | None = None) -> list[ClaimVerdict]:
    """The verdicts on all claims, including those without runs yet."""
    known = families_with(families or {})
    return [_check_claim(claim, runs, known[split_name(claim.lower)[0]]) for claim in claims(protocol)]


def _values(runs: Runs, name: str, claim: Claim) -> list[float]:
    column = column_named(claim.measure)
    return [value for run in runs.get(name, ()) if (value := column.value(run)) is not None]


def _check_claim(claim: Claim, runs: Runs, family: Family) -> ClaimVerdict:
    digits = column_named(claim.measure).digits
    lower, others = _values(runs, claim.lower, claim), {name: _values(runs, name, claim) for name in claim.higher}
    known = {name: values for name, values in others.items() if values}
    if not lower or len(known) < len(others):
        return ClaimVerdict(claim.says, NO_DATA, "", ours=claim.ours, claim=claim)
    name = min(known, key=lambda name: mean(known[name]))  # the one that is hardest to beat
    numbers = f"{mean_and_std(lower, digits)} and {mean_and_std(known[name], digits)}".replace(" ± ", "\u00a0±\u00a0")
    numbers += f", n\u00a0=\u00a0{len(lower)}\u00a0and\u00a0{len(known[name])}"
    numbers += f", the lowest of the others, {NAMES_OF_METHODS[split_name(name)[1]]}" if len(known) > 1 else ""
    verdict, p = _verdict(claim, lower, list(known.values()), family)
    too_few = min(map(len, (lower, *known.values()))) < MIN_RUNS
    return ClaimVerdict(claim.says, verdict, numbers, p, claim.ours, too_few, claim)


def _verdict(claim: Claim, lower: list[float], others: list[list[float]], family: Family) -> tuple[str, float | None]:
    """The verdict, and the p that it rests on."""
    if min(len(values) for values in (lower, *others)) < MIN_RUNS:
        below = all(max(lower) < min(values) for values in others)
        above = any(min(lower) > max(values) for values in others)
        if claim.no_better:
            return POINTS_OTHER_WAY if below else NOT_CONTRADICTED, None
        return POINTS_THAT_WAY if below else POINTS_OTHER_WAY if above else OVERLAPS, None
    tests = [(welch(lower, values), mean(lower) < mean(values)) for values in others]
    if any(test is None for test, _ in tests):
        return NO_SPREAD, None
    if claim.comparison not in family.comparisons:
        return NOT_PLANNED, None
    against = [test.p for test, is_below in tests if test is not None and not is_below]
    for_it = [test.p for test, is_below in tests if test is not None and is_below]
    # lower than all: as certain as the least certain; not the lowest: one of several suffices, hence the correction
    p = corrected(min(against) * len(others), family) if against else corrected(max(for_it), family)
    if claim.no_better:
        return FAILS if p < LEVEL and not against else NOT_CONTRADICTED, p
    return UNDECIDED if p >= LEVEL else FAILS if against else HOLDS, p


# ---- the best radius, a claim that compares more than two


def best_radius(runs: Runs, protocol: Protocol, data: str) -> ClaimVerdict:
    """The radius of the sweep with the lowest mean risk, once all have run; the paper: near 0.06."""
    says = f"the risk on held-out images of {TITLES[data]} (the paper: on test images) is lowest near ε = 0.06"
    swept = [r for r in paper_tables.sweep(protocol).recipes if r.method == "amp" and original_name(r.data) == data]
    names = {float(recipe.settings["epsilon"]): recipe.name for recipe in swept}
    means = {
        radius: mean(values)
        for radius, name in names.items()
        if (values := [v for run in runs.get(name, ()) if (v := column_named("nll").value(run)) is not None])
    }
    if len(means) < len(names):
        return ClaimVerdict(says, NO_DATA, "")
    best = min(means, key=lambda radius: means[radius])
    numbers = ", ".join(f"{radius:g}: {value:.3f}" for radius, value in means.items())
    count = {len(runs[name]) for name in names.values()}
    counted = f"n = {min(count)}" if len(count) == 1 else f"n = {min(count)} to {max(count)}"
    return ClaimVerdict(says, f"lowest at {best:g}", f"NLL {numbers}; {counted} each", too_few=True)
