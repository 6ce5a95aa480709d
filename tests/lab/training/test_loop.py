"""Training is the plain loop, can be stopped anywhere and resumed bit for bit, and reports true numbers."""

import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flatmin
from flatmin.capture.captured_step import CapturedStep
from flatmin.capture.clipped_sgd import ClippedSGD
from flatmin.core.capturable import CannotCaptureError
from flatmin.optim.radius import matched
from flatmin_lab import methods
from flatmin_lab.data import Batches, Normalisation, augmentation
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import Epoch, Finished, Note, Progress, RunError, Started, Stopped
from flatmin_lab.system.rng import RandomScope, generator
from flatmin_lab.training.build import build_model, prepare_data
from flatmin_lab.training.captured_forward import CapturedForward
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.loop import train
from tests.support.small_runs import TIMES, after, images, lasting, learner_of, run, same, tiny_data, tiny_recipe

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in methods.METHODS},
    "amp, N = 2": {"method": "amp", "settings": {"epsilon": 0.1, "inner_iter": 2}},
    "late": {"method": "amp", "settings": {"epsilon": 0.1, "start": 0.4, "growth": "linear", "every": 2}},
    "less": {"method": "amp", "settings": {"epsilon": 0.1, "ascent_share": 0.3}},
    "mixed": {"method": "amp", "settings": {"epsilon": 0.1, "regulariser": "mixup"}},
    "auto": {
        "method": "amp",
        "settings": {"epsilon": "auto", "held_out": 0.2, "start": 0.2, "matches": 2},
        "label_noise": 0.2,
    },
    "averaged": {"method": "amp", "ema": 0.9, "settings": {"epsilon": 0.1}},
    "clipped": {"method": "erm", "clip_norm": 0.1, "schedule": "cosine", "warmup": 1.0},
    "fp16": {"method": "amp", "precision": "fp16", "clip_norm": 1.0, "settings": {"epsilon": 0.1}},
    "bf16": {"method": "dropout", "precision": "bf16", "channels_last": True, "schedule": "one_cycle"},
    "noise": {"method": "mixup", "label_noise": 0.3, "augment": "vanilla"},
    "validation": {"method": "erm", "validation": True, "schedule": "constant"},
    "exempt norms": {"method": "amp", "exempt_norms": True, "weight_decay": 0.1, "settings": {"epsilon": 0.1}},
    "muon": {"method": "amp", "optimizer": "muon", "lr": 0.02, "settings": {"epsilon": 0.1}},
    "no momentum": {"method": "rmp", "momentum": 0.0, "nesterov": False},
}
MEASURED = ("train_loss", "train_error", "test_error", "test_nll")


def twin(recipe: Any, *, epsilon: float) -> dict[str, Tensor]:
    """The loop that everyone writes, with torch's own optimizer and schedule: the weights after it."""
    data = tiny_data()
    normalise = Normalisation.of(data.train)
    torch.manual_seed(generator("weights", 0).initial_seed())
    model = build_model(recipe, data, methods.build("erm"))
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    if epsilon:
        optimizer = flatmin.AMP(optimizer, epsilon=epsilon, model=model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 11], gamma=0.1)
    batches = Batches(split=data.train, batch_size=10, normalise=normalise, augment=augmentation("none", data), seed=0)
    for epoch in range(3):
        for x, y in batches.epoch(epoch):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, everyone returns a tensor
            schedule.step()
    return model.state_dict()


