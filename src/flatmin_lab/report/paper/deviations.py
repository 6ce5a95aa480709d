"""Where our runs differ from the paper's, as far as their result files tell. The report lists it automatically."""

from collections.abc import Iterable, Sequence

from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Run
from flatmin_lab.report.stats import PAPER_TRIALS

# data sets by their checksum, where they are not the official files
COPIES = {
    "04a78f0cc1d3475ebdafc7e02ade486b67f1f8860cf7f34edde68bd9c99b90de": (
        "86 training and 23 test images of CIFAR-10 are JPEG copies; all others are identical to the original, pixel "
        "for pixel."
    ),
    "be4500f949f0635513acc2c43d6bc66e7fa131c43ca05da92549d70c61f8bd17": (
        "The images of CIFAR-100 are identical to the original, pixel for pixel, but in a different order."
    ),
    "e7d31911cb95c169903be3275b7febfc130e1fd54d97b7504fe2f70084cd84bb": (
        "SVHN was cropped anew from the images of whole house numbers, and compressed with JPEG (quality 90)."
    ),
}
ALWAYS = (
    "Numbers are from the last epoch, unless a row says “at the best test epoch”, which the published code reports.",
    "BatchNorm's running statistics are updated only in the pass at θ, and both passes of a step use the same dropout "
    "masks. (The paper does not say; the published code updates the statistics in both passes, and draws new masks.)",
    "ECE has 15 bins; PGD starts at the image itself; adversarial training replaces the clean batch. (The paper "
    "specifies none of these.)",
    "The radius of the attacks, 4 per pixel, is read in two ways: as 4/255 of the pixel range, and as 4/255 in units "
    "of the normalised inputs (“small radius”). The paper's numbers are shown beside the latter, because the published "
    "code attacks normalised images, and because this reading reproduces the paper's numbers on CIFAR-10. The first "
    "runs under “paper-v2” decided this, so their agreement proves nothing; that of later runs is evidence.",
    "The paper's NLL of label smoothing seems to be the smoothed loss: 0.998, 1.038 and 2.099 are far above any NLL "
    "that networks with such errors have here, and the published code evaluates with the training loss. So our "
    "smoothed loss is shown beside it in brackets, smoothed over the other classes as in that code. (Where we trained "
    "with smoothing over all classes, it is computed from that loss and the NLL; it is known only for the last epoch.) "
    "The same code also floods the test loss of flooding, which can only raise its NLL in the paper. Methods are "
    "compared by their NLL.",
)
PUBLISHED = (
    "Under “paper”, table 1's networks are trained as in the first version of the published code (commit 63cd647): "
    "crops padded with 2 black pixels, no flips on SVHN, SVHN normalised by 127.5 and 127.5, momentum 0.9 without "
    "Nesterov, the gradient of the update clipped to a norm of 50, one ball per tensor for AMP, RMP's entries uniform "
    "up to √(ε/d) in each tensor, adversarial training with a random start and a step of 1/255 in units of the "
    "normalised inputs, label smoothing over the other classes, dropout once per block and before the classifier "
    "(VGG16: after every ReLU). Where the paper says anything about these, it differs: flips on SVHN, its mean and "
    "standard deviation, one ball, dropout after every ReLU. Table 2's networks exist only in the second version and "
    "are trained as there, except that SVHN is normalised by its own statistics."
)
SECOND = (
    "Unless a row says otherwise, under “paper-v2” and “short” CIFAR's crops are padded with 4 grey pixels and SGD "
    "uses Nesterov momentum, as in the second version of the published code, and no gradient is clipped. As we read "
    "the paper's text, AMP and RMP have one ball over all parameters, adversarial training takes a step of 1/255 of "
    "the pixel range without a random start, label smoothing covers all classes, and dropout follows every ReLU."
)
SHORT = (
    "Under the protocol “short”, runs have 60 epochs instead of 200, the learning rate is divided by ten after epochs "
    "30 and 45, and AMP's radius is at most 0.1, unless a row says otherwise; everything else is as under “paper-v2”, "
    "not “paper”. The baselines use the paper's settings. AMP's radius was chosen for this length, by the test error "
    "of runs of 30 to 70 epochs on CIFAR-10 that are not among these."
)
HELD_OUT = (
    "The sweep over the radius trains on nine tenths of the training set and is evaluated on the remaining tenth. (The "
    "paper: on the test set.)"
)
SPIRAL = (
    "The spiral is our own, because the paper does not say how its points were drawn: 400 points on two arms, a fifth "
    "of them with the wrong label. The problem and AMP's radius were chosen because the two methods differ there: it "
    "shows what AMP does, not how much it helps."
)
TF32 = "On a GPU with TF32, float32 convolutions use it, which is torch's default."
SMOKE = "Under the protocol “smoke”, the images are synthetic and the networks narrow: these numbers are not evidence."


def deviations(runs: Sequence[Run]) -> list[str]:
    """Sentences about these runs, then those that apply to all runs."""
    found = []
    counts = _trials(runs)
    if counts and min(counts) < PAPER_TRIALS:
        most = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(max(counts))
        found.append(f"Trials: {most} of each; the paper has {PAPER_TRIALS}.")
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
            f"Precision: {', '.join(precisions)}. In bf16, the passes are computed in bfloat16 (autocast); weights, "
            f"their perturbation, the update and every measurement are in float32. ({TF32})"
        )
    found += of_the_data(runs)
    if any(run.result["data"] == "spiral" for run in runs):
        found.append(SPIRAL)
    if _has(runs, "smoke"):
        found.append(SMOKE)
    return [*found, *ALWAYS]


def of_the_data(runs: Sequence[Run]) -> list[str]:
    """Where the data is not from the official files, or training and test data overlap."""
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
    """Test images that are also in the training set, and the difference they make."""
    found = []
    for data in dict.fromkeys(str(run.result["data"]) for run in runs):
        own = [run.result for run in runs if run.result["data"] == data and run.result.get("test_repeated")]
        pairs = [(r["test_error"], r["test_error_without_repeated"]) for r in own if "test_error_without_repeated" in r]
        if pairs:
            apart = max(abs(one - other) for one, other in pairs)
            found.append(
                f"{own[0]['test_repeated']} test images of {TITLES.get(data, data)} are also in its training set, "
                f"pixel for pixel. Without them the error changes by at most {100 * apart:.3f} percentage points."
            )
    return found
