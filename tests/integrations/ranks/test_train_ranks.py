"""Several processes train one model as one process does; they stop, fail and resume together, and print once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import HANG_SECONDS, PYTHONPATH
from tests.integrations.ranks.train_jobs import APART, JOBS, METHODS
from tests.programs.kill_training import differences, state_of

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "300",
}
ABORTED = "terminate called without an active exception"  # gloo, of a process that is done: see test_examples.py
Seen = list[dict[str, Any]]
Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files(tmp_path_factory.mktemp("command"))


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    program = [sys.executable, "-m", "tests.integrations.ranks.forked_ranks", str(folder), json.dumps(cases(folder))]
    limit = 2 * HANG_SECONDS  # a case that hangs is ended after one, and the others have theirs
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=limit)
    assert done.returncode == 0, done.stderr
    found: Told = json.loads(done.stdout)
    return found


# ---- as functions, in two processes and in three


THREE = ("as one: mixup", "as one: flooding", "as one: amp", "apart: dropout", "measured")


def seen(folder: Path, told: Told, processes: str) -> Seen:
    count = {"two": 2, "three": 3}[processes]
    assert told[processes]["codes"] == [0] * count, told[processes]["said"]
    return [torch.load(folder / processes / f"rank{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.fixture(scope="module")
def two(folder: Path, told: Told) -> Seen:
    return seen(folder, told, "two")


@pytest.fixture(scope="module")
def three(folder: Path, told: Told) -> Seen:
    return seen(folder, told, "three")


def cells(kind: str, names: Iterable[str]) -> list[Any]:
    """A job in two processes, and some of them in three."""
    jobs = [f"{kind}: {name}" for name in names]
    pairs = [("two", job) for job in jobs] + [("three", job) for job in jobs if job in THREE]
    return [pytest.param(*pair, id=" ".join(pair)) for pair in pairs]


@pytest.fixture
def found(request: pytest.FixtureRequest, processes: str, job: str) -> Seen:
    """What each rank saw of a job."""
    return [results[job] for results in request.getfixturevalue(processes)]


@pytest.mark.parametrize(("processes", "job"), cells("as one", METHODS))
def test_they_train_as_one_process_does(found: Seen) -> None:
    """15 steps without BatchNorm and dropout, in float32: weights within 1e-5, and bitwise equal on all ranks."""
    for rank in found:
        for ours, expected, first in zip(rank["weights"], rank["expected"], found[0]["weights"], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(ours, first)
        assert rank["lines"] == found[0]["lines"]
        for line, theirs in zip(rank["lines"], rank["expected_lines"], strict=True):
            assert line == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        assert rank["ranks"] == len(found)


@pytest.mark.parametrize(("processes", "job"), cells("apart", APART))
def test_stopped_by_one_rank_they_go_on_to_the_same_bits(found: Seen) -> None:
    for rank in found:
        assert rank["apart"] == []
        assert rank["stopped"] == found[0]["stopped"]
        assert rank["stopped"][0] == "enough"
        assert 0 < rank["stopped"][1] <= 7
        assert rank["lines"] == found[0]["lines"]
        assert all(torch.equal(a, b) for a, b in zip(rank["weights"], found[0]["weights"], strict=True))


def test_gone_on_with_by_another_number_they_say_so(two: Seen) -> None:
    first, other = (rank["resumes as one"] for rank in two)
    note = "resumed under other conditions (ranks {} then, {} now): correct, but perhaps not bit for bit the same"
    assert first["notes"] == [note.format(2, 1), note.format(1, 2)]
    assert other["notes"] == [note.format(1, 2)]
    for ours in first["weights"][:2]:
        torch.testing.assert_close(ours, first["weights"][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("processes", "job"), [("two", "measured"), ("three", "measured")])
def test_the_test_set_is_shared_out_and_gathered_in_order(found: Seen) -> None:
    for rank in found:
        assert torch.equal(rank["shared"], rank["alone"])
        torch.testing.assert_close(rank["few"], rank["alone"])
        assert rank["stopped"]


def test_what_is_not_finite_on_one_rank_stops_all(two: Seen) -> None:
    for rank in (results["spoilt"] for results in two):
        assert rank["found"][0] == rank["diverged"][0] == "DivergedError"
        assert "a weight after step 5 is infinite" in rank["found"][1]
        assert "the loss of step 2" in rank["diverged"][1]
        assert rank["saved"] == 0


REFUSED = {
    "recipe": "same lr, got 0.1 on rank 0 and 0.2 on rank 1",
    "seed": "same seed, got 0 on rank 0 and 1 on rank 1",
    "data": "same data set (SHA-256)",
    "epochs": "same checkpoint_epochs, got 1 on rank 0 and 2 on rank 1",
    "model": "32",
    "folder": "would be inside the file",
    "small": "a batch size of 1 leaves one of 2 processes 0 of the 1 images of a batch",
    "norm": "a batch size of 41 leaves one of 2 processes 1 of the 3 images of a batch",
    "inputs": "adversarial training takes inputs of 0.4 to 0.6",
    "set": "sync_perturbation must be true or false, got a str: 'no'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(two: Seen, name: str) -> None:
    for rank in (results["refused"] for results in two):
        kind, text = rank["found"][name]
        assert REFUSED[name] in text
        assert kind in ("ValueError", "TypeError", "FileExistsError", "OtherRankRefusedError")
        assert not rank["begun"]


def test_a_folder_that_cannot_be_written_ends_all(two: Seen) -> None:
    first, other = (results["full disk"] for results in two)
    assert first["found"] == ["RunError", first["found"][1]]
    assert other["found"] == ["OtherRankError", f"rank 0 of 2: {first['found'][1]}"]
    assert first["epochs"] == other["epochs"] == 1


# ---- the command, in forked processes

TRAIN = ["train", "--data", "digits", "--model", "mlp", "--method", "amp", "--batch-size", "150", "--epochs", "3"]
OFTEN = [*TRAIN, "--checkpoint-minutes", "0"]


def files(folder: Path) -> Path:
    """A small data set in two versions."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": generator.normal(size=(60, 4)).astype("float32"),
        "y_train": np.arange(60) % 3,
        "x_test": generator.normal(size=(30, 4)).astype("float32"),
        "y_test": np.arange(30) % 3,
    }
    np.savez(folder / "points.npz", **arrays)
    for name in ("elsewhere", "two", "three"):
        (folder / name).mkdir()
    np.savez(folder / "elsewhere" / "points.npz", **{**arrays, "x_test": arrays["x_test"] + 1})
    (folder / "file").write_text("")
    return folder


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    def out(name: str) -> list[str]:
        return ["--out", str(folder / name)]

    own = ["train", "--epochs", "1", "--data"]
    again = ["train", "--resume"]
    return {
        "two": {"jobs": list(JOBS), "place": "two"},
        "three": {"jobs": THREE, "place": "three", "ranks": 3},
        "whole": {"flags": [*OFTEN, *out("whole")]},
        "killed": {"flags": [*OFTEN, *out("killed")], "fates": {"0": {"SIGKILL": 17}, "1": {"SIGKILL": 17}}},
        "killed, again": {"flags": again, "own": {"0": out("killed"), "1": out("nowhere")}},
        "stopped": {"flags": [*OFTEN, *out("stopped")], "fates": {"1": {"SIGTERM": 14}}},
        "stopped, again": {"flags": [*again, *out("stopped")]},
        "finished, again": {"flags": [*again, *out("stopped")]},
        "lost": {"flags": [*TRAIN, *out("lost")], "fates": {"1": {"SIGKILL": 5}}},
        "crashed": {"flags": [*TRAIN, *out("crashed")], "fates": {"1": {"crash": 5}}},
        "diverged": {"flags": [*TRAIN, *out("diverged"), "--lr", "1e30"]},
        "seeds": {"flags": [*TRAIN, *out("seeds"), "--seeds", "2"]},
        "together": {"flags": [*TRAIN, *out("seeds"), "--together", "2"]},
        "recipe": {"flags": [*TRAIN, *out("recipe")], "own": {"1": ["--lr", "0.2"]}},
        "version": {"flags": [*TRAIN, *out("version")], "fates": {"1": {"version": 0}}},
        "data": {
            "flags": [*own, str(folder / "points.npz"), *out("data")],
            "own": {"1": ["--data", str(folder / "elsewhere" / "points.npz")]},
        },
        "missing": {
            "flags": [*own, str(folder / "points.npz"), *out("missing")],
            "own": {"1": ["--data", str(folder / "nothing.npz")]},
        },
        "folder": {"flags": [*TRAIN, *out("file/run")]},
        "small": {"flags": [*TRAIN, *out("small"), "--batch-size", "1"]},
        "held": {"flags": [*TRAIN, *out("whole")]},
    }


