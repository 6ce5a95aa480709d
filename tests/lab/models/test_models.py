"""The networks: sizes known from the published code, shapes, first gradients, dropout, and what wrong arguments get."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flatmin_lab.models import MODELS, build, settings_for
from flatmin_lab.models.preact_resnet import SHORTCUTS, Shortcut
from flatmin_lab.models.preact_resnet import Block as PreActBlock
from flatmin_lab.models.wide_resnet import Block as WideBlock

# (parameters, tensors) for 10 classes and 3 channels; the first column is known, the second counted
SIZES = {
    "preactresnet18": (11_176_906, 75),
    "preactresnet34": (21_288_778, 139),
    "preactresnet50": (23_539_658, 205),
    "vgg16": (33_646_666, 58),
    "wideresnet28_10": (36_479_194, 80),
    "pyramidnet164_270": (27_216_021, 601),
    "vit": (2_680_906, 78),
    # counted with the published code
    "wideresnet28_2": (1_467_610, 80),
    "pyramidnet164_48": (1_715_442, 601),
    "pyramidnet110_150": (6_472_640, 403),  # its widths are halves before rounding
}
SMALL = {"convnet": {}, "mlp": {"side": 8}}  # what each needs for images of 8 by 8
names = pytest.mark.parametrize("name", MODELS)


def size(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def settings(name: str) -> dict[str, int]:
    return {"side": 32} if name == "mlp" else {}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_counted(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    assert (size(model), len(list(model.parameters()))) == SIZES[name]


def test_preactresnet18_without_biases_and_basic_pyramids() -> None:
    assert size(build("preactresnet18", bias=False)) == 11_172_170
    assert size(build("pyramidnet110_84", bottleneck=False)) == 3_904_446


# Sums of |logits| in train and then in eval mode, and the norm of the gradient, in float64 from seed 0: what the
# published code gave for the same seed and input
PUBLISHED = {
    "preactresnet18": (7.18184810298045, 0.8857200631554443, 32.16249359659121),
    "preactresnet50": (9.134393646009485, 0.5069542706917152, 56.372903363241335),
    "vgg16": (5.546447544251311, 0.3319909836888215, 30.260253249256376),
    "wideresnet16_2": (6.992165783103237, 7.569909860535615, 2.624825335292463),
    "pyramidnet29_24": (9.319393600314493, 14.103529419739333, 5.008368648986938),
    "pyramidnet20_11": (7.12422312151535, 54.851502914466636, 1.6764255475807675),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_from_the_same_seed_a_network_is_the_published_one(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, **({"bottleneck": False} if name == "pyramidnet20_11" else {})).double()
    x = torch.sin(torch.arange(4 * 3 * 32 * 32, dtype=torch.float64) * 0.37).view(4, 3, 32, 32)
    cross_entropy(model(x), torch.arange(4)).backward()
    gradient = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    with torch.no_grad():
        found = [model(x).abs().sum(), model.eval()(x).abs().sum(), gradient]
    assert [float(number) for number in found] == pytest.approx(PUBLISHED[name], rel=1e-6)


LARGE = ("wideresnet28_10", "pyramidnet164_270", "preactresnet50")  # seconds each, where bfloat16 is emulated


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.full if name in LARGE and dtype is torch.bfloat16 else ())
        for name in MODELS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_logits_have_their_shape_and_the_first_gradient_is_finite(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=7, dropout=0.1, **settings(name)).to(dtype)
    x, y = torch.randn(2, 3, 32, 32).to(dtype), torch.tensor([1, 6])
    logits = model(x)
    assert logits.shape == (2, 7)
    cross_entropy(logits.float(), y).backward()
    for param in model.parameters():
        assert param.grad is not None
        assert param.grad.isfinite().all()
    assert any(bool(param.grad.ne(0).any()) for param in model.parameters() if param.grad is not None)


@names
def test_other_channels_and_classes(name: str) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=3, in_channels=1, **settings(name)).eval()
        assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("name", ["preactresnet18", "wideresnet10_1", "pyramidnet11_6", "vit", *SMALL])
def test_small_images_pass(name: str) -> None:
    model = build(name, in_channels=1, **({"side": 8} if name == "mlp" else {}))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("name", [*PUBLISHED, "preactresnet34", *SMALL])
def test_dropout_changes_no_first_weight_and_stands_after_every_relu(name: str) -> None:
    built = []
    for dropout in (0.0, 0.1):
        torch.manual_seed(0)
        built.append(build(name, dropout=dropout, **settings(name)))
    plain, dropped = built
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), dropped.parameters(), strict=True))
    assert not [module for module in plain.modules() if isinstance(module, nn.Dropout)]
    relus = 0
    for sequence in (module for module in dropped.modules() if isinstance(module, nn.Sequential)):
        children = list(sequence)
        for place, child in enumerate(children):
            if isinstance(child, nn.ReLU):
                relus += 1
                follower = children[place + 1]
                assert isinstance(follower, nn.Dropout)
                assert follower.p == 0.1
    assert relus == sum(isinstance(module, nn.ReLU) for module in dropped.modules())


@pytest.mark.parametrize("shortcut", SHORTCUTS)
@pytest.mark.parametrize(("channels", "stride"), [(8, 1), (4, 2)])
def test_a_shortcut_is_the_input_the_activated_tensor_or_its_projection(
    shortcut: Shortcut, channels: int, stride: int
) -> None:
    """With a residual branch of zeros a block gives its shortcut. Where the shape changes, both kinds are one."""
    x = torch.randn(2, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    block = PreActBlock(channels, 8, stride, bottleneck=False, dropout=0.0, shortcut=shortcut, bias=True).eval()
    for param in block.residual.parameters():
        nn.init.zeros_(param)
    same_shape = block.activation(x) if shortcut == "activated" else x
    assert torch.equal(block(x), same_shape if stride == 1 else block.shortcut(block.activation(x)))


def test_he_et_al_take_the_first_shortcut_from_the_activated_tensor() -> None:
    model = build("preactresnet18", shortcut="identity")
    blocks = [module for module in model.modules() if isinstance(module, PreActBlock)]
    assert [block.from_input for block in blocks] == [False, True, False, True, False, True, False, True]
    assert not any(block.from_input for block in build("preactresnet18").modules() if isinstance(block, PreActBlock))


def test_the_published_details_of_the_wide_resnet() -> None:
    model = build("wideresnet16_2")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [norm.momentum for norm in norms[-2:]] == [0.1, 0.9]
    first = [module for module in model.modules() if isinstance(module, WideBlock)][2]  # of the second group
    strides = [module.stride for module in first.residual if isinstance(module, nn.Conv2d)]
    assert strides == [(1, 1), (2, 2)]


def test_first_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [param.detach().clone() for param in build("wideresnet10_1").parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(0), weights(0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(0), weights(1), strict=True))


WRONG = [
    (
        {"name": "resnet18"},
        "unknown model 'resnet18'; choose from preactresnet18, .*as in wideresnet16_4, pyramidnet110_84, vgg19",
    ),
    ({"name": "vgg17"}, "VGG has a depth of 11, 13, 16, 19, got 17"),
    ({"name": "wideresnet28"}, "unknown model 'wideresnet28'"),
    ({"name": "vgg16", "hidden": 0}, "at least 1 neuron, got 0"),
    ({"name": "pyramidnet", "depth": 164}, "unknown model 'pyramidnet'"),
    ({"name": "pyramidnet165_48"}, r"depth must be 9n \+ 2 with bottlenecks \(11, 20, 29 …\), got 165"),
    ({"name": "pyramidnet112_48", "bottleneck": False}, r"6n \+ 2 without bottlenecks"),
    ({"name": "pyramidnet164_0"}, "must be above 0, got 0"),
    ({"name": "wideresnet27_10"}, r"6n \+ 4 .*, got 27"),
    ({"name": "wideresnet28_0"}, "width must be at least 1, got 0"),
    ({"name": "preactresnet18", "dropout": 1.0}, "below 1, got 1.0"),
    ({"name": "preactresnet18", "num_classes": 0}, "num_classes must be at least 1, got 0"),
    ({"name": "convnet", "in_channels": 0}, "in_channels must be at least 1, got 0"),
    ({"name": "preactresnet18", "shortcut": "raw"}, "unknown shortcut 'raw'; choose from activated, identity"),
    ({"name": "mlp", "depth": 0}, "depth must be at least 1, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)  # type: ignore[arg-type]


def test_an_mlp_says_what_it_takes() -> None:
    with pytest.raises(ValueError, match=r"takes 1 numbers, got inputs of shape \(1, 8, 8\); build it with .*side="):
        build("mlp", in_channels=1)(torch.zeros(2, 1, 8, 8))


def test_an_mlp_says_that_images_must_be_square() -> None:
    with pytest.raises(ValueError, match=r"images that are square, got 8 by 16; resize the images"):
        settings_for("mlp", (1, 8, 16))


def test_vgg_says_how_large_images_must_be() -> None:
    with pytest.raises(ValueError, match="at least 32 by 32 pixels, got 28 by 28"):
        build("vgg16")(torch.zeros(1, 3, 28, 28))


def test_dropout_at_the_block_is_where_the_published_code_has_it() -> None:
    """The last ReLU of each of eight blocks, and the pooled features; nothing but masks changes."""

    def drops(**settings: Any) -> list[str]:
        model = build("preactresnet18", dropout=0.1, width=4, **settings)
        return [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)]

    published = drops(dropout_at="block")
    assert published == [*(f"groups.{group}.{block}.residual.3" for group in range(4) for block in range(2)), "head.4"]
    assert len(drops()) == 2 * 8 + 1
    torch.manual_seed(0)
    plain = build("preactresnet18", width=4)
    torch.manual_seed(0)
    other = build("preactresnet18", width=4, dropout=0.1, dropout_at="block")
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="unknown dropout_at 'head'"):
        build("preactresnet18", dropout_at="head")
