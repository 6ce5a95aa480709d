"""What is measured of a trained classifier is what the library's functions say, and what cannot be is said clearly."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatmin import attacks, flatness, metrics
from flatmin_lab.data import Batches, augmentation, load
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.evaluation import landscapes, measurements, subject
from flatmin_lab.evaluation.load_run import find_run, subject_of
from flatmin_lab.evaluation.subject import Subject, user_subject
from flatmin_lab.training.loop import train
from tests.support import own_networks
from tests.support.small_runs import run, tiny_data, tiny_recipe


class Net(nn.Module):
    """For 6 × 6 images of three classes; its bias makes it over-confident."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.inside(x)).relu().flatten(1))
        return found


@pytest.fixture(params=[False, True], ids=["from 0 to 1", "normalised"])
def tiny(request: pytest.FixtureRequest) -> Subject:
    return user_subject(Net(), tiny_data(), normalised=request.param, device=torch.device("cpu"))


def logits(own: Subject) -> Tensor:
    with torch.no_grad():
        found: Tensor = own.model(own.inputs(own.test)[0])
    return found


def test_calibration_is_the_measures_of_the_logits(tiny: Subject) -> None:
    found, logits_, labels = measurements.calibration(tiny), logits(tiny), tiny.test.y
    assert (found["split"], found["pictures"]) == ("test", 30)
    for name, measure in measurements.MEASURES.items():
        assert found[name] == pytest.approx(measure(logits_, labels).item(), abs=1e-6)
        if name in measurements.MEAN_MEASURES:
            low, high = found["intervals"][name]
            assert 0 <= low <= found[name] <= high
    assert sum(found["reliability"]["number"]) == 30


def test_no_label_helps_to_choose_its_own_temperature() -> None:
    """Each half has the temperature of the other half: turning one half's labels around leaves its own as it was."""
    torch.manual_seed(0)
    logits_, labels = 3 * torch.randn(200, 4), torch.randint(0, 4, (200,))
    found = measurements.temperature_scaled(logits_, labels)
    assert found is not None
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    first, second = order[:100], order[100:]
    temperatures = [metrics.temperature(logits_[half], labels[half]) for half in (first, second)]
    assert found["temperatures"] == pytest.approx([float(t) for t in temperatures])
    assert found["temperature_pictures"] == [100, 100]
    for t, (low, high) in zip(found["temperatures"], found["temperature_intervals"], strict=True):
        assert low <= t <= high
    cooled = torch.empty_like(logits_)
    cooled[first], cooled[second] = logits_[first] / temperatures[1], logits_[second] / temperatures[0]
    assert found["nll"] == pytest.approx(metrics.nll(cooled, labels).item(), rel=1e-5)
    assert found["nll"] < metrics.nll(logits_, labels).item()  # it was far over-confident


def test_a_half_without_an_error_has_no_temperature_and_nothing_is_scaled_by_it() -> None:
    """The lowest temperature there is would make the other half's only error cost thousands."""
    torch.manual_seed(0)
    labels = torch.randint(0, 4, (200,))
    logits_ = torch.nn.functional.one_hot(labels, 4) * 4 + torch.randn(200, 4) * 0.3
    wrong = torch.randperm(200, generator=torch.Generator().manual_seed(0))[3]
    labels[wrong] = (labels[wrong] + 1) % 4
    found = measurements.temperature_scaled(logits_, labels)
    assert found is not None
    assert found["temperatures"][0] > 0.1
    assert found["temperatures"][1] == pytest.approx(0.001)
    assert (found["nll"], found["ece"]) == (None, None)