def test_no_process_waits_for_one_that_has_left(told: Told) -> None:
    assert {name: case["codes"] for name, case in told.items() if None in case["codes"]} == {}


def test_one_folder_and_one_voice(told: Told, folder: Path) -> None:
    first, other = told["whole"]["said"]
    assert told["whole"]["codes"] == [0, 0]
    assert other == ""
    assert "2 processes" in first
    assert first.count("test, last epoch") == 1
    result, config = (json.loads((folder / "whole" / f"{name}.json").read_text()) for name in ("result", "config"))
    assert result["ranks"] == config["ranks"] == 2
    assert result["batch_size"] == 150


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_killed_or_stopped_it_goes_on_to_the_same_bits(told: Told, folder: Path, how: str) -> None:
    assert told[how]["codes"] == {"killed": [-9, -9], "stopped": [143, 143]}[how]
    assert told[f"{how}, again"]["codes"] == [0, 0]
    assert differences(state_of(folder / "whole"), state_of(folder / how)) == []
    assert not (folder / "nowhere").exists()  # the first rank alone has the folder


def test_a_signal_to_one_process_stops_all_and_is_told_once(told: Told) -> None:
    first, other = told["stopped"]["said"]
    assert re.search(
        r"stopped by SIGTERM, saved after step 14; resume with: torchrun … -m flatmin_lab train --out", first
    )
    assert other == ""
    assert told["finished, again"]["codes"] == [0, 0]


