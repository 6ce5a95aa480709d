"""Two spiral arms in the plane, as in the paper's figure of a decision boundary: points, not images.

A share of the training labels can be flipped, so that memorising them shows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatmin_lab.data.dataset import Dataset, Split
from flatmin_lab.system.rng import generator as seeded


@dataclass(frozen=True)
class Spiral:
    x: Tensor
    y: Tensor
    wrong: Tensor  # which labels were flipped

    @staticmethod
    def draw(n: int, *, wrong: float, generator: torch.Generator) -> "Spiral":
        """Points on two arms of one turn each, with noise in their positions and labels."""
        if not 0 <= wrong <= 1:
            raise ValueError(f"the share of wrong labels must be between 0 and 1, got {wrong}")
        angle = torch.rand(n, generator=generator, dtype=torch.float32).sqrt() * 2 * math.pi
        arm = torch.randint(0, 2, (n,), generator=generator)
        radius, turned = angle / (2 * math.pi), angle + math.pi * arm.float()
        x = radius[:, None] * torch.stack([turned.cos(), turned.sin()], dim=1)
        flipped = torch.rand(n, generator=generator, dtype=torch.float32) < wrong
        return Spiral(x + 0.03 * torch.randn(n, 2, generator=generator, dtype=torch.float32), arm ^ flipped, flipped)


TRAIN_POINTS, WRONG_SHARE = 400, 0.2


def training_points() -> Spiral:
    """The training points of the data set, and which of their labels are wrong."""
    return Spiral.draw(TRAIN_POINTS, wrong=WRONG_SHARE, generator=seeded("spiral", 0))


def load(*, train: int = TRAIN_POINTS, test: int = 10_000, wrong: float = WRONG_SHARE, seed: int = 0) -> Dataset:
    """400 training points, a fifth of them with a wrong label, and 10,000 test points with correct labels."""
    generator = seeded("spiral", seed)
    drawn, clean = Spiral.draw(train, wrong=wrong, generator=generator), Spiral.draw(test, wrong=0, generator=generator)
    return Dataset("spiral", Split(drawn.x, drawn.y), Split(clean.x, clean.y), ["first arm", "second arm"], "generated")
