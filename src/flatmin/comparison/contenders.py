"""What is compared: the plain optimizer, the same for as long as AMP takes, and AMP at a few radii.

A step of AMP takes two passes, so AMP must also beat the plain optimizer trained twice as long. Time is counted in
passes: seconds depend on what else the machine is doing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PLAIN, LONGER, AUTO = "plain", "plain-longer", "amp-auto"
RADII = (0.03, 0.1, 0.3)  # half a decade apart: the best one differs from problem to problem, seldom by less
SPREAD = 3.0  # the ratio of the radii around one that the user has chosen
PASSES = 2  # per AMP step with one ascent step


@dataclass(frozen=True)
class Contender:
    """One way to train."""

    key: str
    name: str  # in tables and sentences
    epsilon: float | None = None  # AMP's radius; None: plain, or a radius found while training
    length: float = 1.0  # of a run, relative to a plain one
    passes: float = 1.0  # of a whole run, likewise

    @property
    def is_plain(self) -> bool:
        return self.key in (PLAIN, LONGER)


def contenders_for(
    radii: Sequence[float] | None = None, *, own: float | None = None, auto: bool = False, passes: float = PASSES
) -> list[Contender]:
    """The plain optimizer, the same for as long as AMP takes, and AMP at these radii.

    own      the radius of the user's AMP: by default `radii` are around it
    auto     also AMP with a radius found while training
    passes   per AMP step

    >>> [contender.name for contender in contenders_for([0.1], auto=True)]
    ['plain', 'plain, 2 times as long', 'AMP, ε = 0.1', 'AMP, ε found while training']
    """
    if radii is None:
        radii = RADII if own is None else (own / SPREAD, own, own * SPREAD)
    for radius in radii:
        if isinstance(radius, bool) or not isinstance(radius, int | float) or not 0 < radius < math.inf:
            raise ValueError(f"a radius must be a finite number above 0, got {radius!r}; ε = 0 is always compared")
    if len({_key(radius) for radius in radii}) < len(radii):
        raise ValueError(f"the radii must differ, got {', '.join(map(str, radii))}")
    found = [
        Contender(PLAIN, "plain"),
        Contender(LONGER, f"plain, {passes:g} times as long", length=float(passes), passes=float(passes)),
    ]
    found += [Contender(_key(r), f"AMP, ε = {r:.4g}", float(r), passes=float(passes)) for r in radii]
    if auto:
        found.append(Contender(AUTO, "AMP, ε found while training", passes=float(passes)))
    if len(found) == 2:
        raise ValueError("a comparison needs at least one radius of AMP, got none")
    return found


def _key(radius: float) -> str:
    return f"amp-{radius:.4g}"