def test_attacks_move_pixels_whatever_the_model_takes(tiny: Subject) -> None:
    found = measurements.robustness(tiny, radius=0.1, step_size=0.03, steps=5, batch_size=7)
    x, y = tiny.test.x.float() / 255, tiny.test.y
    moved = attacks.pgd(lambda x: tiny.model(tiny.normalise(x)), x, y, epsilon=0.1, step_size=0.03, steps=5)
    wrong = (tiny.model(tiny.normalise(moved)).argmax(dim=1) != y).float().mean().item()
    assert found["pgd_error"] == pytest.approx(wrong)
    assert found["clean_error"] == pytest.approx(metrics.error(logits(tiny), y).item())
    assert found["pgd_error"] >= found["clean_error"]
    assert (moved - x).abs().max() <= 0.1
    assert measurements.robustness(tiny, radius=0.0)["pgd_error"] == pytest.approx(found["clean_error"])
    assert measurements.robustness(tiny, images=10, norm="l2", radius=0.5)["pictures"] == 10


def test_the_papers_attack_is_the_default(tiny: Subject) -> None:
    found = measurements.robustness(tiny)
    assert (found["radius"], found["step_size"], found["steps"], found["norm"]) == (4 / 255, 1 / 255, 10, "linf")


def test_points_are_attacked_without_bounds() -> None:
    spiral = load("spiral")
    own = user_subject(nn.Linear(2, 2), spiral, normalised=True, device=torch.device("cpu"))
    assert measurements.robustness(own, radius=3.0, step_size=3.0, steps=1, images=100)["fgsm_error"] > 0.9


def test_flatness_is_what_the_library_measures(tiny: Subject) -> None:
    found = measurements.flatness_of(tiny, epsilon=0.2, images=20)
    loss = flatness.empirical_risk(*tiny.inputs(tiny.train, 20))
    assert found["pictures"] == 20
    assert found["sharpness"] == pytest.approx(flatness.sharpness(tiny.model, loss, epsilon=0.2).item(), rel=1e-5)
    assert found["worst_case_loss"] == pytest.approx(max(found["worst_case_starts"]))
    assert found["worst_case_loss"] >= found["mean_loss"]
    assert found["adaptive_epsilon"] == measurements.ADAPTIVE_EPSILON
    adaptive = flatness.worst_case_loss(tiny.model, loss, epsilon=measurements.ADAPTIVE_EPSILON, adaptive=True)
    assert found["adaptive_worst_case_loss"] == pytest.approx(adaptive.loss.item(), rel=1e-5)
    assert found["adaptive_worst_case_loss"] >= found["adaptive_mean_loss"]
    assert found["eigenvalues"] == sorted(found["eigenvalues"], reverse=True)
    dense = flatness.top_eigenvalue(tiny.model, loss, max_products=250).item()
    assert found["eigenvalues"][0] == pytest.approx(dense, rel=1e-3)


def test_the_spectrum_is_what_the_library_measures(tiny: Subject) -> None:
    said: list[str] = []
    found = measurements.spectrum_of(tiny, images=20, steps=4, probes=2, say=said.append)
    expected = flatness.spectrum(tiny.model, flatness.empirical_risk(*tiny.inputs(tiny.train, 20)), steps=4, probes=2)
    assert (found["pictures"], found["parameters"], found["products"]) == (20, expected.dimension, 8)
    assert found["trace"] == pytest.approx(expected.trace.item(), rel=1e-4)
    assert found["largest"] == pytest.approx(expected.largest.item(), rel=1e-4)
    for i in range(2):
        assert found["values"][i] == pytest.approx(expected.values[i].tolist(), rel=1e-3, abs=1e-5)
        assert sum(found["weights"][i]) == pytest.approx(1, abs=1e-5)
    assert said[-1] == "spectrum of the Hessian, product 8 of 8"


def another(own: Subject) -> Subject:
    """With other weights and statistics."""
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return replace(own, model=net.eval())


