"""The doctor: every broken training is found by the one finding that names it, and healthy ones are left in peace."""

import random
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from flatmin import AMP, RadiusScheduler, doctor, groups
from flatmin.doctor import Finding, examine
from flatmin.doctor.training import new_training
from tests import ROOT
from tests.support.cases import mlp, same
from tests.support.doctor_cases import BROKEN, HEALTHY, TrainingParts, make, not_seeded
from tests.support.processes import flatmin, words

NAMES = [
    *("set-up", "mode", "loss", "GradScaler", "gradients", "parameters", "closure repeats", "zero_grad", "clipping"),
    *("BatchNorm", "dropout", "θ comes back", "rounding", "ball", "ascent", "radius", "ε = 0", "cost"),
]


def named(findings: list[Finding], name: str) -> Finding:
    (finding,) = (finding for finding in findings if finding.name == name)
    return finding


def test_the_page_explains_every_finding() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    explained = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:]
    assert explained == [NAMES[0], "schedule", "ranks", *NAMES[1:]]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_gets_no_warning(name: str) -> None:
    findings = examine(HEALTHY[name])
    assert {finding.verdict for finding in findings} == {"ok"}
    idle = HEALTHY[name]()[1].param_groups[0].get("epsilon") == 0
    left_out = {"BatchNorm", "dropout", "θ comes back", "rounding", "ball", "ascent", "cost"} if idle else set()
    assert [finding.name for finding in findings] == [name for name in NAMES if name not in left_out]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_training_is_found_by_the_one_finding_that_names_it(name: str) -> None:
    make_training, which, verdict, text = BROKEN[name]
    problems = [finding for finding in examine(make_training) if finding.verdict in ("warning", "error")]
    assert [(finding.name, finding.verdict) for finding in problems] == [(which, verdict)]
    assert text in f"{problems[0].seen} {problems[0].change}"
    assert problems[0].change


def test_what_cannot_be_told_is_not_guessed() -> None:
    for make_training, names in {
        BROKEN["dropout without model="][0]: {"ascent", "radius"},
        BROKEN["None is returned"][0]: {"ascent", "radius"},
        not_seeded: {"ε = 0"},
    }.items():
        findings = examine(make_training)
        assert {finding.name for finding in findings if finding.verdict == "cannot tell"} == names


def test_numbers_are_those_of_the_training() -> None:
    findings = examine(HEALTHY["two ascents"])
    assert "for 3 passes; extra memory: 2 times the parameters" in named(findings, "cost").seen
    assert "ε = 0.1, ζ = 1" in named(findings, "radius").seen
    assert "100% of the steps" in named(findings, "radius").seen
    lazy = named(examine(lambda: make(wrap=lambda model: AMP(SGD(model.parameters(), lr=0.1), epsilon=9.0))), "radius")
    assert "ε is never reached: ζ limits Δ" in lazy.seen
    assert "in 0% of the steps" in lazy.seen
    assert "4 are frozen" not in named(findings, "gradients").seen
    assert "2 are frozen" in named(examine(HEALTHY["a frozen layer"]), "gradients").seen
    assert "all 0 at these weights in down.weight" in named(examine(HEALTHY["a low-rank adapter"]), "gradients").seen


@pytest.mark.parametrize(
    ("loss", "length", "guess"), [(2.3, 0.5, 0.1), (2.3, 30.0, 0.02), (0.0, 1.0, 0.1), (1, 1e4, 2e-5)]
)
def test_the_first_guess_is_a_round_number_and_no_larger_than_is_safe(loss: float, length: float, guess: float) -> None:
    assert doctor.first_guess(loss, length) == guess


def test_an_examination_leaves_the_world_as_it_was() -> None:
    model, *_ = make()
    before = [param.detach().clone() for param in model.parameters()]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    scale = torch.amp.GradScaler.scale
    for name in ("dropout", "fp16 autocast, scaled", "a low-rank adapter"):
        examine(HEALTHY[name])
    for name in ("random in the closure", "numpy in the closure", "a crash"):
        examine(BROKEN[name][0])
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert torch.amp.GradScaler.scale is scale
    assert same(before, model.parameters())