WRONG = {
    "diverged": (1, "training stops"),
    "seeds": (2, "--seeds trains 2 models, but these 2 processes train one together"),
    "together": (2, "--together needs --seeds 2 or more"),
    "recipe": (2, "all ranks must have the same recipe's flags"),
    "version": (2, "all ranks must have the same flatmin, got"),
    "data": (2, "all ranks must have the same data set (SHA-256), got"),
    "missing": (2, "rank 1 of 2: "),
    "folder": (2, "would be inside the file"),
    "small": (2, "a batch size of 1 leaves one of 2 processes 0 of the 1 images"),
    "held": (2, "already holds this run, finished"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_told_once_by_the_first_process(told: Told, name: str) -> None:
    code, text = WRONG[name]
    first, other = told[name]["said"]
    assert told[name]["codes"] == [code, code], first + other
    assert text in first
    assert first.count("flatmin: ") == 1
    assert other == ""


def test_a_process_that_crashes_says_so_and_the_others_that_one_is_gone(told: Told) -> None:
    for name in ("lost", "crashed"):
        first, other = told[name]["said"]
        assert "another process of this run has ended" in first
        assert told[name]["codes"] == [1, -9 if name == "lost" else 1]
        assert ("ZeroDivisionError: of the model's own" in other) == (name == "crashed")


# ---- the command under torchrun itself


def torchrun(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "flatmin_lab", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def test_torchrun_trains_as_the_forked_processes_did(told: Told, folder: Path, tmp_path: Path) -> None:
    for attempt in range(3):
        running = torchrun(*OFTEN, "--out", str(tmp_path / f"run-{attempt}"))
        out, err = running.communicate(timeout=HANG_SECONDS)
        if ABORTED not in err:
            break
    assert running.returncode == 0, err
    assert out.count("test, last epoch") == 1
    assert differences(state_of(folder / "whole"), state_of(tmp_path / f"run-{attempt}")) == []


def test_torchrun_asked_to_end_saves_first(told: Told, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    running = torchrun(*OFTEN, "--epochs", "400", "--out", str(place))
    until = time.monotonic() + HANG_SECONDS
    while not (place / "state.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=HANG_SECONDS)
    step = json.loads((place / "state.json").read_text())["step"]
    assert f"stopped by SIGTERM, saved after step {step};" in err
    assert running.returncode != 0
