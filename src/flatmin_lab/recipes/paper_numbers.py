"""What the paper reports, number by number: mean and standard deviation over ten runs of 200 epochs.

Zheng, Zhang and Mao, "Regularizing Neural Networks via Adversarial Model Perturbation", CVPR 2021. Errors and ECE in
per cent, as printed. The paper shows the ECE in figure 7, without numbers or standard deviations: these are from the
authors' slides. Figures 8 and 11 have no numbers either: these were read off the curves.
"""

from functools import cache
from typing import NamedTuple

from flatmin_lab.data.augment.transforms import Kind
from flatmin_lab.recipes.protocols import kind_of

TRAINING_HOURS = {"erm": 2.4, "amp": 4.2}  # PreActResNet18 on CIFAR-10, 200 epochs, on a V100
COST_RATIO = 1.8  # AMP to ERM

# figure 8: the test NLL of CIFAR-10 over the radius ε, with N = 2 and ζ = 2, and ERM's
FIGURE_8 = {0.02: 0.1446, 0.04: 0.1269, 0.06: 0.1229, 0.08: 0.1290, 0.10: 0.1412, 0.12: 0.1617, 0.14: 0.1842}
FIGURE_8_ERM = 0.2346
# figure 11: the mean training loss of CIFAR-10 over the epochs from … to …; AMP's at θ + Δ
FIGURE_11 = (("erm", 61, 99, 0.1772), ("erm", 101, 110, 0.0290), ("amp", 181, 200, 0.040))

METHODS = ("erm", "dropout", "label_smoothing", "flooding", "mixup", "adversarial", "rmp", "amp")

