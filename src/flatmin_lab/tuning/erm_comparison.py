"""Is the chosen trial better than ERM? A paired test over the validation images that allows for the choice of the best.

All trials share the seed and the n validation images. With ℓᵢ the error (0 or 1) or the NLL of image i, and trial j:

    dᵢⱼ = ℓᵢ(ERM) − ℓᵢ(j)        gainⱼ = Σᵢ dᵢⱼ / n        zⱼ = Σᵢ dᵢⱼ / √Σᵢ dᵢⱼ²

If a trial were no better, it and ERM could be swapped on any image: dᵢⱼ would be as likely as −dᵢⱼ. So random signs
sᵢ, the same for all trials, show what chance alone does. The best of m was chosen on these very images, which makes its
gain optimistic; so it must exceed what the best of m reaches by chance (Westfall and Young 1993):

    z* = maxⱼ Σᵢ sᵢ dᵢⱼ / √Σᵢ dᵢⱼ²     the chosen trial is better where z exceeds all but 5 % of z*

With one trial and errors this is McNemar's test. Trials without scores of each image, such as pruned ones, were part of
the choice too: the 5 % are shared with them (Bonferroni).

It compares two trained networks, not two methods: another seed gives two others. Nor does it know that later trials
are drawn near good earlier ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL = 0.05  # how often a trial that is no better may be taken for better
SIGN_DRAWS = 4999
DRAWS_AT_ONCE = 100  # bounds the memory: 40 MB for 50 000 images


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the chosen trial gains over ERM, and what chance alone would show as a gain, in all but 5 % of cases."""

    trial: int  # the number of the chosen one
    gain: float
    chance: float
    images: int
    trials: int  # that it was chosen from

    @property
    def is_better(self) -> bool:
        return self.gain > self.chance


def compare(erm: Tensor, scores: Mapping[int, Tensor], *, chosen: int, others: int = 0) -> Comparison:
    """The chosen trial against ERM, by the scores of each image; `others` is the number of trials without scores.

    >>> erm, amp = torch.tensor([1.0] * 9 + [0.0] * 91), torch.zeros(100)
    >>> compare(erm, {1: amp}, chosen=1).is_better                        # nine images of a hundred, and none lost
    True
    >>> compare(erm, {1: amp}, chosen=1, others=99).is_better             # the best of a hundred trials
    False
    """
    better = torch.stack([erm.double() - one.double() for one in scores.values()], dim=1)  # dᵢⱼ
    lengths = better.square().sum(dim=0).sqrt()
    units = better / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
    count = len(scores) + others
    above = max(int(LEVEL * len(scores) / count * (SIGN_DRAWS + 1)), 1)  # how many z* may be as large as z
    z = torch.cat([(signs @ units).amax(dim=1) for signs in _signs(len(erm))]).sort(descending=True).values[above - 1]
    column = list(scores).index(chosen)
    return Comparison(
        trial=chosen,
        gain=float(better[:, column].mean()),
        chance=float(z * lengths[column]) / len(erm) * (1 + 1e-9),  # a tie is chance, also after rounding
        images=len(erm),
        trials=count,
    )


def _signs(images: int) -> Iterable[Tensor]:
    random = torch.Generator().manual_seed(0)  # the same scores give the same answer
    for start in range(0, SIGN_DRAWS, DRAWS_AT_ONCE):
        shape = (min(DRAWS_AT_ONCE, SIGN_DRAWS - start), images)
        yield torch.randint(2, shape, generator=random).double() * 2 - 1
