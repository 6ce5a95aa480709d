"""The vision transformer beside torch's own layers, and what it does with the order and the size of patches."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from flatmin_lab.models import build
from flatmin_lab.models.vit import Layer, ViT, positions

CPU = torch.device("cpu")


def test_a_layer_is_torchs_with_the_same_weights() -> None:
    torch.manual_seed(0)
    ours = Layer(24, 3, 0.0).double()
    theirs = nn.TransformerEncoderLayer(24, 3, 96, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64)
    attention, mlp = ours.attention, ours.mlp
    pairs = [
        (theirs.norm1, attention.norm),
        (theirs.self_attn.out_proj, attention.out[0]),
        (theirs.norm2, mlp[0]),
        (theirs.linear1, mlp[1]),
        (theirs.linear2, mlp[3]),
    ]
    with torch.no_grad():
        for into, source in pairs:
            into.load_state_dict(source.state_dict())
        theirs.self_attn.in_proj_weight.copy_(attention.queries_keys_values.weight)
        theirs.self_attn.in_proj_bias.copy_(attention.queries_keys_values.bias)
    tokens = torch.randn(4, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-12, atol=1e-12)


def test_patches_are_cut_as_a_convolution_with_that_stride_cuts_them() -> None:
    torch.manual_seed(0)
    model = ViT(in_channels=2, patch=3, width=8, depth=1, heads=2).double()
    seen = []
    model.layers.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    model(x)
    kernel = model.patches.weight.view(8, 2, 3, 3)
    expected = conv2d(x, kernel, model.patches.bias, stride=3).flatten(2).transpose(1, 2)
    torch.testing.assert_close(seen[0], expected + positions(2, 3, 8, device=CPU).double(), rtol=1e-12, atol=1e-12)


def test_positions_differ_between_any_two_patches_and_depend_on_row_and_column_alone() -> None:
    grid = positions(8, 8, 192, device=CPU)
    assert torch.pdist(grid).min() > 0.5
    tall = positions(16, 8, 192, device=CPU)
    assert torch.equal(tall[: 8 * 8], grid)
    # columns become rows where the two halves are exchanged
    turned = grid.view(8, 8, 192).transpose(0, 1).flatten(0, 1)
    assert torch.equal(turned, torch.cat([grid[:, 96:], grid[:, :96]], dim=1))


def test_without_positions_the_order_of_patches_would_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build("vit", depth=2, width=24).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    swapped = x.roll(4, dims=3)  # by one patch
    with torch.no_grad():
        assert not torch.allclose(model(x), model(swapped), rtol=1e-6)
        monkeypatch.setattr("flatmin_lab.models.vit.positions", lambda *_, **__: torch.zeros(()))
        torch.testing.assert_close(model(x), model(swapped), rtol=1e-10, atol=1e-12)


def test_dropout_changes_no_first_weight_and_stands_three_times_a_layer() -> None:
    built = []
    for dropout in (0.0, 0.1):
        torch.manual_seed(0)
        built.append(build("vit", dropout=dropout, depth=2, width=24))
    plain, dropped = built
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), dropped.parameters(), strict=True))
    assert [sum(isinstance(m, nn.Dropout) for m in one.modules()) for one in built] == [0, 6]


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"multiples of its patch \(4\), got 28 by 30; set patch"):
        build("vit")(torch.zeros(1, 3, 28, 30))
    with pytest.raises(ValueError, match=r"multiple of 4 and of its heads \(3\), got 64"):
        build("vit", width=64)
    with pytest.raises(ValueError, match="patch must be at least 1, got 0"):
        build("vit", patch=0)
