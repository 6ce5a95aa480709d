"""The policies that AutoAugment found: 25 pairs of operations for CIFAR-10 and 25 for SVHN.

A policy is a list of sub-policies; every image draws one of them. A sub-policy is two operations that follow each
other, each with the probability that it is applied and a level from 0 to 9. What the level means depends on the
operation (`flatmin_lab.data.augment.operations`): an angle, a shift, a factor, or nothing.

The tables are facts of Cubuk et al., AutoAugment (CVPR 2019), tables 7 and 9, as the published AMP code has them. The
CIFAR-10 policy serves CIFAR-100 too.
"""

from typing import NamedTuple


class Operation(NamedTuple):
    """One half of a sub-policy."""

    name: str
    probability: float
    level: int


SubPolicy = tuple[Operation, Operation]


def _policy(text: str) -> tuple[SubPolicy, ...]:
    """One line per sub-policy: operation, probability in tenths, level, and the same again."""

    def pair(line: str) -> SubPolicy:
        first, p, level, second, q, strength = line.split()
        return Operation(first, int(p) / 10, int(level)), Operation(second, int(q) / 10, int(strength))

    return tuple(pair(line) for line in text.strip().splitlines())


CIFAR10 = _policy("""
    invert       1 7   contrast     2 6
    rotate       7 2   translate_x  3 9
    sharpness    8 1   sharpness    9 3
    shear_y      5 8   translate_y  7 9
    autocontrast 5 8   equalize     9 2
    shear_y      2 7   posterize    3 7
    color        4 3   brightness   6 7
    sharpness    3 9   brightness   7 9
    equalize     6 5   equalize     5 1
    contrast     6 7   sharpness    6 5
    color        7 7   translate_x  5 8
    equalize     3 7   autocontrast 4 8
    translate_y  4 3   sharpness    2 6
    brightness   9 6   color        2 8
    solarize     5 2   invert       0 3
    equalize     2 0   autocontrast 6 0
    equalize     2 8   equalize     6 4
    color        9 9   equalize     6 6
    autocontrast 8 4   solarize     2 8
    brightness   1 3   color        7 0
    solarize     4 5   autocontrast 9 3
    translate_y  9 9   translate_y  7 9
    autocontrast 9 2   solarize     8 3
    equalize     8 8   invert       1 3
    translate_y  7 9   autocontrast 9 1
""")

SVHN = _policy("""
    shear_x      9 4   invert       2 3
    shear_y      9 8   invert       7 5
    equalize     6 5   solarize     6 6
    invert       9 3   equalize     6 3
    equalize     6 1   rotate       9 3
    shear_x      9 4   autocontrast 8 3
    shear_y      9 8   invert       4 5
    shear_y      9 5   solarize     2 6
    invert       9 6   autocontrast 8 1
    equalize     6 3   rotate       9 3
    shear_x      9 4   solarize     3 3
    shear_y      8 8   invert       7 4
    equalize     9 5   translate_y  6 6
    invert       9 4   equalize     6 7
    contrast     3 3   rotate       8 4
    invert       8 5   translate_y  0 2
    shear_y      7 6   solarize     4 8
    invert       6 4   rotate       8 4
    shear_y      3 7   translate_x  9 3
    shear_x      1 6   invert       6 5
    solarize     7 2   translate_y  6 7
    shear_y      8 4   invert       8 8
    shear_x      7 9   translate_y  8 3
    shear_y      8 5   autocontrast 7 3
    shear_x      7 2   invert       1 5
""")

POLICIES: dict[str, tuple[SubPolicy, ...]] = {"cifar10": CIFAR10, "svhn": SVHN}
