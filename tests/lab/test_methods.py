"""Every method of the paper with every model: a few steps on a fixed batch lower the loss."""

import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import flatmin
from flatmin.regularisers import Mixed
from flatmin_lab import methods, models
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.methods import METHODS

# deep and wide ones in small, for the CPU; in full size on a GPU (test_cuda.py)
NETWORKS = (
    "preactresnet18",
    "preactresnet34",
    "preactresnet50",
    "vgg16",
    "wideresnet16_2",
    "pyramidnet29_24",
    "convnet",
    "mlp",
    "vit",
)


def fixed_batch(side: int, device: str = "cpu") -> tuple[Tensor, Tensor, Normalisation]:
    """Eight images of four classes: stripes of another direction each, with noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(8) % 4
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    stripes = torch.stack([torch.sin((row * k + column * (3 - k)) / 3) for k in range(4)])
    pixels = 0.5 + 0.3 * stripes[y][:, None] + 0.1 * torch.randn(8, 3, side, side, generator=generator)
    normalise = Normalisation(torch.full((3,), 0.5, device=device), torch.full((3,), 0.25, device=device))
    return (pixels.clamp(0, 1).to(device) - 0.5) / 0.25, y.to(device), normalise


def losses_of(method: str, network: str, *, device: str = "cpu", steps: int = 5, lr: float = 0.003) -> list[float]:
    """The plain training loss before and after some steps; the loop never asks which method it runs."""
    torch.manual_seed(0)
    side = 32 if device == "cuda" else {"vgg16": 32, "preactresnet50": 16}.get(network, 8)
    x, y, normalise = fixed_batch(side, device)
    # a large radius would need a long training
    knobs = {"epsilon": 0.05} if method in ("amp", "rmp") else {}
    chosen = methods.build(method, normalise=normalise, **knobs)
    settings = {"side": side} if network == "mlp" else {}
    model = models.build(network, num_classes=4, dropout=chosen.dropout, **settings).to(device)
    optimizer = chosen.wrap(SGD(model.parameters(), lr=lr, momentum=0.9), model)

    @torch.no_grad()
    def plain() -> float:
        """With the batch's own statistics, and without dropout."""
        for module in model.modules():
            module.train(not isinstance(module, nn.Dropout))
        loss = float(cross_entropy(model(x), y))
        model.train()
        return loss

    before = plain()
    for _ in range(steps):
        changed, target = chosen.regulariser.batch(model, x, y)

        def closure(changed: Tensor = changed, target: Any = target) -> Tensor:
            optimizer.zero_grad()
            loss = chosen.regulariser.loss(model(changed), target)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, everyone returns a tensor
    return [before, plain()]


LARGE = ("preactresnet18", "vgg16")  # seconds: `make test` has them with ERM alone
DEEPER = ("preactresnet34", "preactresnet50")  # seconds more: `make test-all` has them


@pytest.mark.parametrize(
    ("method", "network"),
    [
        pytest.param(
            method,
            network,
            marks=pytest.mark.full if network in DEEPER or (network in LARGE and method != "erm") else (),
        )
        for network in NETWORKS
        for method in METHODS
    ],
)
def test_a_few_steps_lower_the_loss(method: str, network: str) -> None:
    few = (
        5 if network in (*LARGE, *DEEPER) else 10
    )  # after five of MixUp's a network may still have a higher plain loss
    before, after = losses_of(method, network, steps=few)
    assert after < before


def test_the_eight_methods_of_the_paper_are_there() -> None:
    assert set(METHODS) == {
        "erm", "dropout", "label_smoothing", "flooding", "mixup", "adversarial", "rmp", "amp",
    }  # fmt: skip


def test_defaults_are_the_papers() -> None:
    model = models.build("mlp", in_channels=2, num_classes=2)
    base = SGD(model.parameters(), lr=0.1)
    amp = methods.build("amp").wrap(base, model)
    assert isinstance(amp, flatmin.AMP)
    assert (amp.param_groups[0]["epsilon"], amp.param_groups[0]["inner_lr"], amp.inner_iter) == (0.5, 1.0, 1)
    rmp = methods.build("rmp").wrap(SGD(model.parameters(), lr=0.1), model)
    assert isinstance(rmp, flatmin.RMP)
    assert rmp.param_groups[0]["epsilon"] == 0.1
    assert methods.build("dropout").dropout == 0.1
    assert methods.build("erm").wrap(base, model) is base


