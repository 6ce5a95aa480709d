"""Images for the tests: photographs in miniature, noise, and the hard cases of every histogram."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def various(*, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """30 uint8 images (N, 3, H, W): smooth ones, noise, few grey levels, a dark one, one colour, black, white."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(14, 3, 5, 5, generator=generator)
    smooth = interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    shape = (3, height, width)
    noise = torch.randint(0, 256, (6, *shape), generator=generator, dtype=torch.uint8)
    few = torch.randint(100, 103, (4, *shape), generator=generator, dtype=torch.uint8)
    dark = torch.randint(0, 9, (2, *shape), generator=generator, dtype=torch.uint8)
    one_dot = torch.full((1, *shape), 7, dtype=torch.uint8)
    one_dot[0, :, height // 2, width // 3] = 250
    flat = torch.stack([torch.full(shape, level, dtype=torch.uint8) for level in (0, 255, 128)])
    return torch.cat([smooth, noise, few, dark, one_dot, flat])
