"""How far flatmin is from what others wrote: the largest difference to each oracle, over how many cases.

Measures are compared with torchmetrics in float32. It adds up the examples of a bin one by one: its ece of 2000 of them
is 8e-7 from the one in float64, where ours is 7e-8. So there are no more than 500 here. Attacks are compared with
foolbox in float64: in float32 a gradient of nearly 0 may have either sign, and a number then moves by a whole step.
`hessian_oracles.py` compares the Hessian.

A row is what is compared, with what, the package that it needs, and a function of (cases, device) to the largest
difference and the number of comparisons. Another oracle is another row of ROWS. A package that is not installed
is reported, and its rows are left out.

    python benchmarks/oracles.py [--cases 20] [--device cpu] [--json out/oracles.json]
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatmin import attacks, metrics
from flatmin_lab.system.machine import facts
from hessian_oracles import from_curvlinops, from_dense, from_pyhessian
from machine import command, line

Largest = tuple[float, int]  # the largest difference, and over how many comparisons
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


class Row(NamedTuple):
    what: str
    oracle: str
    package: str | None
    compare: Callable[[int, torch.device], Largest]


def largest(differences: Iterator[float]) -> Largest:
    found = list(differences)
    return max(found), len(found)


# ---- torchmetrics


def logits_and_labels(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits and labels, about half of them right: 1 to 500 examples of 2 to 1000 classes."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 501, (), generator=generator))
    classes = (2, 3, 10, 100, 1000)[seed % 5]
    logits = (1 + seed % 7) * torch.randn(count, classes, generator=generator)
    labels = torch.randint(0, classes, (count,), generator=generator)
    sure = torch.rand(count, generator=generator) < 0.5
    return logits.to(device), torch.where(sure, logits.argmax(dim=1), labels).to(device)


def their_ece(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Torchmetrics' bins are closed on the left and a confidence of exactly 1 has one of its own; the paper's are not.

    Every probability one float32 lower, and both sort alike: p ≤ edge where the one below p is < edge. What remains: it
    works in float32 alone, and its edges are linspace's, 6 of the 14 between 15 bins one float32 beside m/15.
    """
    theirs = import_module("torchmetrics.functional.classification").multiclass_calibration_error
    probability = logits.softmax(dim=1).float()
    lower = torch.nextafter(probability, torch.zeros_like(probability))
    found: Tensor = theirs(lower, labels, num_classes=logits.shape[1], n_bins=bins, norm="l1")
    return found


def their_error(logits: Tensor, labels: Tensor) -> Tensor:
    theirs = import_module("torchmetrics.functional.classification").multiclass_accuracy
    found: Tensor = 1 - theirs(logits, labels, num_classes=logits.shape[1], average="micro")
    return found


def their_brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Torchmetrics has no Brier score for more than two classes, but a mean over numbers: K times that."""
    theirs = import_module("torchmetrics.functional").mean_squared_error
    targets = nn.functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
    found: Tensor = theirs(logits.softmax(dim=1), targets) * logits.shape[1]
    return found


def measure_differences(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], cases: int, device: torch.device, **settings: Any
) -> Largest:
    return largest(
        abs(float(ours(*given, **settings)) - float(theirs(*given, **settings)))
        for given in (logits_and_labels(seed, device) for seed in range(cases))
    )


# ---- foolbox


def foolbox() -> Any:
    with warnings.catch_warnings():  # it imports scipy.ndimage.filters, a name that scipy is giving up
        warnings.filterwarnings("ignore", message=".*scipy.ndimage.filters", category=DeprecationWarning)
        return import_module("foolbox")


class Normalise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean, std = (x.new_tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))
        return (x - mean) / std


def network(seed: int) -> nn.Sequential:
    """A small convolutional network of normalised images, whose BatchNorm has seen some."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
        model = nn.Sequential(*convolutions, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 5)).double()
        model(torch.randn(50, 3, 8, 8, dtype=torch.float64))
    return model.eval()


def attack_differences(kind: str, norm: Literal["linf", "l2"], cases: int, device: torch.device) -> Largest:
    """One to ten steps of a quarter of the radius, or FGSM; what foolbox found, and what it gives after clipping."""
    return largest(difference for seed in range(cases) for difference in attacked(kind, norm, seed, device))


