"""A small vision transformer (Dosovitskiy et al. 2021) for images of CIFAR's size, trained from scratch.

An image is cut into patches, each a token. A layer is attention and an MLP of four times the width, both with LayerNorm
before and a residual around. The mean of the tokens is classified. Positions are fixed sines and cosines of a patch's
row and column, so images of any size fit whose sides are multiples of the patch.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flatmin_lab.models.layers import check

SLOWEST = 1e-4  # of the positions' angular frequencies, in radians per patch; the fastest is 1
MLP_FACTOR = 4
SPREAD = 0.02  # standard deviation of the initial weights


class ViT(nn.Module):
    """2,680,906 parameters for 10 classes. Dropout: after the attention's projection, and after both MLP layers."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
    ) -> None:
        super().__init__()
        check(num_classes, in_channels, dropout)
        for name, value in (("patch", patch), ("width", width), ("depth", depth), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if width % 4 or width % heads:
            raise ValueError(f"a ViT's width must be a multiple of 4 and of its heads ({heads}), got {width}")
        self.patch, self.width = patch, width
        self.patches = nn.Linear(in_channels * patch * patch, width)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=SPREAD)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (side // self.patch for side in x.shape[2:])
        if (rows * self.patch, columns * self.patch) != tuple(x.shape[2:]):
            raise ValueError(
                f"a ViT's images must have sides that are multiples of its patch ({self.patch}), got "
                f"{x.shape[2]} by {x.shape[3]}; set patch to another number of pixels"
            )
        cut = x.unflatten(3, (columns, self.patch)).unflatten(2, (rows, self.patch))
        tokens = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        placed = self.patches(tokens) + positions(rows, columns, self.width, device=x.device).to(x.dtype)
        logits: Tensor = self.head(self.layers(placed).mean(dim=1))
        return logits


class Layer(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, MLP_FACTOR * width),
            nn.GELU(),
            *_dropped(dropout),
            nn.Linear(MLP_FACTOR * width, width),
            *_dropped(dropout),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(tokens)
        out: Tensor = tokens + self.mlp(tokens)
        return out


class Attention(nn.Module):
    """Every token looks at all tokens of its image, in several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, width), *_dropped(dropout))

    def forward(self, tokens: Tensor) -> Tensor:
        together = self.queries_keys_values(self.norm(tokens)).unflatten(2, (3, self.heads, -1))
        queries, keys, values = together.permute(2, 0, 3, 1, 4)  # each (images, heads, tokens, width of a head)
        seen = scaled_dot_product_attention(queries, keys, values)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


def positions(rows: int, columns: int, width: int, *, device: torch.device) -> Tensor:
    """A row of numbers for each patch: a quarter each of sines and cosines of its row and of its column.

    >>> positions(2, 3, 8, device=torch.device("cpu")).shape
    torch.Size([6, 8])
    """
    count = width // 4
    steps = torch.arange(count, device=device, dtype=torch.float32) / max(count - 1, 1)
    frequency = torch.exp(math.log(SLOWEST) * steps)
    row, column = (torch.arange(n, device=device, dtype=torch.float32) for n in (rows, columns))
    by_row, by_column = (row[:, None, None] * frequency, column[None, :, None] * frequency)
    angles = [angle.expand(rows, columns, count) for angle in (by_row, by_column)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=2).flatten(0, 1)


def _dropped(dropout: float) -> list[nn.Module]:
    return [nn.Dropout(dropout)] if dropout > 0 else []