def test_the_line_between_two_models_is_what_the_library_measures(tiny: Subject) -> None:
    seen: list[int] = []
    first = replace(tiny, batch_size=8)
    second = another(first)
    found = landscapes.line_between(first, second, points=5, images=20, progress=seen.append)
    assert found["ts"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert found["renewed"] == {"pictures": 16, "augmented": False}  # two whole batches
    assert seen == list(range(1, 11))
    batches = list(Batches(split=first.train, batch_size=8, normalise=first.normalise, seed=0).epoch(0))[:2]
    for name, split in first.splits().items():
        x, y = first.inputs(split, 20)
        loss = flatness.empirical_risk(x, y)
        expected = flatness.between(first.model, second.model, loss, points=5, renew=batches)
        assert found["splits"][name]["losses"] == pytest.approx(expected.losses.tolist(), rel=1e-5)
        assert found["splits"][name]["barrier"] == pytest.approx(expected.barrier.item(), abs=1e-6)
        assert 0 <= min(found["splits"][name]["errors"]) <= max(found["splits"][name]["errors"]) <= 1
    assert not first.model.training


def test_without_batchnorm_the_ends_are_the_models_own(tiny: Subject) -> None:
    torch.manual_seed(0)
    first, second = (replace(tiny, model=nn.Sequential(nn.Flatten(), nn.Linear(36, 3))) for _ in range(2))
    found = landscapes.line_between(first, second, points=3, images=30)
    assert found["renewed"] is None
    for place, own in ((0, first), (-1, second)):
        centre = nn.functional.cross_entropy(logits(own), own.test.y).item()
        assert found["splits"]["test"]["losses"][place] == pytest.approx(centre, rel=1e-5)


def test_two_models_of_different_data_are_not_joined(tiny: Subject) -> None:
    other = replace(tiny, test=replace(tiny.test, x=tiny.test.x.flip(0)))
    with pytest.raises(ValueError, match="name two runs on one data set"):
        landscapes.line_between(tiny, other)
    for normalise in (
        replace(tiny.normalise, mean=tiny.normalise.mean + 1),
        replace(tiny.normalise, std=2 * tiny.normalise.std),
    ):
        with pytest.raises(ValueError, match="name two runs with one --normalise"):
            landscapes.line_between(tiny, replace(tiny, normalise=normalise))


class Viewing(Net):
    """Views its activations as rows, which those of NHWC images cannot be."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.inside(x)).relu().view(len(x), -1))
        return found


class FiveDimensional(nn.Module):
    """A weight that cannot be NHWC."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.head = nn.Conv3d(1, 2, (1, 3, 3)), nn.Linear(2 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.inside(x[:, :, None]).flatten(1))
        return found


@pytest.mark.parametrize("network", [Net, Viewing, FiveDimensional])
def test_any_layout_of_activations_and_weights_has_a_landscape(network: type[nn.Module]) -> None:
    own = user_subject(network(), tiny_data(), normalised=True, device=torch.device("cpu"))
    found = landscapes.landscape(own, points=3, images=20)
    x, y = own.inputs(own.test, 20)
    centre = nn.functional.cross_entropy(own.model(x), y).item()
    assert found["splits"]["test"]["line"][1] == pytest.approx(centre, rel=1e-5)


class Counting(Net):
    """Counts the images that it has seen, in eval mode too."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


class CountingAndViewing(Viewing, Counting):
    """A network that fails after it has changed its buffer, where images are NHWC."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return Viewing.forward(self, x)


@pytest.mark.parametrize("network", [Counting, CountingAndViewing])
def test_a_landscape_leaves_buffers_that_change_in_eval_mode_as_they_were(network: type[Counting]) -> None:
    own = user_subject(network(), tiny_data(), normalised=True, device=torch.device("cpu"))
    before = own.model.get_buffer("seen").clone()
    landscapes.landscape(own, points=3, images=20)
    assert torch.equal(own.model.get_buffer("seen"), before)


def test_a_landscape_has_the_loss_of_each_split_in_its_middle(tiny: Subject) -> None:
    seen: list[int] = []
    found = landscapes.landscape(tiny, points=5, images=20, progress=seen.append)
    assert found["axis"] == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert seen[-1] == landscapes.count_points(5, lines_only=False) == 50
    for name, split in tiny.splits().items():
        x, y = tiny.inputs(split, 20)
        centre = nn.functional.cross_entropy(tiny.model(x), y).item()
        assert found["splits"][name]["plane"][2][2] == pytest.approx(centre, rel=1e-5)
        assert found["splits"][name]["line"] == found["splits"][name]["plane"][2]
    line = landscapes.landscape(tiny, points=5, images=20, lines_only=True)
    assert line["splits"]["test"]["plane"] is None
    assert line["splits"]["test"]["line"] == pytest.approx(found["splits"]["test"]["line"], rel=1e-5)
    other = landscapes.landscape(tiny, points=5, images=20, seed=1)
    assert other["splits"]["test"]["line"] != found["splits"]["test"]["line"]


class Says(nn.Module):
    """Returns whatever it is given."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(x)


def with_classes(count: int, number: float = 0.0) -> nn.Module:
    return Says(lambda x: torch.full((len(x), count), number))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (with_classes(2), r"K = 3 classes, got \(2, 2\)"),
        (Says(lambda x: (x, x)), "got tuple"),
        (Says(lambda x: x), "got "),
        (nn.Linear(5, 3), r"does not take images of 1 × 6 × 6"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_named(model: nn.Module, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        user_subject(model, tiny_data(), normalised=False, device=torch.device("cpu"))


def test_logits_that_are_not_numbers_are_named() -> None:
    own = user_subject(with_classes(3, math.nan), tiny_data(), normalised=False, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="30 such rows of 30"):
        measurements.calibration(own)


def test_a_model_with_more_outputs_than_classes_will_do() -> None:
    own = user_subject(with_classes(5), tiny_data(), normalised=False, device=torch.device("cpu"))
    assert measurements.calibration(own)["error"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"points": 4}, "odd"), ({"points": 1}, "odd"), ({"reach": 0.0}, "above 0"), ({"images": 0}, "1")],
)
def test_a_landscape_without_a_middle_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        landscapes.check_options(**{"points": 5, "reach": 1.0, "images": 10, **options})


def test_frozen_layers_are_no_part_of_the_landscape_unless_all_are_frozen() -> None:
    data: Dataset = tiny_data()
    for frozen in (False, True):
        net = Net()
        net.requires_grad_(not frozen)
        net.inside.requires_grad_(False)
        own = subject.user_subject(net, data, normalised=False, device=torch.device("cpu"))
        trained = len(list(net.parameters())) - (0 if frozen else len(list(net.inside.parameters())))
        assert len(flatness.directions(own.model)[0]) == trained > 0


def by_class(data: Dataset) -> Dataset:
    """As a folder of images is read: class after class."""
    train_split, test_split = (split.at(split.y.argsort(stable=True)) for split in (data.train, data.test))
    return replace(data, train=train_split, test=test_split)


def test_a_part_of_the_users_own_images_is_of_all_classes() -> None:
    """Flatness, landscapes and attacks take some images: the first ones of a sorted folder would be of one class."""
    data, device = by_class(tiny_data()), torch.device("cpu")
    own = user_subject(Net(), data, normalised=True, device=device, own_data=True)
    for split in (own.train, own.test):
        assert split.y[:10].unique().tolist() == [0]
        x, y = own.inputs(split, 10)
        assert len(x) == 10
        assert y.unique().tolist() == [0, 1, 2]
        assert torch.equal(own.inputs(split, 10)[0], x)
        assert own.sample(split, len(split)) is split
        assert own.sample(split) is split
    attacked = own.sample(own.test, 10)
    wrong = (own.model(own.normalise(attacked.x)).argmax(dim=1) != attacked.y).float().mean().item()
    assert measurements.robustness(own, images=10)["clean_error"] == pytest.approx(wrong)
    known = user_subject(Net(), tiny_data(), normalised=True, device=device)
    assert torch.equal(known.sample(known.test, 10).x, known.test.x[:10])  # flatmin's data sets are in random order


def test_a_run_on_the_users_own_images_is_measured_on_all_classes(tmp_path: Path) -> None:
    data = by_class(tiny_data())
    list(train(tiny_recipe(epochs=1), data, folder=tmp_path / "run"))
    one = subject_of(find_run(tmp_path / "run"), data, use_ema=False, device=torch.device("cpu"))
    assert one.inputs(one.train, 10)[1].unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["spiral", "cifar10-made"])
def test_data_that_flatmin_makes_are_not_the_users_own(tmp_path: Path, name: str) -> None:
    data = replace(tiny_data(), name=name)
    list(train(replace(tiny_recipe(epochs=1), data=name), data, folder=tmp_path / "run"))
    one = subject_of(find_run(tmp_path / "run"), data, use_ema=False, device=torch.device("cpu"))
    assert torch.equal(one.sample(one.test, 10).x, data.test.x[:10])


def test_a_run_and_its_exported_weights_are_equally_flat(tmp_path: Path) -> None:
    """A network with a frozen layer: the ball is over the same weights, whichever way it is loaded."""
    model, data, cpu = f"{own_networks.__file__}:TiedMLP", tiny_data(), torch.device("cpu")
    run(tiny_recipe(model=model, model_settings={}, epochs=1), tmp_path / "run")
    trained = find_run(tmp_path / "run")
    measured = [
        measurements.spectrum_of(one, images=20, steps=3, probes=2)
        for one in (
            subject_of(trained, data, use_ema=False, device=cpu),
            user_subject(trained.load_model((1, 6, 6), 3), data, normalised=True, device=cpu, own_data=True),
        )
    ]
    assert measured[0]["parameters"] == 371
    assert measured[0] == measured[1]


def test_the_rise_on_batches_is_of_augmented_training_batches_and_of_plain_test_batches() -> None:
    """On digits: as many images a batch as in the training, its augmentation, and none on the test set."""
    data, device = load("digits"), torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    plain = user_subject(model, data, normalised=True, device=device)
    trained = replace(plain, augment=augmentation("vanilla", data), batch_size=40)
    found = measurements.rise_on_batches(trained, batches=2)
    assert (found["batches"], found["batch_size"]) == (2, 40)
    made = Batches(split=data.train, batch_size=40, normalise=plain.normalise, augment=trained.augment, seed=0)
    for scale, radii in measurements.RISE_RADII.items():
        expected = flatness.batch_rise(model, list(made.epoch(0))[:2], radii=radii, scale=scale)
        assert found["training"]["loss"] == pytest.approx(float(expected.losses.mean()))
        assert list(found["training"][scale].values()) == pytest.approx(expected.mean.tolist())
        assert list(found["training"][scale]) == [f"{radius:g}" for radius in radii]
    without = measurements.rise_on_batches(replace(plain, batch_size=40), batches=2)
    assert without["test"] == found["test"]
    assert without["training"] != found["training"]


def test_pgd_must_be_able_to_reach_the_edge_of_its_ball(tiny: Subject) -> None:
    assert measurements.robustness(tiny, radius=0.4, images=5)["step_size"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"10 steps of 0.01 for a radius of 0.5; take more steps, or longer ones"):
        measurements.robustness(tiny, radius=0.5, step_size=0.01)
    with pytest.raises(ValueError, match="a radius is at most 1, got 4"):
        measurements.robustness(tiny, radius=4.0)


def test_steps_that_reach_the_edge_but_for_rounding_reach_it() -> None:
    for pixels, steps in itertools.product(range(1, 33), range(1, 101)):
        measurements.check_attack(radius=pixels / 255, step_size=pixels / (255 * steps), steps=steps)