def attacked(kind: str, norm: Literal["linf", "l2"], seed: int, device: torch.device) -> Iterator[float]:
    box = foolbox()
    model = network(seed).to(device)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(6, 3, 8, 8, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(0, 5, (6,), generator=generator).to(device)
    epsilon = {"linf": 8 / 255, "l2": 0.5}[norm] * (1 + seed % 3)
    mean, std = (torch.tensor(numbers, dtype=torch.float64, device=device) for numbers in (MEAN, STD))
    preprocessing = {"mean": mean, "std": std, "axis": -3}
    theirs = box.PyTorchModel(model, bounds=(0, 1), device=device, preprocessing=preprocessing)
    pixels = nn.Sequential(Normalise(), model)
    named = {"linf": "Linf", "l2": "L2"}[norm]
    if kind == "fgsm":
        attack = getattr(box.attacks, f"{named}FastGradientAttack")(random_start=False)
        ours = attacks.fgsm(pixels, x, y, epsilon=epsilon, norm=norm)
    else:
        steps, step = 1 + seed % 10, epsilon / 4
        attack = getattr(box.attacks, f"{named}PGD")(abs_stepsize=step, steps=steps, random_start=False)
        ours = attacks.pgd(pixels, x, y, epsilon=epsilon, step_size=step, steps=steps, norm=norm)
    _, clipped, _ = attack(theirs, x, y, epsilons=epsilon)
    for found in (clipped, attack.run(theirs, x, y, epsilon=epsilon)):
        yield float((ours - found).abs().max())


# ---- the Hessian


def hessian_differences(
    compare: Callable[[str, int, torch.device], Iterator[float]], quantity: str, cases: int, device: torch.device
) -> Largest:
    return largest(difference for seed in range(cases) for difference in compare(quantity, seed, device))


def row(what: str, oracle: str, compare: Callable[..., Largest], *given: Any, **settings: Any) -> Row:
    return Row(what, oracle, oracle, partial(compare, *given, **settings))


ROWS = [
    row("ece, 1 bin", "torchmetrics", measure_differences, metrics.ece, their_ece, bins=1),
    row("ece, 7 bins", "torchmetrics", measure_differences, metrics.ece, their_ece, bins=7),
    row("ece, 15 bins", "torchmetrics", measure_differences, metrics.ece, their_ece, bins=15),
    row("error", "torchmetrics", measure_differences, metrics.error, their_error),
    row("brier", "torchmetrics", measure_differences, metrics.brier, their_brier),
    row("fgsm, linf", "foolbox", attack_differences, "fgsm", "linf"),
    row("fgsm, l2", "foolbox", attack_differences, "fgsm", "l2"),
    row("pgd, linf", "foolbox", attack_differences, "pgd", "linf"),
    row("pgd, l2", "foolbox", attack_differences, "pgd", "l2"),
    row("Hessian products", "curvlinops", hessian_differences, from_curvlinops, "products"),
    row("top 5 eigenvalues", "curvlinops", hessian_differences, from_curvlinops, "eigenvalues"),
    row("trace, Hutch++", "curvlinops", hessian_differences, from_curvlinops, "trace"),
    row("quadrature", "curvlinops", hessian_differences, from_curvlinops, "quadrature"),
    row("Hessian products", "pyhessian", hessian_differences, from_pyhessian, "products"),
    row("top eigenvalue", "pyhessian", hessian_differences, from_pyhessian, "eigenvalue"),
    row("quadrature", "pyhessian", hessian_differences, from_pyhessian, "quadrature"),
    Row("top 5 eigenvalues", "dense Hessian", None, partial(hessian_differences, from_dense, "eigenvalues")),
    Row("trace", "dense Hessian", None, partial(hessian_differences, from_dense, "trace")),
]


def measure(cases: int, device: torch.device) -> dict[str, Any]:
    rows = []
    for row in ROWS:
        found: dict[str, Any] = {"what": row.what, "oracle": row.oracle}
        if row.package is not None and find_spec(row.package) is None:
            rows.append({**found, "skipped": f"{row.package} is not installed here"})
        else:
            difference, comparisons = row.compare(cases, device)
            rows.append({**found, "largest_difference": difference, "comparisons": comparisons})
    return {"cases": cases, "rows": rows, **facts(device)}


def show(result: dict[str, Any]) -> None:
    print(line(result), end="\n\n")
    print(f"{'':20}{'oracle':30}{'largest difference':>20}{'comparisons':>13}")
    for row in result["rows"]:
        if "skipped" in row:
            found = f"   left out: {row['skipped']}"
        else:
            found = f"{row['largest_difference']:20.1e}{row['comparisons']:13}"
        print(f"{row['what']:20}{row['oracle']:30}{found}")


if __name__ == "__main__":
    command(__doc__, measure, show, counted="cases", default=20, json_file="out/oracles.json")
