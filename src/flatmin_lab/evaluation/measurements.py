"""Every measurement of a trained classifier, as plain numbers: error and calibration, robustness, flatness.

Error, NLL and the other scores are for the test set (in a tuning run: the held-out tenth), with bootstrap intervals.
Attacks move the pixels of the same images. Flatness is that of the training loss, without augmentation, within radius
ε; the rise on batches is for augmented training images and for test images, in train mode, as training sees them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatmin import attacks, flatness, metrics
from flatmin.ball import NORMS, Norm
from flatmin.flatness.minibatch_sharpness import Scale
from flatmin_lab.data.augment.transforms import Augmentation
from flatmin_lab.data.batches import Batches
from flatmin_lab.evaluation.confidence import BOOTSTRAP_SAMPLES, CONFIDENCE_LEVEL, risk_over_coverage
from flatmin_lab.evaluation.subject import Subject
from flatmin_lab.system.json_data import number, numbers
from flatmin_lab.training import evaluation
from flatmin_lab.training.evaluation import logits_of, reliability_bins

MEASURES = {**evaluation.MEASURES, "adaptive_ece": metrics.adaptive_ece, "brier": metrics.brier}
MEAN_MEASURES = (
    "error",
    "nll",
    "brier",
)  # means over examples; a resampled ECE, never below 0, is biased upwards
ATTACK_RADIUS, ATTACK_STEPS = 4 / 255, 10  # the paper's attacks
RISE_RADII: dict[Scale, tuple[float, ...]] = {
    "filter": (0.005, 0.01, 0.02, 0.05, 0.1),  # shares of a filter's length
    "global": (0.05, 0.1, 0.2, 0.5),  # AMP's ε
}
FLATNESS_EPSILON, FLATNESS_IMAGES = 0.1, 1000  # the ball's radius, and training images for the loss
SPECTRUM_STEPS, SPECTRUM_PROBES = 60, 4  # of Lanczos' method, and random vectors to start it from
ADAPTIVE_EPSILON = 0.5  # of the ball ‖Δ ⊘ |θ|‖ ≤ ε: ASAM's on CIFAR-10
NO_TEMPERATURE = 0.0011  # flatmin.metrics.temperature gives 0.001 if no prediction is wrong: nothing to fit
Say = Callable[[str], object]


def logits_on_test(subject: Subject) -> Tensor:
    """Of the test set, in order."""
    logits = logits_of(subject.model, subject.test, subject.normalise)
    assert logits is not None
    return logits


def calibration(subject: Subject, logits: Tensor | None = None) -> dict[str, Any]:
    """Error, NLL, ECE, adaptive ECE and Brier score; intervals of the means; reliability bins; temperature scaling.

    And the risk over coverage. `logits` are those of the test set, if they are known already.
    """
    logits, labels = logits_on_test(subject) if logits is None else logits, subject.test.y
    found: dict[str, Any] = {"split": subject.split_name, "pictures": len(labels), "kind": subject.kind}
    intervals = {}
    for name, measure in MEASURES.items():
        found[name] = number(measure(logits, labels))
        if name in MEAN_MEASURES:
            interval = metrics.bootstrap(measure, logits, labels, samples=BOOTSTRAP_SAMPLES, level=CONFIDENCE_LEVEL)
            intervals[name] = [number(interval.low), number(interval.high)]
    return {
        **found,
        "intervals": intervals,
        "reliability": reliability_bins(logits, labels),
        "scaled": temperature_scaled(logits, labels),
        "selective": risk_over_coverage(logits, labels),
    }


def temperature_scaled(logits: Tensor, labels: Tensor) -> dict[str, Any] | None:
    """NLL and ECE after temperature scaling. There is no validation set, so the test set is split in half at random.

    Each half is scaled by the temperature fitted on the other, so no label takes part in its own scaling. A half
    without an error has none (the lowest there is would make the other half far too confident): NLL and ECE are None.
    """
    if len(labels) < 4:
        return None
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(labels.device)
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    try:
        intervals = [
            metrics.temperature_interval(logits[half], labels[half], level=CONFIDENCE_LEVEL) for half in halves
        ]
    except ValueError:  # a label has probability 0 at every temperature
        return None
    fitted = [interval.value for interval in intervals]
    determined = min(map(float, fitted)) > NO_TEMPERATURE
    cooled = torch.cat([logits[half] / t for half, t in zip(halves, reversed(fitted), strict=True)])
    chosen = labels[torch.cat(halves)]
    return {
        "temperatures": [number(t) for t in fitted],
        "temperature_intervals": [[number(interval.low), number(interval.high)] for interval in intervals],
        "temperature_pictures": [len(half) for half in halves],  # that each was fitted on
        "nll": number(metrics.nll(cooled, chosen)) if determined else None,
        "ece": number(metrics.ece(cooled, chosen)) if determined else None,
    }


def default_step_size(radius: float, steps: int) -> float:
    """Of PGD: a quarter of the radius, which is the paper's 1/255, or more if that many steps would fall short of it.

    >>> default_step_size(4 / 255, 10) == 1 / 255, default_step_size(1.0, 2)
    (True, 0.5)
    """
    return radius / min(4, steps)


def check_attack(
    *,
    radius: float = ATTACK_RADIUS,
    step_size: float | None = None,
    steps: int = ATTACK_STEPS,
    norm: str = "linf",
    pixels: bool = False,
) -> None:
    """Raise where an attack makes no sense like this; `pixels`: it moves pixels, which range from 0 to 1."""
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; choose from {', '.join(NORMS)}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    length = default_step_size(radius, steps) if step_size is None else step_size
    if steps * length < radius * (1 - 1e-9):  # 45 steps of 7/11475 are 7/255, but for rounding
        raise ValueError(
            f"PGD must be able to reach the edge of its ball, got {steps} steps of {length:g} for a radius of "
            f"{radius:g}; take more steps, or longer ones"
        )
    if pixels and norm == "linf" and radius > 1:
        raise ValueError(f"pixels range from 0 to 1, so a radius is at most 1, got {radius:g}; 4/255 is the paper's")


def robustness(
    subject: Subject,
    *,
    radius: float = ATTACK_RADIUS,
    step_size: float | None = None,
    steps: int = ATTACK_STEPS,
    norm: Norm = "linf",
    normalised: bool = False,
    images: int | None = None,
    batch_size: int = 500,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """The error on images perturbed by FGSM and PGD, which know the model (white box).

    Radius and step (by default a quarter of the radius) are fractions of the pixel range. With `normalised` they are in
    units of the normalised inputs, about a quarter of that for CIFAR, and pixels may leave their range.
    """
    pixels = subject.test.is_images and not normalised
    check_attack(radius=radius, step_size=step_size, steps=steps, norm=norm, pixels=pixels)
    step_size = default_step_size(radius, steps) if step_size is None else step_size
    model = subject.model if normalised else subject.with_normalisation()
    split = subject.sample(subject.test, images)
    count = len(split)
    bounds = (0.0, 1.0) if pixels else (-math.inf, math.inf)
    wrong = dict.fromkeys(("clean", "fgsm", "pgd"), 0)
    for begin in range(0, count, batch_size):
        part = slice(begin, min(begin + batch_size, count))
        x, y = split.x[part].float() / (255 if split.is_images else 1), split.y[part]
        if normalised:
            x = subject.normalise(split.x[part])
        found = {
            "clean": x,
            "fgsm": attacks.fgsm(model, x, y, epsilon=radius, bounds=bounds, norm=norm),
            "pgd": attacks.pgd(model, x, y, epsilon=radius, step_size=step_size, steps=steps, bounds=bounds, norm=norm),
        }
        for name, moved in found.items():
            with torch.no_grad():
                wrong[name] += int((model(moved).argmax(dim=1) != y).sum())
        say(f"attacked {part.stop} of {count}")
    return {
        "pictures": count,
        "norm": norm,
        "radius": radius,
        "step_size": step_size,
        "steps": steps,
        **{f"{name}_error": count_wrong / count for name, count_wrong in wrong.items()},
    }


def flatness_of(
    subject: Subject,
    *,
    epsilon: float = FLATNESS_EPSILON,
    images: int | None = None,
    restarts: int = 4,
    with_trace: bool = True,
    radii: Sequence[float] = (),
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Gradient norm, sharpness, worst and mean loss in the ball, and the Hessian, all of the training loss.

    The search for the worst loss starts at the centre and at `restarts` random points; at the other `radii` it starts
    at the centre alone. Worst and mean are also those of the adaptive ball, which rescaled layers do not change. The
    trace takes the longest.
    """
    count = min(images or FLATNESS_IMAGES, len(subject.train))
    x, y = subject.inputs(subject.train, count)
    loss = flatness.empirical_risk(x, y, batch_size=250)
    model = subject.model
    say("worst-case loss")
    worst = flatness.worst_case_loss(model, loss, epsilon=epsilon, restarts=restarts)
    farther = {f"{radius:g}": flatness.worst_case_loss(model, loss, epsilon=radius, restarts=0) for radius in radii}
    say("mean loss")
    around = flatness.mean_loss(model, loss, epsilon=epsilon)
    say("adaptive worst-case and mean loss")
    adaptive_worst = flatness.worst_case_loss(model, loss, epsilon=ADAPTIVE_EPSILON, restarts=restarts, adaptive=True)
    adaptive_mean = flatness.mean_loss(model, loss, epsilon=ADAPTIVE_EPSILON, adaptive=True)
    say("sharpness")
    rise, slope = flatness.sharpness(model, loss, epsilon=epsilon), flatness.gradient_norm(model, loss)
    say("eigenvalues of the Hessian")
    eigenvalues = flatness.top_eigenvalues(model, loss, k=3)
    traced: dict[str, Any] = {}
    if with_trace:
        say("trace of the Hessian")
        trace = flatness.trace(model, loss)
        traced = {"trace": number(trace.value), "trace_error": number(trace.error)}
    return {
        "pictures": count,
        "epsilon": epsilon,
        "loss": number(worst.centre),
        "gradient_norm": number(slope),
        "sharpness": number(rise),
        "worst_case_loss": number(worst.loss),
        "worst_case_starts": [number(start) for start in worst.starts],
        "mean_loss": number(around.mean),
        "mean_loss_deviation": number(around.deviation),
        "adaptive_epsilon": ADAPTIVE_EPSILON,
        "adaptive_worst_case_loss": number(adaptive_worst.loss),
        "adaptive_mean_loss": number(adaptive_mean.mean),
        "adaptive_mean_loss_deviation": number(adaptive_mean.deviation),
        "eigenvalues": [number(value) for value in eigenvalues.values],
        "eigenvalue_errors": [number(error) for error in eigenvalues.errors],
        **({"worst_by_radius": {radius: number(found.loss) for radius, found in farther.items()}} if farther else {}),
        **traced,
    }


