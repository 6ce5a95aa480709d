"""Each regulariser is plain cross-entropy at its zero, and the textbook's formula elsewhere."""

from collections.abc import Callable

import pytest
import torch
from scipy.stats import beta, kstest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from flatmin.regularisers import (
    REGULARISERS,
    Mixed,
    Regulariser,
    adversarial,
    erm,
    flooding,
    label_smoothing,
    mixed_cross_entropy,
    mixup,
)

CLASSES = 6


def batch(count: int = 9, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 4, 4, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def logits(count: int = 9, *, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(count, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


PLAIN: dict[str, Callable[[], Regulariser]] = {
    "erm": erm,
    "smoothing 0": lambda: label_smoothing(0.0),
    "smoothing 0 over the others": lambda: label_smoothing(0.0, over="others"),
    "level 0": lambda: flooding(0.0),
    "alpha 0": lambda: mixup(0.0),
    "radius 0": lambda: adversarial(0.0),
    "radius 0, normalised": lambda: adversarial(0.0, mean=[0.5] * 3, std=[0.2] * 3),
}


@pytest.mark.parametrize("name", PLAIN)
def test_at_its_zero_a_regulariser_is_cross_entropy(name: str) -> None:
    """The same pictures, bit for bit, the same loss and the same gradient."""
    regulariser, model, (x, y) = PLAIN[name](), network(), batch()
    changed, target = regulariser.batch(model, x, y)
    assert torch.equal(changed, x)
    loss = regulariser.loss(model(changed), target)
    expected = cross_entropy(model(x), y)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    found = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("over", ["all", "others"])
@pytest.mark.parametrize("smoothing", [0.05, 0.2, 0.5])
def test_label_smoothing_is_soft_label_cross_entropy(over: str, smoothing: float) -> None:
    _, y = batch()
    hard = one_hot(y, CLASSES).double()
    if over == "all":
        soft = (1 - smoothing) * hard + smoothing / CLASSES
    else:
        soft = (1 - smoothing) * hard + smoothing / (CLASSES - 1) * (1 - hard)
    found = label_smoothing(smoothing, over=over).loss(logits(), y)  # type: ignore[arg-type]
    torch.testing.assert_close(found, cross_entropy(logits(), soft), rtol=1e-12, atol=0)


def test_label_smoothing_is_least_where_the_prediction_is_the_soft_label() -> None:
    """For ten classes and 0.2 the least loss is 0.8669 over all classes and 0.9398 over the others."""
    for over, peak, least in (("all", 0.82, 0.8669), ("others", 0.8, 0.9398)):
        probabilities = torch.full((1, 10), (1 - peak) / 9)
        probabilities[0, 4] = peak
        loss = label_smoothing(0.2, over=over).loss(probabilities.log(), torch.tensor([4]))  # type: ignore[arg-type]
        assert float(loss) == pytest.approx(least, abs=1e-4)


@pytest.mark.parametrize("level", [0.02, 0.5, 3.0])
def test_flooding_turns_the_gradient_round_below_its_level(level: float) -> None:
    y = batch()[1]
    scores = logits(scale=1.0).requires_grad_()
    plain = cross_entropy(scores, y)
    flooded = flooding(level).loss(scores, y)
    assert flooded.item() == pytest.approx(abs(plain.item() - level) + level)
    (turned,) = torch.autograd.grad(flooded, scores, retain_graph=True)
    (straight,) = torch.autograd.grad(plain, scores)
    torch.testing.assert_close(turned, straight if plain.item() > level else -straight)


@pytest.mark.parametrize("per", ["picture", "batch"])
@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_mixes_pictures_and_labels_alike(alpha: float, per: str) -> None:
    x, y = batch(64)
    regulariser = mixup(alpha, per=per, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]
    mixed, target = regulariser.batch(network(), x, y)
    assert isinstance(target, Mixed)
    share = target.share.double()[:, None]
    soft = share * one_hot(y, CLASSES) + (1 - share) * one_hot(target.partner, CLASSES)
    scores = logits(64)
    torch.testing.assert_close(regulariser.loss(scores, target), cross_entropy(scores, soft), rtol=1e-6, atol=0)
    # the partner is another picture of the batch: solve for it and look it up
    strong = target.share < 0.9
    weight = target.share[strong].view(-1, 1, 1, 1)
    partner = (mixed[strong] - weight * x[strong]) / (1 - weight)
    distances = torch.cdist(partner.flatten(1), x.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.argmin(dim=1)
    assert float(distances.min(dim=1).values.max()) < 1e-4
    assert torch.equal(y[nearest], target.partner[strong])
    assert (len(set(target.share.tolist())) == 1) == (per == "batch")


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0])
def test_mixups_share_is_beta_distributed(alpha: float) -> None:
    x = torch.zeros(4000, 1)
    regulariser = mixup(alpha, generator=torch.Generator().manual_seed(0))
    _, target = regulariser.batch(network(), x, torch.zeros(4000, dtype=torch.int64))
    assert kstest(target.share.numpy(), beta(alpha, alpha).cdf).pvalue > 1e-3


def test_mixup_pairs_every_picture_once() -> None:
    x, y = torch.arange(50.0).view(50, 1), torch.arange(50)
    _, target = mixup(1.0).batch(network(), x, y)
    assert target.partner.sort().values.equal(y)
    assert not target.partner.equal(y)


def test_a_mixture_of_one_is_the_label_itself() -> None:
    scores, y = logits(), batch()[1]
    certain = Mixed(y, y.flip(0), torch.ones(len(y)))
    torch.testing.assert_close(mixed_cross_entropy(scores, certain), cross_entropy(scores, y))
    assert torch.equal(mixed_cross_entropy(scores, y), cross_entropy(scores, y))  # test pictures are not mixed


class TestAdversarial:
    def test_the_step_is_epsilon_a_pixel_after_normalisation_is_undone(self) -> None:
        mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.25])
        view = (3, 1, 1)
        model, (pixels, y) = network(), batch()
        x = (pixels - mean.view(view)) / std.view(view)
        moved, target = adversarial(1 / 255, mean=mean, std=std).batch(model, x, y)
        back = moved * std.view(view) + mean.view(view)
        step = (back - pixels) * 255
        assert torch.equal(target, y)
        assert float(back.min()) >= -1e-6
        assert float(back.max()) <= 1 + 1e-6
        assert float(step.abs().max()) == pytest.approx(1, abs=1e-3)
        assert float((step.abs() > 0.99).float().mean()) > 0.9
        assert cross_entropy(model(moved), y).item() > cross_entropy(model(x), y).item()

    def test_black_and_white_stay_valid(self) -> None:
        mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]
        y = batch()[1]
        for level in (0.0, 1.0):
            x = (torch.full((9, 3, 4, 4), level) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
            moved, _ = adversarial(8 / 255, mean=mean, std=std).batch(network(), x, y)
            back = moved * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
            assert float(back.min()) >= -1e-6
            assert float(back.max()) <= 1 + 1e-6
            assert not torch.equal(moved, x)

    def test_the_model_keeps_its_mode_and_has_no_gradient(self) -> None:
        model, (x, y) = network().train(), batch()
        adversarial(1 / 255).batch(model, x, y)
        assert model.training
        assert all(param.grad is None for param in model.parameters())


WRONG: dict[str, Callable[[], object]] = {
    r"smoothing must be between 0 and 1, got 1\.2": lambda: label_smoothing(1.2),
    "choose from all, others": lambda: label_smoothing(0.1, over="some"),  # type: ignore[arg-type]
    r"at most 0\.5 for 2 classes, got 0\.6": lambda: label_smoothing(0.6, over="others").loss(
        torch.zeros(1, 2), torch.tensor([0])
    ),
    "level must be at least 0, got -1": lambda: flooding(-1),
    "alpha must be at least 0, got -1": lambda: mixup(-1),
    "choose from picture, batch": lambda: mixup(per="pixel"),  # type: ignore[arg-type]
    "epsilon must be at least 0, got nan": lambda: adversarial(float("nan")),
    "mean and std belong together": lambda: adversarial(mean=[0.5]),
    "std must be above 0": lambda: adversarial(mean=[0.5], std=[0.0]),
    "two rising numbers": lambda: adversarial(bounds=(1.0, 0.0)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def test_the_table_has_the_papers_settings_as_defaults() -> None:
    assert list(REGULARISERS) == ["erm", "label_smoothing", "flooding", "mixup", "adversarial"]
    assert all(make().name == name for name, make in REGULARISERS.items())
    scores, y = logits(), batch()[1]
    pairs = ((label_smoothing(), label_smoothing(0.2)), (flooding(), flooding(0.02)))
    assert all(torch.equal(one.loss(scores, y), two.loss(scores, y)) for one, two in pairs)