def test_each_method_is_its_own() -> None:
    """What it does to a batch, a loss or a step tells one from another."""
    torch.manual_seed(0)
    x, y, normalise = fixed_batch(8)
    model = models.build("convnet", num_classes=4)
    for name in ("erm", "dropout", "rmp", "amp"):
        assert methods.build(name).regulariser.name == "erm"
    for name in ("label_smoothing", "flooding", "mixup", "adversarial"):
        assert methods.build(name, normalise=normalise).regulariser.name == name
    assert isinstance(methods.build("mixup").regulariser.batch(model, x, y)[1], Mixed)
    moved, _ = methods.build("adversarial", normalise=normalise).regulariser.batch(model, x, y)
    step = float((moved - x).abs().max()) * float(normalise.std[0]) * 255
    assert step == pytest.approx(1, abs=1e-3)
    for name in ("amp", "rmp"):
        wrapped = methods.build(name).wrap(SGD(model.parameters(), lr=0.1), model)
        assert wrapped.model is model  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_can_be_sent_to_another_process(name: str) -> None:
    method = methods.build(name, normalise=fixed_batch(8)[2])
    copy = pickle.loads(pickle.dumps(method))
    model = models.build("convnet", num_classes=4)
    assert (copy.name, copy.dropout) == (method.name, method.dropout)
    assert type(copy.wrap(SGD(model.parameters(), lr=0.1), model)) is type(
        method.wrap(SGD(model.parameters(), lr=0.1), model)
    )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("erm", {"epsilon": 0.1}, "erm takes no settings, got epsilon"),
        ("dropout", {"p": 0.1}, "dropout takes rate, got p"),
        ("amp", {"eps": 0.1}, "amp takes epsilon, inner_lr, inner_iter, ball, norm, start, .*, got eps"),
        ("amp", {"start": 1.5}, "a share of the training, at least 0 and below 1, got 1.5"),
        ("amp", {"ascent_share": 0}, "above 0 and at most 1, got 0"),
        ("amp", {"epsilon": "auto", "ascent_share": 0.5}, "got ascent_share=0.5; leave it out, or give a number"),
        ("amp", {"regulariser": "adversarial"}, "together with erm, label_smoothing, .*, got regulariser=adversarial"),
        ("amp", {"epsilon": "auto", "regulariser": "mixup"}, "got regulariser=mixup, whose loss is another"),
        ("amp", {"ascent_share": 0.5, "regulariser": "mixup"}, "got mixup and ascent_share=0.5; leave one of them out"),
        ("amp", {"epsilon": "auto", "growth": "linear"}, "grows by itself, got growth=linear; leave it out"),
        ("amp", {"epsilon": "auto", "held_out": 0}, "held_out is a share of the training set, between 0 and 1, got 0"),
        ("amp", {"epsilon": 0.1, "held_out": 0.1}, "held_out belongs to epsilon auto, got .*; leave it out"),
        ("amp", {"epsilon": "auto", "release": 1.5}, "release is a share of the perturbed part of the run, above 0"),
        ("amp", {"epsilon": 0.1, "release": 0.5}, "release belongs to epsilon auto, got .*; leave it out"),
        ("amp", {"epsilon": "auto", "matches": 0}, "matches must be a whole number of at least 1, got 0"),
        ("rmp", {"epsilon": "auto"}, "epsilon auto works only with AMP, got it for rmp; give a number"),
        ("adversarial", {"epsilon": "auto", "mean": [0.0], "std": [1.0]}, "got it for adversarial; give a number"),
        ("dropout", {"rate": 10}, "below 1, got 10"),
        ("adversarial", {}, "must know how the images were normalised: give normalise="),
    ],
)
def test_wrong_settings_are_named(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.build(name, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "rule"),
    [
        ("amp", {"release": "half", "epsilon": "auto"}, "a number or null"),
        ("amp", {"held_out": "0.1.", "epsilon": "auto"}, "a number or null"),
        ("amp", {"ascent_share": "a quarter"}, "a number"),
        ("dropout", {"rate": "no"}, "a number"),
        ("label_smoothing", {"smoothing": "some"}, "a number"),
        ("flooding", {"level": "low"}, "a number"),
        ("mixup", {"alpha": "one"}, "a number"),
        ("adversarial", {"epsilon": "8/255", "mean": [0.5], "std": [0.5]}, "a number"),
    ],
)
def test_a_word_where_a_number_belongs_is_named(name: str, settings: dict[str, Any], rule: str) -> None:
    key, value = next(iter(settings.items()))
    with pytest.raises(TypeError, match=rf"{key} must be {rule}, got a str: '{re.escape(value)}'"):
        methods.build(name, **settings)


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'sam'; choose from erm, .*amp"):
        methods.build("sam")
