"""Files that are cut short, altered or hostile: an error that says so, and nothing of theirs runs or is written."""

import pickle
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import official_files
from flatmin_lab.data import load
from official_files import LAYOUTS, classes, made, packed


class Spy:
    """Unpickled with pickle itself, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_pickle_that_asks_for_more_than_arrays_is_refused_before_it_runs(tmp_path: Path, file: str) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    trap = tmp_path / "sprung"
    (root / file).write_bytes(pickle.dumps({b"data": Spy(trap), b"labels": [], b"label_names": []}))
    with pytest.raises(ValueError, match=rf"{file} was refused: it asks for .*touch|{file} was refused"):
        load("cifar10", tmp_path)
    assert not trap.exists()


HOSTILE = {
    "os.system": b"cos\nsystem\n(S'true'\ntR.",
    "builtins.eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "by stack": pickle.dumps(print, protocol=4),
    "numpy's own loader": b"cnumpy\nload\n(S'x'\ntR.",
    "an instance": b"(S'x'\nios\nsystem\n.",
    "objects in an array": pickle.dumps({b"data": np.array([object()], dtype=object)}),
    "a persistent id": b"Pid\n.",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_do_nothing(tmp_path: Path, content: bytes) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    (root / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match="test_batch"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_cut_short_is_said_to_be(tmp_path: Path, layout: str, share: float) -> None:
    name, write, archive = LAYOUTS[layout]
    written = write(tmp_path, made(25, classes(name), seed=0), made(7, classes(name), seed=1))
    victims = [written / "train_32x32.mat"] if archive is None else [packed(written, archive)]
    if archive is not None:
        official = write(tmp_path / "unpacked", made(25, classes(name), seed=0), made(7, classes(name), seed=1))
        victims.append(
            next(file for file in sorted(official.iterdir()) if "train" in file.name or "batch_2" in file.name)
        )
    for victim in victims:
        content = victim.read_bytes()
        victim.write_bytes(content[: int(share * len(content))])
        root = tmp_path / "unpacked" if "unpacked" in str(victim) else tmp_path
        with pytest.raises(ValueError, match=r"cut short|not a whole"):
            load(name, root)


def test_bytes_changed_at_random_are_an_error_or_other_pictures_never_a_crash(tmp_path: Path) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    whole = (root / "test_batch").read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(whole)
        # the frame of the pickle, not the pixels
        for place in generator.integers(0, 300, size=3):
            broken[place] = generator.integers(0, 256)
        (root / "test_batch").write_bytes(bytes(broken))
        with suppress(ValueError):
            load("cifar10", tmp_path)


def test_a_member_outside_its_folder_or_a_link_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        official_files.member(tar, "../cifar-100-python/train", b"")
        link = tarfile.TarInfo("cifar-100-python/train")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    with pytest.raises(FileNotFoundError, match="missing: train, test"):
        load("cifar100", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar-100-python.tar.gz", "secret"]
