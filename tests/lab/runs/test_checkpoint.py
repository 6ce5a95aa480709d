"""A checkpoint is whole or found out: after any cut, after any changed byte."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.checkpoint import Checkpoint, DamagedError

TENSORS = {
    "model.weight": torch.arange(24.0).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "model.half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "model.count": torch.tensor(7),
    "random.cpu": torch.get_rng_state(),
    "model.none": torch.zeros(0),
}
STATE: dict[str, Any] = {"epoch": 3, "lines": [{"loss": 0.1 + 0.2}], "words": "θ + Δ"}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / checkpoint.name_of(12)
    checkpoint.write(path, Checkpoint(TENSORS, STATE))
    return path


def test_what_is_written_is_read_to_the_bit(written: Path) -> None:
    read = checkpoint.read(written)
    assert read.state == STATE
    assert read.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor)
    assert read.part("random").keys() == {"cpu"}
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_it_is_an_ordinary_safetensors_file(written: Path) -> None:
    assert torch.equal(load_file(written)["model.weight"], TENSORS["model.weight"])


def test_cut_anywhere_it_is_found_out(written: Path) -> None:
    content = written.read_bytes()
    for length in sorted({0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, *range(0, len(content), 97)}):
        written.write_bytes(content[:length])
        with pytest.raises(DamagedError, match="not an intact checkpoint"):
            checkpoint.read(written)
    written.write_bytes(content + b"\0")
    with pytest.raises(DamagedError):
        checkpoint.read(written)


def test_a_changed_byte_is_found_out_wherever_it_matters(written: Path) -> None:
    """A changed space in the header's padding changes nothing; any other change is found out, or reads the same."""
    content = written.read_bytes()
    draw, found = random.Random(0), 0
    places = draw.sample(range(len(content)), 400)
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        written.write_bytes(bytes(changed))
        try:
            read = checkpoint.read(written)
        except DamagedError:
            found += 1
        else:
            assert read.state == STATE
            assert all(torch.equal(read.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert found > 390


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"PK\x03\x04" + bytes(100), (1 << 62).to_bytes(8, "little") + b"{}"]
)
def test_another_file_is_not_a_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "checkpoint-00000001.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="checkpoint-00000001"):
        checkpoint.read(path)


def test_a_writing_that_fails_leaves_what_was_there(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(written, Checkpoint(TENSORS, {"epoch": 4}))
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        checkpoint.write(tmp_path / checkpoint.name_of(step), Checkpoint({}, {}))
    (tmp_path / "checkpoint-00000100.safetensors.damaged").touch()
    assert [path.name for path in checkpoint.listed(tmp_path)] == [checkpoint.name_of(step) for step in (100, 20, 5)]
