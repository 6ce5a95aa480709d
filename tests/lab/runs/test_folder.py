"""A run's folder: one recipe, one process at a time, nothing overwritten, an older checkpoint where one is damaged."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatmin_lab.runs import checkpoint, open_folder
from flatmin_lab.runs import config as run_config
from flatmin_lab.runs.events import Epoch, Finished, Note, RunError, Started
from flatmin_lab.runs.result_store import ResultStore
from flatmin_lab.system.files import atomic_write, locked
from flatmin_lab.training.loop import config_of, train
from tests.support.small_runs import after, lasting, run, same, saves, tiny_data, tiny_recipe


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_finished_run_has_all_its_files(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    events = run(recipe, tmp_path / "new" / "run")
    folder = tmp_path / "new" / "run"
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"] == recipe.as_json()
    assert config["data_sha256"] == tiny_data().checksum
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == [dict(event.numbers) for event in events if isinstance(event, Epoch)]
    result = json.loads((folder / "result.json").read_text())
    assert isinstance(events[-1], Finished)
    assert result == events[-1].result
    for field in ("protocol", "method", "settings", "model", "data", "seed", "epochs", "test_error", "test_nll"):
        assert field in result
    assert {"test_ece", "seconds", "hardware", "torch", "commit", "recipe", "data_sha256"} <= result.keys()
    assert [path.name for path in checkpoint.listed(folder)] == [checkpoint.name_of(step) for step in (15, 10)]
    assert json.loads((folder / "state.json").read_text())["step"] == 15


def test_the_curves_are_in_tensorboard_once_each_after_a_stop(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tiny_recipe(), tmp_path / "run", stop=after(8))
    run(tiny_recipe(), tmp_path / "run", resume=True)
    events = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    points = events.Scalars("test_nll")
    assert [point.step for point in points] == [1, 2, 3]
    assert [point.value for point in points] == pytest.approx([line["test_nll"] for line in lines])


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run(tiny_recipe(), tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(FileExistsError, match="already holds this run, finished; --resume shows its numbers"):
        run(tiny_recipe(), tmp_path / "run")
    assert contents(tmp_path / "run") == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        run(tiny_recipe(), tmp_path / "notes")
    with pytest.raises(FileExistsError, match="is a file"):
        run(tiny_recipe(), tmp_path / "notes" / "thesis.txt")
    assert contents(tmp_path / "notes") == {"thesis.txt": b"mine"}


def test_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    """A folder of another program has a config.json too; copies that someone made of a checkpoint have other names."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["BertModel"]}')
    (other / "state.json").write_text("mine")
    before = contents(other)
    for resume in (False, True):
        with pytest.raises(ValueError if resume else (ValueError, FileExistsError), match=r"config\.json|state\.json"):
            run(tiny_recipe(), other, resume=resume)
    assert contents(other) == before
    results = tmp_path / "results"
    results.mkdir()
    for name in ("result.json", "metrics.jsonl"):
        (results / name).write_text('{"mine": true}')
        before = contents(results)
        for resume in (False, True):
            with pytest.raises(FileExistsError, match="a folder of its own"):
                run(tiny_recipe(), results, resume=resume)
        assert contents(results) == before
        (results / name).unlink()
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(8))
    copies = [folder / f"checkpoint-{name}.safetensors" for name in ("best", "00000005-backup")]
    for copy in copies:
        copy.write_bytes(checkpoint.listed(folder)[-1].read_bytes())
    events = run(tiny_recipe(), folder, resume=True)
    assert next(event.step for event in events if isinstance(event, Started)) == 7
    assert all(copy.exists() for copy in copies)


def test_a_checkpoint_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    run(tiny_recipe(), tmp_path / "one", stop=after(3))
    run(tiny_recipe(), tmp_path / "other", seed=1, stop=after(8))
    for path in checkpoint.listed(tmp_path / "other"):
        shutil.copy(path, tmp_path / "one")
    before = contents(tmp_path / "one")
    with pytest.raises(ValueError, match="seed is 1 there and 0 here"):
        run(tiny_recipe(), tmp_path / "one", resume=True)
    assert contents(tmp_path / "one") == before