@pytest.mark.parametrize("regulariser", methods.BESIDE_AMP)
def test_with_a_radius_of_0_amp_beside_a_regulariser_is_that_regulariser(regulariser: str) -> None:
    def lines(method: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
        events = run(tiny_recipe(method=method, settings=settings))
        return [{key: event.numbers[key] for key in MEASURED} for event in events if isinstance(event, Epoch)]

    alone = lines(regulariser, {})
    assert alone == lines("amp", {"epsilon": 0.0, "regulariser": regulariser})
    assert alone != lines("amp", {"epsilon": 0.3, "regulariser": regulariser})


@pytest.mark.parametrize(("method", "epsilon"), [("erm", 0.0), ("amp", 0.1)])
def test_it_is_the_loop_that_everyone_writes(tmp_path: Path, method: str, epsilon: float) -> None:
    """Bit for bit: SGD itself for ERM, AMP around it for AMP, torch's scheduler for the rate."""
    recipe = tiny_recipe(method=method, settings={"epsilon": epsilon} if epsilon else {})
    run(recipe, tmp_path / "run")
    trained = lasting(tmp_path / "run")
    for name, expected in twin(recipe, epsilon=epsilon).items():
        assert torch.equal(trained[f"model.{name}"], expected), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_anywhere_it_goes_on_to_the_same_bits(tmp_path: Path, variant: str) -> None:
    recipe = tiny_recipe(**VARIANTS[variant])
    whole = run(recipe, tmp_path / "whole")
    expected = lasting(tmp_path / "whole")
    for first in (3, 5):  # within epochs of five steps, and at their ends
        folder = tmp_path / f"stopped-{first}"
        events = run(recipe, folder, stop=after(first))
        assert isinstance(events[-1], Stopped)
        while not isinstance(events[-1], Finished):
            events = run(recipe, folder, resume=True, stop=after(5))
        assert same(lasting(folder), expected)
    assert isinstance(whole[-1], Finished)


def test_moments_come_back_in_the_layout_of_the_weights(tmp_path: Path) -> None:
    recipe = tiny_recipe(channels_last=True, augment="none")
    run(recipe, tmp_path / "run", stop=after(3))
    learner = learner_of(recipe, tiny_data())
    learner.load(checkpoint.read(checkpoint.listed(tmp_path / "run")[0]))
    pairs = [(param, values["momentum_buffer"]) for param, values in learner.optimizer.state.items()]
    assert len(pairs) == len(list(learner.model.parameters()))
    assert all(param.stride() == moment.stride() for param, moment in pairs)
    assert any(not param.is_contiguous() for param, _ in pairs)


def test_of_a_checkpoint_from_a_gpu_the_implementation_is_not_taken_over(tmp_path: Path) -> None:
    """There AdamW is fused and capturable, which it cannot be on a CPU."""
    recipe = tiny_recipe(optimizer="adamw", lr=0.01)
    run(recipe, tmp_path / "run", stop=after(3))
    learner, saved = learner_of(recipe, tiny_data()), checkpoint.read(checkpoint.listed(tmp_path / "run")[0])
    for group in saved.state["optimizer"]["param_groups"]:
        group |= {"capturable": True, "fused": True}
    learner.load(saved)
    assert [(group["capturable"], group["fused"]) for group in learner.optimizer.param_groups] == [(False, None)]
    learner.step(*next(learner.batches.parts(0)), 0.01)


def test_stopped_while_it_measures_it_measures_again(tmp_path: Path) -> None:
    """Asked in the first evaluation, five steps into it: all steps of the epoch are saved, its line is not."""
    events = run(tiny_recipe(), tmp_path / "run", stop=after(5))
    assert isinstance(events[-1], Stopped)
    state = lasting(tmp_path / "run")["state"]
    assert (state["epoch"], state["batch"], state["lines"]) == (0, 5, [])
    run(tiny_recipe(), tmp_path / "whole")
    run(tiny_recipe(), tmp_path / "run", resume=True)
    assert same(lasting(tmp_path / "run"), lasting(tmp_path / "whole"))


def test_when_checkpoints_are_taken_changes_nothing(tmp_path: Path) -> None:
    recipe = tiny_recipe(method="mixup", ema=0.5)
    run(recipe, tmp_path / "rare", checkpoint_epochs=99)
    run(recipe, tmp_path / "often", checkpoint_minutes=0)
    assert same(lasting(tmp_path / "rare"), lasting(tmp_path / "often"))


def test_what_the_caller_draws_changes_nothing_and_is_not_changed(tmp_path: Path) -> None:
    recipe = tiny_recipe(method="mixup")
    run(recipe, tmp_path / "quiet")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    events = train(recipe, tiny_data(), folder=tmp_path / "loud")
    drawn = [torch.rand(()) for event in events if isinstance(event, Epoch)]
    assert torch.equal(torch.stack(drawn), expected)
    assert same(lasting(tmp_path / "quiet"), lasting(tmp_path / "loud"))


def test_every_method_has_the_same_first_weights_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {}
    real = Learner.step

    def spying(self: Learner, index: Tensor, u: Tensor, *rest: float) -> dict[str, Tensor]:
        mine = seen.setdefault(self.recipe.method, [])
        if not mine:
            mine.extend(param.detach().clone() for param in self.model.parameters())
        mine.extend(self.batches.at(index, u))
        return real(self, index, u, *rest)

    monkeypatch.setattr(Learner, "step", spying)
    for method in methods.METHODS:
        run(tiny_recipe(method=method, epochs=2, augment="vanilla", label_noise=0.2), seed=3)
    reference = seen.pop("erm")
    assert len(seen) == 7
    for method, mine in seen.items():
        assert all(torch.equal(a, b) for a, b in zip(reference, mine, strict=True)), method


def test_another_seed_gives_other_weights_order_and_noise() -> None:
    one, other = (run(tiny_recipe(label_noise=0.3), seed=seed)[-1] for seed in (0, 1))
    assert isinstance(one, Finished)
    assert isinstance(other, Finished)
    assert one.result["test_nll"] != other.result["test_nll"]


def test_the_headline_is_the_last_epoch_and_the_best_one_is_named_so() -> None:
    events = run(tiny_recipe(epochs=4, lr=0.5))
    lines = [event.numbers for event in events if isinstance(event, Epoch)]
    result = events[-1].result if isinstance(events[-1], Finished) else {}
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert result["test_error"] == lines[-1]["test_error"]
    assert result["test_nll"] == lines[-1]["test_nll"]
    assert result["best_test_epoch_error"] == min(line["test_error"] for line in lines)
    assert lines[result["best_test_epoch"] - 1]["test_error"] == result["best_test_epoch_error"]
    assert sum(result["reliability"]["number"]) == 30


def test_a_tuning_run_never_looks_at_the_test_set() -> None:
    """With another test set nothing changes."""
    data = tiny_data()
    results = []
    for one in (data, replace(data, test=images(9, 7))):
        last = list(train(tiny_recipe(validation=True), one))[-1]
        assert isinstance(last, Finished)
        results.append({k: v for k, v in last.result.items() if k not in (*TIMES, "data_sha256")})
    assert results[0] == results[1]
    assert not any(key.startswith(("test", "best_test")) for key in results[0])
    assert {"validation_error", "validation_nll", "validation_ece"} <= results[0].keys()


def test_measurements_of_amp_are_in_every_line() -> None:
    line = next(
        event for event in run(tiny_recipe(method="amp", settings={"epsilon": 0.2})) if isinstance(event, Epoch)
    )
    assert line.numbers["sharpness"] > 0
    assert 0 < line.numbers["delta_norm"] <= 0.2 * (1 + 1e-6)
    assert line.numbers["skipped"] == 0


def test_memorised_is_the_share_of_wrong_labels_that_the_network_repeats() -> None:
    recipe = tiny_recipe(label_noise=0.25, epochs=60, model="mlp", model_settings={"side": 6}, weight_decay=0.0)
    lines = [event.numbers for event in run(recipe) if isinstance(event, Epoch)]
    assert lines[-1]["memorised"] > 0.9  # 11 of 44, memorised in the end
    assert lines[0]["memorised"] < 0.6
    assert "memorised" not in run(tiny_recipe())[-1].result  # type: ignore[union-attr]


@pytest.mark.parametrize("folder", [False, True])
def test_a_loss_that_is_not_finite_stops_with_the_step_named(tmp_path: Path, folder: bool) -> None:
    recipe = tiny_recipe(lr=1e30, warmup=1.0, epochs=2, schedule="constant")
    place = tmp_path / "run" if folder else None
    with pytest.raises(RunError, match=r"step \d+ .*--lr") as caught:
        run(recipe, place, checkpoint_minutes=0)
    if place is not None:
        assert "checkpoint-" in str(caught.value)
        kept = lasting(place)
        assert all(t.isfinite().all() for t in kept.values() if isinstance(t, Tensor) and t.is_floating_point())


def test_a_weight_that_is_not_finite_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite gradient at a finite loss: the loss tells a step later, the checkpoint must not wait for it."""
    real = Learner.step

    def spoilt(self: Learner, index: Tensor, u: Tensor, *rest: float) -> dict[str, Tensor]:
        measured = real(self, index, u, *rest)
        with torch.no_grad():
            next(self.model.parameters()).view(-1)[0] = math.inf
        return measured

    run(tiny_recipe(), tmp_path / "run", stop=after(2))
    before = lasting(tmp_path / "run")
    monkeypatch.setattr(Learner, "step", spoilt)
    with pytest.raises(RunError, match="after step 3"):
        run(tiny_recipe(), tmp_path / "run", resume=True, checkpoint_minutes=0)
    assert same(lasting(tmp_path / "run"), before)


def test_progress_comes_with_numbers_and_the_start_with_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatmin_lab.training.loop.PROGRESS_SECONDS", 0.0)
    events = run(tiny_recipe(method="amp", settings={"epsilon": 0.1}, epochs=1))
    assert isinstance(events[0], Started)
    assert events[0].steps == 5
    steps = [event for event in events if isinstance(event, Progress)]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5]
    assert {"loss", "error", "sharpness", "delta_norm"} <= steps[0].numbers.keys()


def test_the_averaged_weights_are_the_average() -> None:
    """Against a loop by hand: ē ← d·ē + (1 − d)·θ after every step, starting at the first θ."""
    learner = learner_of(tiny_recipe(ema=0.8), tiny_data())
    expected = None
    for index, u in learner.batches.parts(0):
        learner.step(index, u, 0.1)
        theta = [param.detach().double() for param in learner.model.parameters()]
        expected = theta if expected is None else [0.8 * e + 0.2 * t for e, t in zip(expected, theta, strict=True)]
    assert expected is not None
    assert learner.ema is not None
    for ours, theirs in zip(learner.ema.module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", methods.METHODS)
def test_clipping_bounds_the_step_and_not_the_perturbation(method: str, precision: Any) -> None:
    recipe = tiny_recipe(
        method=method,
        settings={"epsilon": 0.05} if method in ("amp", "rmp") else {},
        precision=precision,
        clip_norm=1e-3,
        momentum=0.0,
        nesterov=False,
        weight_decay=0.0,
    )
    learner = learner_of(recipe, tiny_data())
    for index, u in learner.batches.parts(0):
        before = [param.detach().clone() for param in learner.model.parameters()]
        measured = learner.step(index, u, 1.0)
        moved = [a - b for a, b in zip(learner.model.parameters(), before, strict=True)]
        assert torch.stack([m.norm() for m in moved]).norm().item() == pytest.approx(1e-3, rel=1e-2)
        if method == "amp":
            assert measured["delta_norm"].item() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("method", ["erm", "amp", "rmp"])
def test_an_overflow_in_fp16_is_counted_and_spoils_no_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The scale begins much too high: the first steps overflow and are skipped, the others count."""
    monkeypatch.setattr("flatmin_lab.training.learner.GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**22))
    settings = {} if method == "erm" else {"epsilon": 0.1}
    events = run(tiny_recipe(method=method, settings=settings, precision="fp16"), tmp_path / "run")
    lines = [event.numbers for event in events if isinstance(event, Epoch)]
    assert lines[0]["skipped"] > 0
    assert lines[-1]["skipped"] == 0
    assert all(math.isfinite(value) for line in lines for value in line.values())
    if method == "amp":
        assert lines[-1]["delta_norm"] == pytest.approx(0.1, rel=1e-2)


def test_what_cannot_be_trained_is_refused_before_it_begins() -> None:
    with pytest.raises(ValueError, match="the recipe is for digits, got the data set tiny"):
        list(train(replace(tiny_recipe(), data="digits"), tiny_data()))
    with pytest.raises(ValueError, match="BatchNorm needs at least two images"):
        run(tiny_recipe(batch_size=43))
    with pytest.raises(ValueError, match="32"):
        run(tiny_recipe(model="vgg16", model_settings={}))
    with pytest.raises(ValueError, match="got 0 and"):
        train(tiny_recipe(), tiny_data(), checkpoint_epochs=0)
    with pytest.raises(ValueError, match="leave out --compile or --no-capture"):
        train(tiny_recipe(compile=True), tiny_data(), capture=False)


def test_a_single_class_can_be_trained() -> None:
    data = tiny_data()
    alone = [replace(split, y=torch.zeros_like(split.y)) for split in (data.train, data.test)]
    last = list(train(tiny_recipe(), replace(data, train=alone[0], test=alone[1], names=["all"])))[-1]
    assert isinstance(last, Finished)
    assert last.result["test_error"] == 0


def test_on_a_cpu_compile_and_capture_change_nothing(tmp_path: Path) -> None:
    """There the step is the ordinary one: torch.compile comes with the graph."""
    recipe = tiny_recipe(method="amp", settings={"epsilon": 0.1}, epochs=1)
    run(recipe, tmp_path / "captured")
    run(recipe, tmp_path / "plain", capture=False)
    notes = [r.text for r in run(replace(recipe, compile=True), tmp_path / "compiled") if isinstance(r, Note)]
    assert notes == ["--compile applies on a GPU only: on cpu nothing is compiled"]
    plain, captured, compiled = (
        {name: value for name, value in lasting(tmp_path / run).items() if isinstance(value, Tensor)}
        for run in ("plain", "captured", "compiled")
    )
    assert same(plain, captured)
    assert same(plain, compiled)


def test_a_step_that_cannot_be_captured_is_a_note_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: CapturedStep, inputs: Any) -> Any:
        raise CannotCaptureError("it prints")

    assert not any(isinstance(event, Note) for event in run(tiny_recipe(epochs=1)))
    monkeypatch.setattr(CapturedStep, "reason", property(lambda step: step._failure))  # as on a GPU
    monkeypatch.setattr(CapturedStep, "_graph_for", refused)
    notes = [event for event in run(tiny_recipe(epochs=1)) if isinstance(event, Note)]
    assert [note.text for note in notes] == ["this step cannot be captured in a CUDA graph and runs eagerly: it prints"]


def test_only_what_is_clipped_has_an_optimizer_of_its_own() -> None:
    """A captured step has a kernel for torch's SGD itself."""
    for clip_norm, kind in ((None, SGD), (1.0, ClippedSGD)):
        assert type(learner_of(tiny_recipe(clip_norm=clip_norm), tiny_data()).optimizer.base) is kind


def test_the_average_is_torchs_own() -> None:
    """Weights, statistics and counts, bit for bit."""
    learner = learner_of(tiny_recipe(ema=0.8), tiny_data())
    theirs = AveragedModel(learner.model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    for index, u in learner.batches.parts(0):
        learner.step(index, u, 0.1)
        theirs.update_parameters(learner.model)
    assert learner.ema is not None
    expected = theirs.state_dict()
    assert learner.ema.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in learner.ema.state_dict().items())


def test_a_training_is_freed_when_it_ends() -> None:
    """Without waiting for the garbage collector: on a GPU its graphs hold memory that the next one needs."""
    learner = learner_of(tiny_recipe(method="amp"), tiny_data())
    learner.step(*next(learner.batches.parts(0)), 0.1)
    gone = weakref.ref(learner)
    gc.disable()
    try:
        del learner
        assert gone() is None
    finally:
        gc.enable()


class TestAnswers:
    """What a capture meets, with everything of CUDA made up."""

    @pytest.fixture(autouse=True)
    def made_up(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        waited: list[str] = []

        class Stream:
            def __init__(self, name: object) -> None:
                self.name = name

            def wait_stream(self, other: object) -> None:
                waited.append(str(self.name))

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("current"))
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        return waited

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("it prints")])
    def test_a_lack_of_memory_is_told_and_the_stream_waited_for(self, made_up: list[str], error: Exception) -> None:
        class Failing(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise error

        forward = CapturedForward(Failing())
        with pytest.raises(torch.OutOfMemoryError) if "memory" in str(error) else nullcontext():
            forward._capture(torch.ones(1))
        assert forward.graph is None
        assert made_up == ["cpu", "current"]


class TestRandomScope:
    def test_the_training_s_gpu_is_the_current_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current: list[object] = ["cuda:0"]

        @contextmanager
        def entered(device: torch.device) -> Iterator[None]:
            current.append(str(device))
            yield
            current.pop()

        monkeypatch.setattr(torch.cuda, "device", entered)
        for name in ("_state", "_set_state", "_private_copy"):
            monkeypatch.setattr(f"flatmin_lab.system.rng.{name}", lambda *_: torch.zeros(1))
        with RandomScope(torch.device("cuda", 1), deterministic=False).active():
            assert current[-1] == "cuda:1"
        assert current == ["cuda:0"]

    def test_own_random_numbers_and_switches_inside_the_callers_outside(self) -> None:
        torch.manual_seed(1)
        expected = torch.rand(4)
        torch.manual_seed(1)
        before = torch.backends.cudnn.benchmark
        ours = [RandomScope(torch.device("cpu"), deterministic=deterministic) for deterministic in (False, True)]
        drawn: list[list[Tensor]] = [[], []]
        outside = []
        for _ in range(4):
            for scope, mine in zip(ours, drawn, strict=True):
                with scope.active():
                    assert torch.are_deterministic_algorithms_enabled() == scope.deterministic
                    if not mine:
                        torch.manual_seed(7)
                    mine.append(torch.rand(()))
            outside.append(torch.rand(()))
        assert torch.equal(torch.stack(outside), expected)
        assert drawn[0] == drawn[1]
        assert torch.backends.cudnn.benchmark == before
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_late_start_is_erm_until_then_bit_for_bit_and_costs_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    real = Learner.step

    def step(self: Learner, *given: Any) -> dict[str, Tensor]:
        seen: list[int] = []
        with self.model.register_forward_hook(lambda *_: seen.append(1)):
            measured = real(self, *given)
        passes.append(len(seen))
        return measured

    monkeypatch.setattr(Learner, "step", step)
    epochs: dict[str, list[dict[str, Any]]] = {}
    for method, settings in (("erm", {}), ("amp", {"epsilon": 0.1, "start": 0.4, "every": 2})):
        events = run(tiny_recipe(method=method, settings=settings))
        lines = [{**event.numbers, **dict.fromkeys(TIMES)} for event in events if isinstance(event, Epoch)]
        epochs[method] = lines
    assert epochs["amp"][0] == epochs["erm"][0]
    assert ["delta_norm" in line for line in epochs["amp"]] == [False, True, True]
    assert epochs["amp"][1]["test_nll"] != epochs["erm"][1]["test_nll"]
    assert passes == [1] * 15 + [1] * 6 + [2, 1] * 4 + [2]


def test_a_matched_radius_stays_once_all_images_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(method="amp", settings={"epsilon": "auto", "held_out": 0.25, "release": 0.5}, epochs=6)
    trained: list[Tensor] = []
    real = Learner.step

    def step(self: Learner, index: Tensor, *given: Any) -> dict[str, Tensor]:
        trained.append(index)
        return real(self, index, *given)

    monkeypatch.setattr(Learner, "step", step)
    lines = [event.numbers for event in run(recipe) if isinstance(event, Epoch)]
    held_out = prepare_data(recipe, tiny_data(), 0).held_out
    assert held_out is not None
    assert len(held_out) == 11
    epochs = [torch.cat(trained[5 * epoch : 5 * epoch + 5]) for epoch in range(6)]
    assert [bool(torch.isin(seen, held_out).any()) for seen in epochs] == [False] * 3 + [True] * 3
    assert [len(seen) for seen in epochs] == [44] * 6
    radii = [line["epsilon"] for line in lines]
    assert len(set(radii[:4])) == 4  # moves after each of the first three epochs
    assert len(set(radii[3:])) == 1
    assert [line["held_out_nll"] is None for line in lines] == [False] * 3 + [True] * 3


def test_a_radius_is_matched_within_epochs_too_once_steps_are_perturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six epochs of five steps, perturbed from the third on, matched until the end of the fourth."""
    settings = {"epsilon": "auto", "held_out": 0.25, "start": 1 / 3, "release": 0.5, "matches": 2}
    calls: list[str] = []
    for owner, letter in ((Learner, "."), (flatmin.MatchedRadius, "m")):

        def call(self: Any, *given: Any, letter: str = letter, real: Any = owner.step) -> Any:
            calls.append(letter)
            return real(self, *given)

        monkeypatch.setattr(owner, "step", call)
    run(tiny_recipe(method="amp", settings=settings, epochs=6))
    assert "".join(calls) == ".....m" * 2 + "...m..m" * 2 + "....." * 2


def test_a_late_start_is_matched_for_as_large_a_share_of_what_is_left() -> None:
    settings: dict[str, Any] = {"epsilon": "auto", "start": 0.5, "release": 0.5}
    assert methods.build("amp", **settings).release == 0.75
    assert methods.build("amp", epsilon="auto").release == methods.AUTO_RELEASE


def test_a_matched_radius_is_resumed_by_the_rule_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(method="amp", settings={"epsilon": "auto"}, epochs=6)
    run(recipe, tmp_path / "run", stop=after(3))
    assert lasting(tmp_path / "run")["state"]["matched"]["rule"] == {"version": 3, "held_out_images": 4, "epochs": 4}
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for name, value, apart in (("AUTO_RULE", 4, "version is 3 there and 4 here"), ("AUTO_RELEASE", 1.0, "epochs is 4")):
        with monkeypatch.context() as patched:
            patched.setattr(methods, name, value)
            with pytest.raises(ValueError, match=f"by a different rule: {apart}.*choose another with --out"):
                run(recipe, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    (newest, *_) = checkpoint.listed(tmp_path / "run")
    saved = checkpoint.read(newest)
    first = {key: value for key, value in saved.state["matched"].items() if key != "rule"}
    checkpoint.write(newest, checkpoint.Checkpoint(saved.tensors, {**saved.state, "matched": first}))
    with pytest.raises(ValueError, match=r"by a different rule: version is 1 there and 3 here\."):
        run(recipe, tmp_path / "run", resume=True)


def test_another_way_of_matching_is_another_rule() -> None:
    """If one of these numbers must change, AUTO_RULE must too."""
    factors = (matched.MAX_FACTOR, matched.MIN_FACTOR, matched.MIN_SHARE, matched.MIN_AT_EDGE)
    first, release = methods.AUTO_FIRST_RADIUS, methods.AUTO_RELEASE
    assert (methods.AUTO_RULE, *factors, first, release) == (3, 3.0, 2 / 3, 0.01, 0.5, 0.1, 0.6)
