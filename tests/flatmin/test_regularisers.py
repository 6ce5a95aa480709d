"""Each regulariser is plain cross-entropy at its zero, and the textbook's formula elsewhere."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from inspect import signature

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
    """The same images, bit for bit, the same loss and the same gradient."""
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
    x = x.double()
    regulariser = mixup(alpha, per=per, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]
    mixed, target = regulariser.batch(network(), x, y)
    assert isinstance(target, Mixed)
    share = target.share.double()[:, None]
    soft = share * one_hot(y, CLASSES) + (1 - share) * one_hot(target.partner, CLASSES)
    scores = logits(64)
    torch.testing.assert_close(regulariser.loss(scores, target), cross_entropy(scores, soft), rtol=1e-6, atol=0)
    # the partner is another image of the batch: solve for it and look it up
    strong = target.share < 0.9999
    assert strong.any()
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


@pytest.mark.parametrize("alpha", [1e-4, 1e-2])
def test_a_small_alpha_hardly_mixes(alpha: float) -> None:
    """Beta(α, α) for α → 0 is a coin: all of one image or all of the other."""
    regulariser = mixup(alpha, generator=torch.Generator().manual_seed(0))
    _, target = regulariser.batch(network(), torch.zeros(4000, 1), torch.zeros(4000, dtype=torch.int64))
    middle = ((target.share > 0.01) & (target.share < 0.99)).float().mean()
    expected = float(beta(alpha, alpha).cdf(0.99) - beta(alpha, alpha).cdf(0.01))
    assert float(middle) == pytest.approx(expected, abs=0.01)
    assert float(target.share.mean()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_labels_are_mixed_as_the_pictures_were(dtype: torch.dtype) -> None:
    x = torch.cat([torch.ones(1, 5, dtype=dtype), torch.zeros(499, 5, dtype=dtype)])
    mixed, target = mixup(1, generator=torch.Generator().manual_seed(0)).batch(network(), x, torch.arange(500))
    assert mixed.dtype == dtype
    assert float(mixed[0, 0]) == float(target.share[0])
    assert float(mixed[int((target.partner == 0).nonzero()), 0]) == pytest.approx(
        1 - float(target.share[target.partner == 0]), rel=1e-2 if dtype == torch.bfloat16 else 1e-3
    )


def test_a_generator_fixes_pairs_and_shares_and_alpha_zero_draws_nothing() -> None:
    x, y = batch()
    drawn = [mixup(0.5, generator=torch.Generator().manual_seed(1)).batch(network(), x, y) for _ in range(2)]
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1].partner, drawn[1][1].partner)
    before = torch.get_rng_state()
    mixup(0.0).batch(nn.Identity(), x, y)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(TypeError, match=r"must be floats to be mixed, got torch\.uint8"):
        mixup(1.0).batch(network(), (255 * x).to(torch.uint8), y)


def test_mixup_pairs_every_picture_once() -> None:
    x, y = torch.arange(50.0).view(50, 1), torch.arange(50)
    _, target = mixup(1.0).batch(network(), x, y)
    assert target.partner.sort().values.equal(y)
    assert not target.partner.equal(y)


def test_a_mixture_of_one_is_the_label_itself() -> None:
    scores, y = logits(), batch()[1]
    certain = Mixed(y, y.flip(0), torch.ones(len(y)))
    torch.testing.assert_close(mixed_cross_entropy(scores, certain), cross_entropy(scores, y))
    assert torch.equal(mixed_cross_entropy(scores, y), cross_entropy(scores, y))  # test images are not mixed


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

    def test_inputs_outside_the_bounds_are_named_with_the_way_out(self) -> None:
        model, (pixels, y) = network(), batch()
        with pytest.raises(ValueError, match=r"takes inputs of 0 to 1 .*got -2\..* to 1\..*give mean= and std="):
            adversarial().batch(model, 4 * pixels - 2.1, y)
        moved, _ = adversarial(bounds=(-float("inf"), float("inf"))).batch(model, 4 * pixels - 2, y)
        assert float((moved - (4 * pixels - 2)).abs().min()) > 0
        cut, _ = adversarial(0.1, bounds=(0.2, 0.4)).batch(model, pixels.clamp(0.2, 0.4), y)
        assert [float(cut.min()), float(cut.max())] == pytest.approx([0.2, 0.4])
        with pytest.raises(ValueError, match="one number per channel: got 3 and 3 for 1"):
            adversarial(mean=[0.5] * 3, std=[0.2] * 3).batch(model, pixels[:, :1], y)

    def test_bfloat16_pictures_stay_valid(self) -> None:
        mean, std = [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]
        y = batch()[1]
        for level in (0.0, 1.0):
            x = (torch.full((9, 3, 4, 4), level) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
            moved, _ = adversarial(1 / 255, mean=mean, std=std).batch(network().bfloat16(), x.bfloat16(), y)
            assert moved.dtype == torch.bfloat16
            low, high = (x.bfloat16().min(), x.bfloat16().max())
            assert (moved >= low).all() if level == 0 else (moved <= high).all()  # not a bit further out

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
    "0, or from 1e-6 to 1e6, got -1": lambda: mixup(-1),
    "0, or from 1e-6 to 1e6, got inf": lambda: mixup(float("inf")),
    "0, or from 1e-6 to 1e6, got 1e-39": lambda: mixup(1e-39),
    "mean must be finite": lambda: adversarial(mean=[float("nan")], std=[1.0]),
    "choose from picture, batch": lambda: mixup(per="pixel"),  # type: ignore[arg-type]
    "at least 0 and at most the width of the bounds .*, got nan": lambda: adversarial(float("nan")),
    "got 8; a step of 8 grey levels is 8 / 255": lambda: adversarial(8),
    "mean and std must be given together": lambda: adversarial(mean=[0.5]),
    "std above 0 in every channel": lambda: adversarial(mean=[0.5], std=[0.0]),
    "a lower and an upper number": lambda: adversarial(bounds=(1.0, 0.0)),
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
    x, y = batch()
    moved, _ = adversarial().batch(network(), x, y)
    assert float((moved - x).abs().max()) * 255 == pytest.approx(1, abs=1e-3)
    assert signature(mixup).parameters["alpha"].default == 1.0


@pytest.mark.parametrize("name", REGULARISERS)
def test_a_regulariser_can_be_pickled_and_copied(name: str) -> None:
    """To another process, or into a checkpoint: what comes back does the same."""
    original = REGULARISERS[name]()
    for copy in (pickle.loads(pickle.dumps(original)), deepcopy(original)):
        found = []
        for one in (original, copy):
            torch.manual_seed(3)
            x, target = one.batch(network(), *batch())
            found.append(one.loss(network()(x), target).detach())
        assert torch.equal(found[0], found[1])


# ---- adversarial training as the published code has it


def test_a_step_in_inputs_does_not_know_of_pixels() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    x, y = 5 * torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    moved, _ = adversarial(1 / 255, units="inputs").batch(model, x, y)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
    same, _ = adversarial(1 / 255, units="inputs", mean=mean, std=std).batch(model, x, y)
    torch.testing.assert_close((moved - x).abs(), torch.full_like(x, 1 / 255), atol=1e-6, rtol=0)
    assert torch.equal(moved, same)


def test_a_random_start_ends_where_the_plain_formula_does() -> None:
    """X + U(−ε, ε), a step of ε along the sign of the gradient there, back into the box of ε around x."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    x, y = torch.randn(40, 3, 2, 2, dtype=torch.float64), torch.arange(40) % 3
    torch.manual_seed(3)
    moved, target = adversarial(0.1, units="inputs", random_start=True).batch(model, x, y)
    torch.manual_seed(3)
    start = (x + 0.1 * (2 * torch.rand_like(x) - 1)).requires_grad_()
    cross_entropy(model(start), y).backward()
    assert start.grad is not None
    expected = x + (start.detach() + 0.1 * start.grad.sign() - x).clamp(-0.1, 0.1)
    torch.testing.assert_close(moved, expected, atol=1e-12, rtol=0)
    assert torch.equal(target, y)
    inside = ((moved - x).abs() < 0.1 - 1e-9).double().mean()
    assert 0.35 < inside < 0.65  # a step from a random point ends at the edge half of the time only


def test_units_and_epsilon_of_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown units='grey levels'"):
        adversarial(units="grey levels")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0 and finite"):
        adversarial(-1.0, units="inputs")
    assert adversarial(0.0, units="inputs").batch(nn.Identity(), torch.ones(1), torch.ones(1))[0] == 1