def test_steps_of_more_than_eight_digits_come_in_their_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 99_999_998):
        checkpoint.write(tmp_path / checkpoint.name_of(step), checkpoint.Checkpoint({}, {}))
    assert [checkpoint.step_of(path) for path in checkpoint.listed(tmp_path)] == [100_000_000, 99_999_999, 99_999_998]


def test_who_comes_second_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking at an empty folder and holding it, another process begins and ends a run there."""
    folder, real = tmp_path / "run", open_folder.lock_folder

    def late(path: Path) -> Any:
        monkeypatch.setattr(open_folder, "lock_folder", real)
        run(tiny_recipe(), folder, stop=after(8))
        return real(path)

    monkeypatch.setattr(open_folder, "lock_folder", late)
    with pytest.raises(FileExistsError, match=r"already holds another run .*: lr is 0.1 there and 0.5 here"):
        run(tiny_recipe(lr=0.5), folder)
    assert lasting(folder)["state"]["run"]["recipe"]["lr"] == 0.1
    (folder / ".lock").open("ab").close()
    assert isinstance(run(tiny_recipe(), folder, resume=True)[-1], Finished)


def test_a_folder_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    events = train(tiny_recipe(), tiny_data(), folder=folder)
    next(event for event in events if isinstance(event, Epoch))
    shutil.rmtree(folder)
    run(tiny_recipe(lr=0.5), folder)
    before = contents(folder)
    with pytest.raises(RunError, match="removed or replaced"):
        list(events)
    assert contents(folder) == before


def test_epochs_without_a_checkpoint_are_kept_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    events = train(tiny_recipe(), tiny_data(), folder=folder, checkpoint_epochs=9)
    next(event for event in events if isinstance(event, Epoch))
    events.close()  # type: ignore[attr-defined]  # a generator
    line = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="already holds this run; resume it with --resume"):
        run(tiny_recipe(), folder)
    again = run(tiny_recipe(), folder, resume=True)
    assert any(isinstance(event, Note) and "metrics.jsonl.before-1" in event.text for event in again)
    assert (folder / "metrics.jsonl.before-1").read_bytes() == line


def test_a_consumer_that_fails_costs_no_epoch(tmp_path: Path) -> None:
    def consume() -> None:
        for event in train(tiny_recipe(), tiny_data(), folder=tmp_path / "run"):
            if isinstance(event, Epoch):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert lasting(tmp_path / "run")["state"]["epoch"] == 1


def test_a_checkpoint_within_the_first_epoch_is_a_checkpoint(tmp_path: Path) -> None:
    """Gone on with from there, after later epochs were measured and not saved: they come again, no note is false."""
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(3))
    events = train(tiny_recipe(), tiny_data(), folder=folder, resume=True, checkpoint_epochs=9)
    next(event for event in events if isinstance(event, Epoch))
    events.close()  # type: ignore[attr-defined]  # a generator
    again = run(tiny_recipe(), folder, resume=True)
    assert not [event for event in again if isinstance(event, Note)]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


def test_curves_that_cannot_be_drawn_cost_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("add", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(f"flatmin_lab.runs.tensorboard.Board.{name}", failing)
            assert isinstance(run(tiny_recipe(), tmp_path / name)[-1], Finished)


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """A field that came later has its default."""
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(3))
    config = json.loads((folder / "config.json").read_text())
    del config["recipe"]["warmup"]
    (folder / "config.json").write_text(json.dumps(config))
    assert isinstance(run(tiny_recipe(), folder, resume=True)[-1], Finished)


@pytest.mark.parametrize("missing", ["epoch", "sums", "lines", "optimizer"])
def test_an_intact_checkpoint_of_another_format_says_which_version_wrote_it(tmp_path: Path, missing: str) -> None:
    run(tiny_recipe(), tmp_path / "run", stop=after(7))
    (path, *_) = checkpoint.listed(tmp_path / "run")
    whole = checkpoint.read(path)
    state = {**whole.state, "facts": {**whole.state["facts"], "flatmin": "7.0"}}
    del state[missing]
    checkpoint.write(path, checkpoint.Checkpoint(whole.tensors, state))
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match=rf"{missing}.*written by flatmin 7\.0, and this is.*train anew"):
        run(tiny_recipe(), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_a_damaged_result_is_made_again(tmp_path: Path) -> None:
    run(tiny_recipe(), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text('{"test_er')
    run(tiny_recipe(), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    assert (tmp_path / "run" / "result.json.damaged").exists()


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    assert isinstance(run(tiny_recipe(), tmp_path / "run")[-1], Finished)


def test_a_folder_of_a_renamed_recipe_is_resumed_and_one_of_its_namesake_says_where_it_belongs(tmp_path: Path) -> None:
    old, now = (replace(tiny_recipe(), name=f"{protocol}/tiny-erm") for protocol in ("paper", "paper-v2"))
    run(old, tmp_path / "run", stop=after(8))
    assert isinstance(run(now, tmp_path / "run", resume=True)[-1], Finished)
    with pytest.raises(ValueError, match=r"before paper/tiny-erm was renamed paper-v2/tiny-erm, move it from"):
        run(replace(old, lr=0.02), tmp_path / "run", resume=True)


def test_a_recipe_that_kept_its_name_is_not_said_to_be_renamed(tmp_path: Path) -> None:
    kept = replace(tiny_recipe(), name="paper/spiral-mlp-erm")
    run(kept, tmp_path / "run", stop=after(3))
    with pytest.raises(ValueError, match=r"belongs to another recipe") as caught:
        run(replace(kept, lr=0.02), tmp_path / "run", resume=True)
    assert "renamed" not in str(caught.value)


def test_another_recipe_seed_or_data_set_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(3))
    before = contents(folder)
    with pytest.raises(ValueError, match=r"lr is 0\.1 there and 0\.2 here; .*momentum"):
        run(tiny_recipe(lr=0.2, momentum=0.5), folder, resume=True)
    with pytest.raises(ValueError, match="seed is 0 there and 1 here"):
        run(tiny_recipe(), folder, resume=True, seed=1)
    with pytest.raises(ValueError, match="different contents"):
        list(train(tiny_recipe(), tiny_data(test=29), folder=folder, resume=True))
    assert contents(folder) == before


def test_a_wrong_recipe_begins_no_folder(tmp_path: Path) -> None:
    for wrong in (
        {"method": "erm", "settings": {"epsilon": 0.1}},
        {"method": "amp", "settings": {"epsilon": -1.0}},
        {"batch_size": 45},
        {"model": "resnet"},
    ):
        with pytest.raises((ValueError, TypeError)):
            run(tiny_recipe(**wrong), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_run_that_left_nothing_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong flags that show at the first step, then right ones: the same folder will do."""

    def broken(*_: object) -> None:
        raise ValueError("wrong")

    with monkeypatch.context() as patch:
        patch.setattr("flatmin_lab.training.learner.Learner.step", broken)
        with pytest.raises(ValueError, match="wrong"):
            run(tiny_recipe(), tmp_path / "run")
    assert (tmp_path / "run" / "config.json").exists()
    run(tiny_recipe(lr=0.2), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["lr"] == 0.2


def test_resume_begins_where_nothing_is(tmp_path: Path) -> None:
    assert isinstance(run(tiny_recipe(), tmp_path / "run", resume=True)[-1], Finished)
    again = run(tiny_recipe(), tmp_path / "run", resume=True)
    assert len(again) == 1
    assert isinstance(again[0], Finished)


def test_a_start_that_was_killed_before_its_config_is_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / ".config.json.1-2.beside").write_text('{"rec')
    assert isinstance(run(tiny_recipe(), folder)[-1], Finished)
    assert not list(folder.glob(".*.beside"))