def test_a_crash_is_told_with_the_user_s_lines_alone() -> None:
    (crash,) = (finding for finding in examine(BROKEN["a crash"][0]) if finding.verdict == "error")
    assert "doctor_cases.py" in crash.seen
    assert "RuntimeError" in crash.seen
    assert "flatmin/doctor" not in crash.seen
    assert "Traceback" not in crash.seen


def sparse() -> TrainingParts:
    model: Any = torch.nn.Sequential(torch.nn.Embedding(6, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    optimizer = AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)
    x, y = torch.randint(0, 6, (10, 2)), torch.randint(0, 3, (10,))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return model, optimizer, closure


def test_what_flatmin_itself_refuses_is_told_too() -> None:
    (refused,) = (finding for finding in examine(sparse) if finding.verdict == "error")
    assert refused.name == "optimizer.step(closure)"
    assert "needs dense gradients" in refused.seen


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "got an object of type NoneType"),
        ((1, 2), "got 2 values"),
        ((1, 2, 3), "as the first value, where a torch.nn.Module belongs"),
        ((torch.nn.LazyLinear(3), SGD(mlp().parameters(), lr=0.1), print), "lazy layers without a shape"),
        ((mlp(), mlp(), 3), "as the second value, where a torch.optim.Optimizer belongs"),
        ((mlp(), SGD(mlp().parameters(), lr=0.1), 3), "the closure of make_training"),
        ((mlp(), SGD(mlp().parameters(), lr=0.1), print, 3), "the scaler of make_training"),
    ],
)
def test_what_make_training_must_return_is_said(returned: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        examine(lambda: returned)


# ---- the command

HEAD = """
    import torch
    from torch import nn
    import flatmin

    def training(net, **settings):
        optimizer = flatmin.AMP(torch.optim.SGD(net.parameters(), lr=0.1), epsilon=0.1, **settings)
        x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        return net, optimizer, closure

    def make_training():
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        return training(model, model=model)

    def forgotten():
        return training(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    def wrong():
        return training(nn.Linear(5, 3))

    def nothing():
        return None
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_training_module.py").write_text(textwrap.dedent(HEAD))
    (tmp_path / "broken_module.py").write_text("import torch\n\nvalue = 1 / 0\n")
    (tmp_path / "misspelt.py").write_text("def make_training(:\n")
    return tmp_path


def test_the_command_examines_a_training_and_says_what_to_change(mine: Path) -> None:
    for name in ("my_training_module:make_training", f"{mine}/my_training_module.py"):
        healthy = flatmin("doctor", name)
        assert healthy.exit_code == 0, healthy.output
        assert "no errors, no warnings" in words(healthy.stdout)
        assert "ε = 0 ok 3 steps with ε = 0 equal those of the plain optimizer, bit for bit" in words(healthy.stdout)
        assert "versions" not in healthy.stdout
    warned = flatmin("doctor", "my_training_module:forgotten")
    assert warned.exit_code == 0, warned.output
    assert "no errors, 1 warning" in words(warned.stdout)
    assert "BatchNorm warning 1.num_batches_tracked grows by 2 in a step" in words(warned.stdout)
    assert "→ flatmin.AMP(base, epsilon=…, model=model)" in words(warned.stdout)


def test_a_crash_of_the_user_s_code_is_shown_with_its_own_lines(mine: Path) -> None:
    for name, doing, line, message in (
        ("my_training_module:wrong", "calling the closure", "nn.functional.cross_entropy(net(x), y)", "RuntimeError"),
        ("broken_module:make_training", "importing broken_module:make_training", "value = 1 / 0", "ZeroDivisionError"),
        ("misspelt.py", "importing misspelt.py", "def make_training(:", "SyntaxError"),
    ):
        result = flatmin("doctor", name)
        assert result.exit_code == 1, result.output
        text = words(result.stdout)
        assert doing in text
        assert line in text
        assert message in text
        assert "1 error, no warnings; what comes after it was not examined" in text
        assert "flatmin/doctor" not in text


def test_a_request_that_makes_no_sense_is_refused(mine: Path) -> None:
    for arguments, message in (
        (["convnet"], "takes mymodule:make_training or file.py:make_training, got 'convnet'"),
        (["my_training_module:absent"], "no function or class 'absent'"),
        (["absent.py"], "name your own function as file.py:make_training"),
        (["absent_module:make"], "there is no module 'absent_module'"),
        (["my_training_module:nothing"], "must return (model, optimizer, closure)"),
        (["my_training_module:make_training", "--model", "convnet"], "leave out the flags, or the training"),
        (["my_training_module:make_training", "--device", "cpu"], "leave out the flags, or the training"),
    ):
        result = flatmin("doctor", *arguments)
        assert result.exit_code == 2, result.output
        assert message in words(result.stderr)


def test_of_a_late_start_the_groups_that_are_not_perturbed_stay_so() -> None:
    """Also where make_training does not keep the scheduler; and an ε of 0 in all groups is no late start."""

    def parts(*, late: bool) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        split = groups(model, perturb=lambda name, _: name.startswith("0."))
        optimizer = AMP(SGD(split, lr=0.1), epsilon=0.1, model=model)
        if late:
            RadiusScheduler(optimizer, 100, start=0.75)
        else:
            for group in optimizer.param_groups:
                group["epsilon"] = 0.0

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        return model, optimizer, closure

    found = new_training(partial(parts, late=True))
    assert [group["epsilon"] for group in found.optimizer.param_groups] == [0.1, 0.0]
    assert found.starts_late
    assert not new_training(partial(parts, late=False)).starts_late


@pytest.mark.parametrize(
    ("total_steps", "place", "verdict", "text"),
    [
        (40, "scheduler_per_step", "ok", "after each step, and counts 40 calls"),
        (10, "scheduler", "ok", "after each epoch, and counts 10 calls"),
        (
            40,
            "scheduler",
            "warning",
            "after each epoch, 10 times, but its total_steps is 40 return it as scheduler_per",
        ),
        (
            10,
            "scheduler_per_step",
            "warning",
            "after each step, 40 times, but its total_steps is 10 return it as sched",
        ),
        (30, "scheduler_per_step", "warning", "give it total_steps=40"),
        (30, "chained", "warning", "give it total_steps=40"),
        (40, "", "cannot tell", "does not say who calls its step()"),
    ],
)
def test_a_schedule_that_is_not_called_as_often_as_it_counts_is_found(
    total_steps: int, place: str, verdict: str, text: str
) -> None:
    def make_training() -> dict[str, Any]:
        model, optimizer, closure = make()
        scheduler: Any = RadiusScheduler(optimizer, total_steps, start=0.5)
        made = {"model": model, "optimizer": optimizer, "closure": lambda _: closure(), "batches": [(None,)] * 4}
        if place == "chained":
            rate = torch.optim.lr_scheduler.ConstantLR(optimizer)
            parts = {"scheduler_per_step": torch.optim.lr_scheduler.ChainedScheduler([rate, scheduler], optimizer)}
        else:
            parts = {place: scheduler} if place else {}
        return {**made, **parts, "epochs": 10}

    (finding,) = (finding for finding in examine(make_training) if finding.name == "schedule")
    assert finding.verdict == verdict
    assert text in f"{finding.seen} {finding.change}"
    assert bool(finding.change) == (verdict != "ok")


def test_a_radius_that_does_not_change_has_no_schedule_to_check() -> None:
    def make_training() -> Any:
        model, optimizer, closure = make()
        scheduler = RadiusScheduler(optimizer, 40, start=0.0)
        return {"model": model, "optimizer": optimizer, "closure": closure, "scheduler": scheduler, "epochs": 3}

    assert [finding.name for finding in examine(make_training)] == NAMES
