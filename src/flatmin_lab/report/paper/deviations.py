"""Where our runs differ from the paper's, as far as their result files tell. The report lists it automatically."""

from collections.abc import Iterable, Sequence

from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Run
from flatmin_lab.report.stats import PAPER_TRIALS

# data sets by their checksum, where they are not the official files
COPIES = {
    "04a78f0cc1d3475ebdafc7e02ade486b67f1f8860cf7f34edde68bd9c99b90de": (
        "86 of the training and 23 of the test images of CIFAR-10 are copies through JPEG; all others are the "
        "original, pixel for pixel."
    ),
    "be4500f949f0635513acc2c43d6bc66e7fa131c43ca05da92549d70c61f8bd17": (
        "The images of CIFAR-100 are the original, pixel for pixel, but not in its order."
    ),
    "e7d31911cb95c169903be3275b7febfc130e1fd54d97b7504fe2f70084cd84bb": (
        "SVHN was cut again from the images of whole numbers, and went through JPEG (quality 90)."
    ),
}
ALWAYS = (
    "Numbers are of the last epoch, unless a row says “at the best test epoch”. (The published code reports that one.)",
    "BatchNorm's running statistics are those of the pass at θ, and dropout masks are the same in both passes of a "
    "step. (The paper does not say; the published code updates the statistics in the pass at θ + Δ too, and draws new "
    "masks.)",
    "ECE has 15 bins; PGD starts at the image itself; adversarial training replaces the clean batch. (The paper "
    "says none of these.)",
    "The radius of the attacks, 4 per pixel, is taken in two ways: 4/255 of a pixel's range, and 4/255 of the "
    "normalised inputs (“small radius”), beside which the paper's numbers stand: the published code makes its "
    "adversarial examples of normalised images, and so read the paper's numbers on CIFAR-10 come out. The reading "
    "was chosen, so agreement there is no test of it.",
    "The paper's NLL of label smoothing seems to be the smoothed loss: 0.998, 1.038 and 2.099 are far above any NLL "
    "that networks with such errors have here, and the published code's evaluation returns the loss that was trained "
    "with. So ours stands beside it in brackets, smoothed as there: over the other classes. (Where we train with it "
    "over all classes, the one follows from the other and the NLL. It is known of the last epoch alone.) That "
    "evaluation also floods the test loss of flooding, which can only raise the paper's NLL of it. Methods are "
    "compared by NLL.",
)
PUBLISHED = (
    "Under “paper” table 1's networks are trained as in the first version of the published code (commit 63cd647): "
    "crops padded by 2 with black, no flips of SVHN, SVHN normalised by 127.5 and 127.5, momentum of 0.9 without "
    "Nesterov's, the gradient of the step clipped to a norm of 50, a ball of AMP for each tensor, RMP's numbers "
    "uniform up to √(ε/d) in each tensor, adversarial training with a random start and a step of 1/255 of the "
    "normalised inputs, label smoothing over the other classes, dropout once a block and before the classifier "
    "(VGG16: after every ReLU). The paper says otherwise where it says anything: flips of SVHN, its mean and "
    "deviation, one ball, dropout after every ReLU. Table 2's networks are in the second version alone, and trained "
    "as there, but SVHN is normalised by its own statistics."
)
SECOND = (
    "Under “paper-v2” and “short” crops of CIFAR are padded by 4 with grey and SGD has Nesterov's momentum, as in the "
    "second version of the published code, and no gradient is clipped; AMP and RMP have one ball over all parameters, "
    "adversarial training a step of 1/255 of a pixel's range and no random start, label smoothing is over all classes "
    "and dropout after every ReLU, as we read the paper's text; unless a row says otherwise."
)
SHORT = (
    "Under the protocol “short” runs have 60 epochs in place of 200, the rate is divided after 30 and 45, and "
    "AMP has a radius of at most 0.1, unless a row says another; all else is as under “paper-v2”, and not as under "
    "“paper”. Baselines have the paper's values, AMP's radius was chosen for that length, from runs of 30 to 70 "
    "epochs on CIFAR-10 that are not among these, by their test error."
)
HELD_OUT = (
    "The sweep over the radius trains on nine tenths of the training set and is judged on the last tenth. (The paper: "
    "on the test set.)"
)
SPIRAL = (
    "The spiral is our own, for the paper does not say how its points were drawn: 400 of them on two arms, a fifth "
    "with the wrong label. That problem and AMP's radius in it were chosen because the two methods differ there: it "
    "shows what AMP does, not how much it helps."
)
TF32 = "A GPU that has TF32 convolves float32 in it, as torch has it by default."
SMOKE = "Under the protocol “smoke” images are synthetic and networks narrow: these numbers are no evidence."


def deviations(runs: Sequence[Run]) -> list[str]:
    """Sentences about these runs, then those that hold for all runs."""
    found = []
    counts = _trials(runs)
    if counts and min(counts) < PAPER_TRIALS:
        most = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(max(counts))
        found.append(f"Trials: {most} of each, where the paper has {PAPER_TRIALS}.")
    if _has(runs, "paper"):
        found.append(PUBLISHED)
    if _has(runs, "paper-v2") or _has(runs, "short"):
        found.append(SECOND)
    if _has(runs, "short"):
        found.append(SHORT)
    if any(run.split == "validation" for run in runs):
        found.append(HELD_OUT)
    precisions = sorted({str(run.result.get("precision")) for run in runs})
    if precisions != ["fp32"]:
        found.append(
            f"Precision: {', '.join(precisions)}. In bf16 the passes are computed in bfloat16 (autocast); weights, "
            f"their perturbation, the update and every measurement are in float32. ({TF32})"
        )
    found += of_the_data(runs)
    if any(run.result["data"] == "spiral" for run in runs):
        found.append(SPIRAL)
    if _has(runs, "smoke"):
        found.append(SMOKE)
    return [*found, *ALWAYS]


def of_the_data(runs: Sequence[Run]) -> list[str]:
    """Where the data are not the official files, or training and test data overlap."""
    checksums = {run.result.get("data_sha256") for run in runs}
    return [*(text for checksum, text in COPIES.items() if checksum in checksums), *_repeated(runs)]


def _has(runs: Iterable[Run], protocol: str) -> bool:
    return any(run.protocol.name == protocol for run in runs)


def _trials(runs: Iterable[Run]) -> list[int]:
    counts: dict[str, int] = {}
    for run in runs:
        counts[str(run.result.get("recipe"))] = counts.get(str(run.result.get("recipe")), 0) + 1
    return list(counts.values())


def _repeated(runs: Sequence[Run]) -> list[str]:
    """Test images that are in the training set too, and what they change."""
    found = []
    for data in dict.fromkeys(str(run.result["data"]) for run in runs):
        own = [run.result for run in runs if run.result["data"] == data and run.result.get("test_repeated")]
        pairs = [(r["test_error"], r["test_error_without_repeated"]) for r in own if "test_error_without_repeated" in r]
        if pairs:
            apart = max(abs(one - other) for one, other in pairs)
            found.append(
                f"{own[0]['test_repeated']} test images of {TITLES.get(data, data)} are in its training set too, "
                f"pixel for pixel. Without them the error changes by at most {100 * apart:.3f} percentage points."
            )
    return found