# tables 1 and 3 (attacks) and figure 7 (ECE): data, model, what, and a number for each of METHODS
_ALL = """
svhn     preactresnet18 error 2.95±0.063 2.80±0.065 2.78±0.087 2.84±0.047 2.74±0.044 2.77±0.080 2.93±0.066 2.30±0.025
svhn     preactresnet18 nll 0.166±0.004 0.156±0.012 0.998±0.002 0.130±0.003 0.146±0.004 0.151±0.018 0.161±0.010 0.096±0.002
svhn     vgg16 error 3.14±0.060 2.96±0.049 3.07±0.070 3.15±0.085 3.09±0.057 2.94±0.091 3.19±0.052 2.73±0.015
svhn     vgg16 nll 0.140±0.027 0.134±0.027 1.004±0.002 0.128±0.003 0.160±0.003 0.122±0.003 0.134±0.004 0.116±0.006
cifar10  preactresnet18 error 5.02±0.212 4.86±0.148 4.85±0.115 4.97±0.082 4.09±0.117 4.99±0.085 4.97±0.167 3.97±0.091
cifar10  preactresnet18 nll 0.239±0.009 0.223±0.009 1.038±0.003 0.166±0.003 0.198±0.004 0.247±0.006 0.239±0.008 0.129±0.003
cifar10  vgg16 error 6.32±0.193 6.22±0.147 6.29±0.158 6.26±0.145 5.48±0.112 6.49±0.130 6.30±0.109 5.65±0.147
cifar10  vgg16 nll 0.361±0.012 0.314±0.009 1.076±0.003 0.234±0.005 0.251±0.003 0.380±0.010 0.363±0.010 0.207±0.005
cifar100 preactresnet18 error 24.31±0.303 24.48±0.351 22.07±0.256 24.50±0.234 21.78±0.210 25.23±0.229 24.28±0.138 21.51±0.308
cifar100 preactresnet18 nll 1.056±0.013 1.110±0.021 2.099±0.005 0.950±0.011 0.910±0.007 1.110±0.012 1.059±0.011 0.774±0.016
cifar100 vgg16 error 27.84±0.297 27.72±0.337 27.49±0.179 27.93±0.271 26.81±0.254 29.12±0.145 27.81±0.327 25.60±0.168
cifar100 vgg16 nll 1.827±0.209 1.605±0.062 2.310±0.005 1.221±0.037 1.136±0.013 1.535±0.389 1.873±0.035 1.049±0.049
svhn     preactresnet18 fgsm_error 23.41±0.569 22.36±0.591 17.74±1.674 17.40±0.656 19.95±0.637 14.33±0.200 23.73±0.965 16.82±1.561
cifar10  preactresnet18 fgsm_error 36.06±1.908 34.13±0.844 23.24±0.427 36.42±1.303 25.82±0.384 18.58±0.304 35.40±0.572 28.61±0.359
cifar100 preactresnet18 fgsm_error 68.78±0.699 64.70±0.549 57.30±0.410 68.45±0.407 65.90±0.498 48.51±0.260 68.52±0.515 59.04±1.325
svhn     preactresnet18 pgd_error 45.17±1.085 41.76±1.346 32.55±2.005 33.50±1.707 75.75±2.129 20.20±0.409 44.74±0.960 25.15±1.942
cifar10  preactresnet18 pgd_error 58.88±2.296 55.21±1.088 34.93±0.443 60.32±1.393 62.77±1.018 21.46±0.373 58.06±0.650 49.72±0.785
cifar100 preactresnet18 pgd_error 85.46±0.770 78.46±1.081 65.31±0.700 84.66±0.285 89.58±0.596 51.72±0.327 84.80±0.488 73.95±2.608
svhn     preactresnet18 ece 2.04 1.86 18.94 1.09 4.47 1.78 1.93 0.52
cifar10  preactresnet18 ece 3.36 3.24 17.62 0.85 5.49 3.41 3.35 1.25
cifar100 preactresnet18 ece 10.97 12.08 18.51 7.09 8.83 11.06 10.81 3.92
"""
# table 2: data, model, and the errors of ERM and AMP with vanilla augmentation, Cutout and AutoAugment
_AUGMENTED = """
svhn     wideresnet28_10   2.57±0.067 2.19±0.036 2.27±0.085 1.83±0.018 1.91±0.059 1.61±0.024
svhn     pyramidnet164_270 2.47±0.034 2.11±0.041 2.19±0.021 1.82±0.023 1.80±0.044 1.35±0.056
cifar10  wideresnet28_10   3.87±0.167 3.00±0.059 3.38±0.081 2.67±0.043 2.78±0.134 2.32±0.097
cifar10  pyramidnet164_270 3.60±0.197 2.75±0.040 2.83±0.102 2.27±0.034 2.49±0.128 1.98±0.062
cifar100 wideresnet28_10   19.17±0.270 17.33±0.110 18.12±0.114 16.04±0.071 17.79±0.185 14.95±0.088
cifar100 pyramidnet164_270 17.13±0.210 15.09±0.092 16.45±0.136 14.34±0.153 15.43±0.269 13.36±0.245
"""


class Value(NamedTuple):
    mean: float
    std: float | None = None


def reported(data: str, model: str, method: str, augment: Kind = "vanilla") -> dict[str, Value]:
    """What the paper has for a cell of its tables: error, nll, ece, fgsm_error and pgd_error, if it has them.

    >>> reported("cifar10", "preactresnet18", "amp")["error"]
    Value(mean=3.97, std=0.091)
    """
    return _tables().get((data, model, kind_of(augment), method), {})


@cache
def _tables() -> dict[tuple[str, str, str, str], dict[str, Value]]:
    found: dict[tuple[str, str, str, str], dict[str, Value]] = {}
    for line in _ALL.strip().splitlines():
        data, model, what, *printed = line.split()
        for method, text in zip(METHODS, printed, strict=True):
            found.setdefault((data, model, "vanilla", method), {})[what] = _value(text)
    columns = [(augment, method) for augment in ("vanilla", "cutout", "autoaugment") for method in ("erm", "amp")]
    for line in _AUGMENTED.strip().splitlines():
        data, model, *printed = line.split()
        for (augment, method), text in zip(columns, printed, strict=True):
            found[data, model, augment, method] = {"error": _value(text)}
    return found


def _value(text: str) -> Value:
    mean, _, std = text.partition("±")
    return Value(float(mean), float(std) if std else None)
