"""What the theorems take: numbers or tensors, in float64, and a radius."""

import math

import torch
from torch import Tensor

Number = float | Tensor


def double(number: Number) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device="cpu")


def radius_of(epsilon: float) -> float:
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")
    return float(epsilon)