@pytest.mark.parametrize("damage", ["torn", "altered", "empty"])
def test_the_one_before_a_damaged_checkpoint_is_used(tmp_path: Path, damage: str) -> None:
    run(tiny_recipe(), tmp_path / "whole")
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(14))
    newest, older = checkpoint.listed(folder)
    content = newest.read_bytes()
    changed = bytearray(content)
    changed[-3] ^= 1
    newest.write_bytes({"torn": content[:-100], "altered": bytes(changed), "empty": b""}[damage])
    events = run(tiny_recipe(), folder, resume=True)
    (note,) = [event for event in events if isinstance(event, Note)]
    assert newest.name in note.text
    assert "put aside" in note.text
    (start,) = [event for event in events if isinstance(event, Started)]
    assert checkpoint.name_of(start.step) == older.name
    assert (folder / f"{newest.name}.damaged").exists()
    assert same(lasting(folder), lasting(tmp_path / "whole"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A network disk that is away, too many open files: the steps since the one before are not given up."""
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(14))
    newest, before, real = checkpoint.listed(folder)[0], contents(folder), Path.read_bytes

    def failing(path: Path) -> bytes:
        if path == newest:
            raise OSError(number, os.strerror(number))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        with pytest.raises(RunError, match=f"{newest.name} cannot be read: {os.strerror(number)}. Nothing was changed"):
            run(tiny_recipe(), folder, resume=True)
    assert contents(folder) == before
    (start,) = [event for event in run(tiny_recipe(), folder, resume=True) if isinstance(event, Started)]
    assert checkpoint.name_of(start.step) == newest.name


def test_where_no_checkpoint_is_whole_nothing_is_changed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(14))
    for path in checkpoint.listed(folder):
        path.write_bytes(path.read_bytes()[:50])
    before = contents(folder)
    with pytest.raises(RunError, match=r"no checkpoint in .* is intact") as caught:
        run(tiny_recipe(), folder, resume=True)
    assert all(path.name in str(caught.value) for path in checkpoint.listed(folder))
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "state.json"])
def test_what_can_be_made_again_is_not_needed(tmp_path: Path, name: str) -> None:
    """A torn line, a lost file: the checkpoint knows every epoch."""
    run(tiny_recipe(), tmp_path / "whole")
    for change in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-20])):
        folder = tmp_path / "run"
        run(tiny_recipe(), folder, stop=after(14))
        change(folder / name)
        run(tiny_recipe(), folder, resume=True)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines] == [1, 2, 3]
        assert same(lasting(folder), lasting(tmp_path / "whole"))
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["seed", "data_sha256", "recipe", "lr", "settings", "milestones"])
def test_a_field_of_a_config_of_the_wrong_type_is_named_with_the_file(tmp_path: Path, name: str) -> None:
    known = json.loads(json.dumps({"recipe": tiny_recipe().as_json(), "seed": 0, "data_sha256": "0"}))
    for value in (None, ["x"], {"x": 0}) if name != "settings" else (None, ["x"], "x"):
        found = json.loads(json.dumps(known))
        (found if name in found else found["recipe"])[name] = value
        (tmp_path / "config.json").write_text(json.dumps(found))
        with pytest.raises(
            ValueError, match=rf"config\.json.*({name}|recipe has no x|must have data|it has no recipe)"
        ):
            run_config.recipe_of(tmp_path, run_config.read_config(tmp_path))


@pytest.mark.parametrize("wrong", [0, [0], [{}], [{"name": 0, "seed": 0}], [{"name": "x", "seed": "0"}], {"x": 0}])
def test_a_damaged_plan_is_named(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "planned.json").write_text(json.dumps({"runs": wrong}))
    with pytest.raises(ValueError, match=r"planned\.json is damaged: .*(name|seed)"):
        ResultStore(tmp_path, tmp_path).planned()


def test_a_plan_that_was_merged_into_two_lists_is_named_since_one_would_be_lost(tmp_path: Path) -> None:
    (tmp_path / "planned.json").write_text('{"runs": [{"name": "x", "seed": 0}], "runs": [{"name": "x", "seed": 1}]}')
    with pytest.raises(ValueError, match=r"planned\.json is damaged: .*the key 'runs' is there twice"):
        ResultStore(tmp_path, tmp_path).planned()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"recipe": {}}'])
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(3))
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        run(tiny_recipe(), folder, resume=True)


def test_two_processes_cannot_hold_one_folder(tmp_path: Path) -> None:
    """The lock goes with the process that holds it, killed or not."""
    folder = tmp_path / "run"
    run(tiny_recipe(), folder, stop=after(3))
    code = (
        f"import fcntl, sys, time; f = open({str(folder / '.lock')!r}, 'ab'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        before = contents(folder)
        with pytest.raises(RunError, match="another process is training"):
            run(tiny_recipe(), folder, resume=True)
        assert contents(folder) == before
        other.kill()
        other.wait()
    assert isinstance(run(tiny_recipe(), folder, resume=True)[-1], Finished)


def test_what_an_evaluation_is_writing_is_no_leftover_of_a_killed_process(tmp_path: Path) -> None:
    """An evaluation needs no lock on the run: it may be written when a training process opens the folder."""
    run(tiny_recipe(), tmp_path / "run", stop=after(3))
    path = tmp_path / "run" / "evaluation.json"
    with ThreadPoolExecutor(1) as other, locked(path.parent), atomic_write(path) as file:  # locks exclude threads too
        resumed = other.submit(run, tiny_recipe(), tmp_path / "run", resume=True)
        time.sleep(0.5)  # long enough to come to the lock
        file.write(b"{}")
    assert isinstance(resumed.result()[-1], Finished)
    assert path.read_bytes() == b"{}"


# what each call of fsync makes last; the others are of folders, which not every file system can flush
FLUSHED = {2: "config.json", 4: "metrics.jsonl", 6: "metrics.jsonl", 7: "the checkpoint after step 5"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", range(1, 9))
def test_a_disk_that_fails_at_any_writing_costs_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, number: int
) -> None:
    run(tiny_recipe(), tmp_path / "whole")
    folder, left, real = tmp_path / "run", [call], os.fsync

    def failing(handle: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(number, os.strerror(number))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        told = "Input/output error" if number == errno.EIO else "the disk is full"
        told = f"{FLUSHED.get(call)} could not be written.*{told}.*repeat the command.*train: with --resume"
        with pytest.raises(RunError, match=told) if call in FLUSHED else nullcontext():
            run(tiny_recipe(), folder)
    run(tiny_recipe(), folder, resume=True)
    assert same(lasting(folder), lasting(tmp_path / "whole"))
    assert not list(folder.glob(".*.beside"))


def test_checkpoints_come_by_epoch_and_by_minutes(tmp_path: Path) -> None:
    assert list(saves(run(tiny_recipe(), tmp_path / "epochs"))) == [5, 10, 15]
    assert list(saves(run(tiny_recipe(), tmp_path / "every other", checkpoint_epochs=2))) == [10, 15]
    by_minutes = list(saves(run(tiny_recipe(), tmp_path / "minutes", checkpoint_minutes=0)))
    assert by_minutes == list(range(1, 16))


def test_config_of_knows_versions_and_machine() -> None:
    config = config_of(tiny_recipe(), tiny_data(), 0)
    assert {"hardware", "threads", "torch", "flatmin", "commit"} <= config.keys()
    assert not run_config.exists(Path("nowhere"))


def test_going_on_elsewhere_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tiny_recipe(), tmp_path / "run", stop=after(3))
    monkeypatch.setattr("torch.__version__", "9.9.9")
    notes = [event.text for event in run(tiny_recipe(), tmp_path / "run", resume=True) if isinstance(event, Note)]
    assert len(notes) == 1
    assert "9.9.9 now" in notes[0]