def spectrum_of(
    subject: Subject,
    *,
    images: int | None = None,
    steps: int = SPECTRUM_STEPS,
    probes: int = SPECTRUM_PROBES,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """All eigenvalues of the Hessian of the training loss: Ritz values and weights of each probe, and what they give.

    It takes probes × steps products with the Hessian, of two passes each.
    """
    count = min(images or FLATNESS_IMAGES, len(subject.train))
    x, y = subject.inputs(subject.train, count)
    found = flatness.spectrum(
        subject.model,
        flatness.empirical_risk(x, y, batch_size=250),
        steps=steps,
        probes=probes,
        progress=lambda n: say(f"spectrum of the Hessian, product {n} of {probes * steps}"),
    )
    return {
        "pictures": count,
        "parameters": found.dimension,
        "steps": steps,
        "products": found.products,
        "smallest": number(found.smallest),
        "largest": number(found.largest),
        "trace": number(found.trace),
        "trace_error": number(found.trace_error),
        "negative_curvature": number(found.negative_curvature),
        "values": numbers(list(map(Tensor.tolist, found.values))),
        "weights": numbers(list(map(Tensor.tolist, found.weights))),
    }


def rise_on_batches(subject: Subject, *, batches: int = 50, say: Say = lambda _: None) -> dict[str, Any]:
    """The mean rise of the loss along each mini-batch's own gradient, in train mode: what AMP sees during training.

    Batches have the size used in training. Those of the training set are augmented as in training, those of the other
    split are not. The same seed gives the same batches for every network of a data set.
    """
    found: dict[str, Any] = {"batches": batches, "batch_size": subject.batch_size}
    for name, split in subject.splits().items():
        augment = subject.augment if split is subject.train else Augmentation()
        size = min(subject.batch_size, len(split))
        made = Batches(split=split, batch_size=size, normalise=subject.normalise, augment=augment, seed=0)
        taken = [batch for batch in itertools.islice(made.epoch(0), batches) if len(batch[0]) == size]
        found[name] = {"batches": len(taken)}
        for scale, radii in RISE_RADII.items():
            say(f"rise on batches of {name} images, {scale}")
            rise = flatness.batch_rise(subject.model, taken, radii=radii, scale=scale)
            found[name]["loss"] = number(rise.losses.mean())
            found[name][scale] = {f"{r:g}": number(value) for r, value in zip(radii, rise.mean, strict=True)}
    return found
