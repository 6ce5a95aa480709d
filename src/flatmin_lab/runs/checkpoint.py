"""A checkpoint is one safetensors file: tensors, the rest of the state as JSON, and a checksum of both.

    checkpoint-00000390.safetensors       after step 390

The state (numbers, lists, strings) is JSON in the file's header, beside a SHA-256 over it and over every tensor's name,
type, shape and bytes. So a single rename makes a complete checkpoint appear, reading one detects damage, and only the
file is needed to resume. It holds no pickle.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatmin_lab.runs.config import check_same
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.optional_deps import need

NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Tensors on the CPU by name, and a state that is plain JSON."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `name.`, without that prefix."""
        return {key.removeprefix(f"{name}."): t for key, t in self.tensors.items() if key.startswith(f"{name}.")}


class DamagedError(ValueError):
    """Not a checkpoint, or not an intact one."""


def name_of(step: int) -> str:
    return f"checkpoint-{step:08d}.safetensors"


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first; files with other names are ignored."""
    found = [path for path in folder.glob("checkpoint-*.safetensors") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    named = NAME.fullmatch(path.name)
    assert named is not None
    return int(named[1])


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Written atomically: under its own name a checkpoint is complete."""
    save = need("safetensors.torch", "a checkpoint").save
    tensors = unshared({name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()})
    text = json.dumps(checkpoint.state, allow_nan=False)
    content = save(tensors, metadata={"state": text, "sha256": digest(tensors, text)})
    with atomic_write(path) as file:
        file.write(content)


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with a memory of its own for each, as safetensors wants it: tied layers share theirs."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


def read_state(path: Path) -> dict[str, Any]:
    """The state alone, from the file's header: fast, and not verified."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), path.stat().st_size))
    try:
        state = json.loads(json.loads(header)["__metadata__"]["state"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is not an intact checkpoint ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{path} is not an intact checkpoint: its state is a {type(state).__name__}")
    return state


def read(path: Path) -> Checkpoint:
    """The checkpoint, verified; DamagedError if it is not intact, OSError if the file cannot be read at all."""
    load = need("safetensors.torch", "a checkpoint").load
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        described = json.loads(content[8 : 8 + length])["__metadata__"]
        text, expected = described["state"], described["sha256"]
        tensors = load(content)
        state = json.loads(text)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise DamagedError(f"{path} is not an intact checkpoint ({type(error).__name__}: {error})") from error
    found = digest(tensors, text)
    if found != expected:
        raise DamagedError(f"{path} was altered after it was written: its SHA-256 must be {expected}, got {found}")
    return Checkpoint(tensors, state)


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 over the state and, in the order of their names, the tensors; the same for any order in the file."""
    sha = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


class NewestCheckpoint(NamedTuple):
    """The newest intact checkpoint, if there is one, and the errors of newer, damaged ones."""

    path: Path | None
    whole: Checkpoint | None
    damaged: list[tuple[Path, DamagedError]]


def newest_whole(places: Iterable[Path], config: Mapping[str, Any]) -> NewestCheckpoint:
    """The first intact one of checkpoints sorted newest first; one of another run is an error."""
    damaged: list[tuple[Path, DamagedError]] = []
    for path in places:
        try:
            whole = read(path)
        except DamagedError as error:
            damaged.append((path, error))
        except OSError as error:  # no sign of damage: an older one would cost the steps since
            raise RunError(
                f"{path} cannot be read: {error.strerror}. Nothing was changed; make it readable, and try again"
            ) from error
        else:
            check_same(path, whole.state.get("run", {}), config)
            return NewestCheckpoint(path, whole, damaged)
    return NewestCheckpoint(None, None, damaged)
