"""The paper's claims, tested on our results, one protocol at a time.

A claim that one method has a lower value than another is tested by Welch's test if there are three runs of each, with
Holm's correction over all tested claims. With fewer runs there is no test, only whether every value of one method lies
below every value of the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from flatmin_lab.data.augment.transforms import Kind
from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.recipes import paper_tables
from flatmin_lab.recipes.paper_numbers import METHODS
from flatmin_lab.recipes.paper_tables import AUGMENTATIONS, RESNET, SETS, Protocol
from flatmin_lab.recipes.recipe import TABLE_2
from flatmin_lab.report.columns import column_named
from flatmin_lab.report.figures.style import NAMES
from flatmin_lab.report.html import mean_and_std
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Run
from flatmin_lab.report.stats import LEVEL, MIN_RUNS, holm, welch

Runs = Mapping[str, Sequence[Run]]
HOLDS, POINTS_THAT_WAY, UNDECIDED, POINTS_OTHER_WAY, FAILS, NOT_CONTRADICTED, NO_SPREAD, NO_DATA = (
    "holds",
    "points that way, too few to test",
    "not told apart",
    "points the other way, too few to test",
    "does not hold",
    "not contradicted",
    "no spread to judge by",
    "not trained or not measured yet",
)

MEASURES = {"error": "a lower error", "nll": "a lower NLL", "ece": "better calibration"}
FLATNESS_MEASURES = {
    "landscape_rise": "the training loss one filter's length away",
    "worst_at_half": "the worst training loss within the radius 0.5",
    "eigenvalue": "largest eigenvalue of the training loss",
}


@dataclass(frozen=True)
class Claim:
    """`lower` has a lower value of the measure than `higher`; with `no_better`, it does not."""

    says: str
    measure: str
    lower: str  # both are names of recipes
    higher: str
    no_better: bool = False
    ours: bool = False  # not in the paper, but a reader will ask


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim, and what our numbers say about it."""

    says: str
    verdict: str
    numbers: str  # both sides, in words
    p: float | None = None  # after Holm
    ours: bool = False


def claims(protocol: Protocol) -> list[Claim]:
    """All claims under a protocol, with the names of their recipes."""

    def cell(data: str, method: str, model: str = RESNET, augment: Kind = "vanilla") -> str:
        return paper_tables.cell(protocol, data, model, method, augment=augment).name

    found = []
    for data in SETS:
        title = TITLES[data]
        says = f"AMP has a lower error than ERM with VGG16 on {title}"
        found.append(Claim(says, "error", cell(data, "amp", "vgg16"), cell(data, "erm", "vgg16")))
        for measure, words in MEASURES.items():
            found.append(Claim(f"AMP has {words} than ERM on {title}", measure, cell(data, "amp"), cell(data, "erm")))
        for other in METHODS:
            if other not in ("erm", "amp"):
                words = f"AMP has a lower error than {NAMES[other]} on {title}"
                found.append(Claim(words, "error", cell(data, "amp"), cell(data, other)))
        says = f"RMP is no better than ERM on {title}"
        found.append(Claim(says, "error", cell(data, "rmp"), cell(data, "erm"), no_better=True))
        says = f"label smoothing worsens calibration on {title}"
        found.append(Claim(says, "ece", cell(data, "erm"), cell(data, "label_smoothing")))
        says = f"AMP is more robust than ERM on {title} (PGD)"
        found.append(Claim(says, "pgd_normalised", cell(data, "amp"), cell(data, "erm")))
        for measure, words in FLATNESS_MEASURES.items():
            says = f"AMP is flatter than ERM on {title} ({words})"
            ours = measure != "landscape_rise"
            found.append(Claim(says, measure, cell(data, "amp"), cell(data, "erm"), ours=ours))
        for model in TABLE_2:
            for augment in AUGMENTATIONS:
                amp, erm = (cell(data, method, model, augment) for method in ("amp", "erm"))
                says = f"AMP has a lower error than ERM with {TITLES[model]} and {TITLES[augment]} on {title}"
                found.append(Claim(says, "error", amp, erm))
    for other in METHODS:
        if other != "flooding":
            says = f"flooding is better calibrated than {NAMES[other]} on CIFAR-10"
            found.append(Claim(says, "ece", cell("cifar10", "flooding"), cell("cifar10", other)))
    twice = next(recipe.name for recipe in paper_tables.compute(protocol).recipes if recipe.method == "erm")
    for measure, words in MEASURES.items():
        says = f"AMP has {words} than ERM at twice the epochs on CIFAR-10"
        found.append(Claim(says, measure, cell("cifar10", "amp"), twice, ours=True))
    says = "MixUp has a lower error than AMP with VGG16 on CIFAR-10"
    found.append(Claim(says, "error", cell("cifar10", "mixup", "vgg16"), cell("cifar10", "amp", "vgg16")))
    return found


def check_claims(runs: Runs, protocol: Protocol) -> list[ClaimVerdict]:
    """The verdicts on all claims, including those without runs yet."""
    known = claims(protocol)
    tested = {}
    sides = [(_values(runs, claim.lower, claim), _values(runs, claim.higher, claim)) for claim in known]
    for number, (lower, higher) in enumerate(sides):
        test = welch(lower, higher) if min(len(lower), len(higher)) >= MIN_RUNS else None
        if test is not None:
            tested[number] = test.p
    adjusted = holm(tested)
    return [_check_claim(claim, *sides[number], adjusted.get(number)) for number, claim in enumerate(known)]


def _values(runs: Runs, name: str, claim: Claim) -> list[float]:
    column = column_named(claim.measure)
    return [value for run in runs.get(name, ()) if (value := column.value(run)) is not None]


def _check_claim(claim: Claim, lower: list[float], higher: list[float], p: float | None) -> ClaimVerdict:
    digits, says, ours = column_named(claim.measure).digits, claim.says, claim.ours
    numbers = f"{mean_and_std(lower, digits) if lower else '–'} and {mean_and_std(higher, digits) if higher else '–'}"
    numbers = numbers.replace(" ± ", "\u00a0±\u00a0") + f" (n\u00a0=\u00a0{len(lower)}\u00a0and\u00a0{len(higher)})"
    if not lower or not higher:
        return ClaimVerdict(says, NO_DATA, numbers, ours=ours)
    if p is None and min(len(lower), len(higher)) >= MIN_RUNS:
        return ClaimVerdict(says, NO_SPREAD, numbers, ours=ours)
    if p is None:
        below, above = max(lower) < min(higher), min(lower) > max(higher)
        verdict = POINTS_THAT_WAY if below else POINTS_OTHER_WAY if above else UNDECIDED
        if claim.no_better:
            verdict = POINTS_OTHER_WAY if below else NOT_CONTRADICTED
        return ClaimVerdict(says, verdict, numbers, ours=ours)
    significant, below = p < LEVEL, mean(lower) < mean(higher)
    if claim.no_better:
        verdict = FAILS if significant and below else NOT_CONTRADICTED
    else:
        verdict = UNDECIDED if not significant else HOLDS if below else FAILS
    return ClaimVerdict(says, verdict, numbers, p, ours)


# ---- the best radius, a claim that compares more than two


def best_radius(runs: Runs, protocol: Protocol, data: str) -> ClaimVerdict:
    """The radius of the sweep with the lowest mean risk, once all have run; the paper: near 0.06."""
    says = f"the risk on held-out pictures of {TITLES[data]} (the paper: on test pictures) is lowest near ε = 0.06"
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
    return ClaimVerdict(says, f"lowest at {best:g}", f"NLL {numbers} ({counted} each, no test)")
