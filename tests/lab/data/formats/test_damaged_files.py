"""Files that are cut short, altered or hostile: an error that says so, and nothing of theirs runs or is written."""

import gzip
import io
import pickle
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatmin_lab.data import load
from flatmin_lab.data.formats import mat, safe_pickle
from tests.support import official_files
from tests.support.official_files import LAYOUTS, classes, made, packed

MIB = 1 << 20


@contextmanager
def at_most(mebibytes: float) -> Iterator[None]:
    """What happens inside holds no more memory than that at any time: work, which a busy machine does not change."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mebibytes * MIB


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
    with pytest.raises(ValueError, match=f"{file} was refused: it asks for"):
        load("cifar10", tmp_path)
    assert not trap.exists()


def doubled(times: int) -> bytes:
    """A tuple that holds the one before it twice, that many times over: small to write, endless to look at."""
    return b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(times))


# each would run a command, or take the process or the machine down, if it were unpickled
HOSTILE = {
    "a command": b"cos\nsystem\n(S'touch sprung'\ntR.",
    "a command, by eval": b'cbuiltins\neval\n(S\'open("sprung", "w")\'\ntR.',
    "a command, as an instance": b"(S'touch sprung'\nios\nsystem\n.",
    "a function, by the stack": pickle.dumps(print, protocol=4),
    "numpy's own loader": b"cnumpy\nload\n(S'x'\ntR.",
    "objects in an array": pickle.dumps({b"data": np.array([object()], dtype=object)}),
    "a persistent id": b"Pid\n.",
    "an extension": b"\x82\x01.",
    "keys within keys": b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s.",
    "keys that double": b"\x80\x02}" + doubled(40) + b"K\x01s.",
    "a type that doubles": b"\x80\x02cnumpy\ndtype\n" + doubled(40) + b"\x85R.",
    "a module that doubles": b"\x80\x04" + doubled(60) + b"X\x01\x00\x00\x00x\x93.",
    "a name that doubles": b"\x80\x04X\x01\x00\x00\x00x" + doubled(60) + b"\x93.",
    "a huge memo": b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".",
    "huge sides": b"\x80\x02}U\x04datacnumpy.core.numeric\n_frombuffer\n(C\x01acnumpy\ndtype\nU\x02u1\x85R"
    + (b"\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6) * 2
    + b"\x86U\x01CtRs.",
    "one text made bytes a thousand times": b"\x80\x02c_codecs\nencode\nq\x00X"
    + struct.pack("<I", 10**6)
    + b"a" * 10**6
    + b"X\x06\x00\x00\x00latin1\x86q\x01"
    + b"h\x00h\x01R" * 20_000
    + b"}.",
    "marks over a high stack": b"\x80\x02" + b"N" * 30_000 + b"(t" * 30_000 + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "no end": b"\x80\x02}",
    "nothing": b"",
}


@pytest.mark.parametrize("file", ["test_batch", "batches.meta"])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_do_nothing(tmp_path: Path, content: bytes, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    (root / file).write_bytes(content)
    refused = rf"{file} (was refused|is damaged|must hold a dictionary, got (NoneType|list|tuple))"
    with at_most(30), pytest.raises(ValueError, match=refused):
        load("cifar10", tmp_path)
    assert not (tmp_path / "sprung").exists()


class Counted(list[Any]):
    """A stack that counts how many entries were copied from it."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("name", ["marks over a high stack", "keys within keys"])
def test_no_instruction_copies_the_stack(name: str) -> None:
    """Or a file would take time with the square of its length."""
    machine, stack = safe_pickle._Machine(HOSTILE[name]), Counted()
    machine.stack = stack
    try:
        machine.run()
    except safe_pickle.ForbiddenError:
        assert name == "keys within keys"
    assert machine.stack is stack
    assert stack.copied < 2 * len(HOSTILE[name])


LABELS = {
    "too many, as an array": np.zeros(4 * MIB, np.int8),
    "of nothing, without end": np.zeros((2, 1 << 39, 0), np.int8),
    "a column": np.zeros((2, 1), np.int64),
    "a list that doubles": pickle.loads(b"\x80\x02" + doubled(60) + b"."),
    "a list of lists that double": [pickle.loads(b"\x80\x02" + doubled(60) + b".")] * 2,
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_are_counted_before_they_are_listed(tmp_path: Path, labels: Any) -> None:
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(2, 10, seed=1))
    images = np.zeros((2, 3072), np.uint8)
    (root / "test_batch").write_bytes(pickle.dumps({b"data": images, b"labels": labels}))
    with (
        at_most(20),
        pytest.raises(ValueError, match=r"test_batch: (every image needs one label|the labels must be a)"),
    ):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999, -1, -9])
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
        victim.write_bytes(content[: int(share * len(content)) if share >= 0 else int(share)])
        root = tmp_path / "unpacked" if "unpacked" in str(victim) else tmp_path
        with pytest.raises(ValueError, match=r"cut short|not an intact"):
            load(name, root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_bit_changed_anywhere_never_passes_unseen(tmp_path: Path, layout: str) -> None:
    """In an archive every byte is under gzip's checksum, in a packed matrix under zlib's."""
    name, write, archive = LAYOUTS[layout]
    train, test = made(5, classes(name), seed=0), made(3, classes(name), seed=1)
    root = write(tmp_path, train, test)
    victim = packed(root, archive) if archive else root / "train_32x32.mat"
    whole = victim.read_bytes()
    checksum = load(name, tmp_path).checksum
    generator = np.random.default_rng(0)
    for place in [*range(12), *generator.integers(0, len(whole), 60), len(whole) - 2]:
        broken = bytearray(whole)
        broken[place] ^= 1 << int(generator.integers(0, 8))
        victim.write_bytes(bytes(broken))
        try:
            data = load(name, tmp_path)
        except ValueError:
            continue
        # the archive's name and date, and what follows the last element of a matrix, say nothing of the images
        assert data.checksum == checksum


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unpacked_file_changed_anywhere_is_an_error_or_other_images(tmp_path: Path, layout: str) -> None:
    name, write, archive = LAYOUTS[layout]
    root = write(tmp_path, made(5, classes(name), seed=0), made(3, classes(name), seed=1), **PLAIN.get(layout, {}))
    victim = root / "train_32x32.mat" if archive is None else max(root.iterdir(), key=lambda file: "test" in file.name)
    whole = victim.read_bytes()
    generator = np.random.default_rng(0)
    refused = passed = 0
    for place in [*range(0, 400, 2), *generator.integers(0, len(whole), 100)]:
        broken = bytearray(whole)
        broken[place % len(whole)] = int(generator.integers(0, 256))
        victim.write_bytes(bytes(broken))
        try:
            data = load(name, tmp_path)
        except ValueError as error:
            refused += str(victim.parent) in str(error) or name in str(error)
        else:
            passed += int(data.train.y.max()) < classes(name) and tuple(data.train.shape) == (3, 32, 32)
    assert refused + passed == 300
    assert refused or "binary" in layout  # records without a header: every byte is a label or a pixel


PLAIN: dict[str, dict[str, Any]] = {"svhn": {"compressed": False}}


def test_an_archive_that_unpacks_without_end_is_stopped(tmp_path: Path) -> None:
    """Zeros pack a thousandfold, and a sparse member has no bytes at all."""
    place = tmp_path / "cifar-100-python.tar.gz"
    info = tarfile.TarInfo("cifar-100-python/train")
    info.size = 2 << 30
    # gzip goes on where one packed file follows another: a MiB is packed once, and is there 2048 times
    place.write_bytes(gzip.compress(info.tobuf()) + gzip.compress(bytes(MIB), 1) * 2048)
    with pytest.raises(ValueError, match="more than 1 GiB, as no official archive does"):
        load("cifar100", tmp_path)
    sparse = tarfile.TarInfo("cifar-100-python/train")
    sparse.type = tarfile.GNUTYPE_SPARSE
    with tarfile.open(place, "w:gz") as tar:
        tar.addfile(sparse)
        official_files.member(tar, "cifar-100-python/test", b"")
    with pytest.raises((ValueError, FileNotFoundError), match=r"not an intact|missing: train"):
        load("cifar100", tmp_path)


def test_a_file_larger_than_any_official_one_is_not_read(tmp_path: Path) -> None:
    """Packed, or sparse: neither takes room on the disk."""
    root = official_files.cifar10_python(tmp_path, made(10, 10, seed=0), made(3, 10, seed=1))
    with (root / "data_batch_2").open("r+b") as file:
        file.truncate(900 * MIB)
    with at_most(5), pytest.raises(ValueError, match="data_batch_2 must have at most 268435456 bytes, got 943718400"):
        load("cifar10", tmp_path)
    info = tarfile.TarInfo("cifar-100-python/train")
    info.size = 900 * MIB
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(gzip.compress(info.tobuf() + bytes(MIB)))
    with at_most(5), pytest.raises(ValueError, match="train has 943718400 bytes, more than 268435456"):
        load("cifar100", tmp_path)
    official_files.svhn(tmp_path, made(5, 10, seed=0), made(3, 10, seed=1))
    with (tmp_path / "train_32x32.mat").open("r+b") as file:
        file.truncate(900 * MIB)
    with at_most(5), pytest.raises(ValueError, match=r"train_32x32\.mat must have at most 268435456 bytes"):
        load("svhn", tmp_path)


def test_headers_and_members_without_end_are_stopped(tmp_path: Path) -> None:
    place = tmp_path / "cifar-100-python.tar.gz"
    for kind, size in ((tarfile.XHDTYPE, 1_000_000), (tarfile.GNUTYPE_LONGNAME, 1_000_000)):
        with tarfile.open(place, "w:gz") as tar:
            info = tarfile.TarInfo("cifar-100-python/train")
            info.type, info.size = kind, size
            tar.addfile(info, io.BytesIO(b"1" * size))
        with pytest.raises(ValueError, match="a header larger than any official archive's"):
            load("cifar100", tmp_path)
    with tarfile.open(place, "w:gz") as tar:
        for number in range(2000):
            official_files.member(tar, f"other/{number}", b"")
    with pytest.raises(ValueError, match="more than 1000 members"):
        load("cifar100", tmp_path)


BOMBS = {  # MiB of zeros, and what is said of them
    "more than is there": (400, "unpacks to more than any official one"),
    "elements of nothing": (16, "must hold X and y, got neither"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_matlab_file_that_unpacks_without_end_is_stopped(tmp_path: Path, name: str) -> None:
    official_files.svhn(tmp_path, made(5, 10, seed=0), made(3, 10, seed=1))
    size, message = BOMBS[name]
    packed = zlib.compress(bytes(size * MIB), 1)
    head = (tmp_path / "test_32x32.mat").read_bytes()[:128]
    (tmp_path / "train_32x32.mat").write_bytes(head + struct.pack("<II", 15, len(packed)) + packed)
    work = Profile()
    with at_most(2.5 * mat.MAX_BYTES / MIB), pytest.raises(ValueError, match=message), work:
        load("svhn", tmp_path)
    assert sum(entry.callcount for entry in work.getstats()) < 10 * mat.MAX_ELEMENTS


def matlab(*elements: tuple[int, bytes]) -> bytes:
    """One matrix of these elements, as SVHN's files hold it, packed."""
    parts = (struct.pack("<II", kind, len(body)) + body + bytes(-len(body) % 8) for kind, body in elements)
    body = b"".join(parts)
    packed = zlib.compress(struct.pack("<II", 14, len(body)) + body)
    return b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM" + struct.pack("<II", 15, len(packed)) + packed


UINT8, NAME, TWO = (6, struct.pack("<II", 9, 0)), (1, b"X"), (5, struct.pack("<4i", 32, 32, 3, 2))
HOSTILE_MATRICES: dict[str, tuple[bytes, str]] = {
    **{
        f"numbers of type {kind}": (matlab(UINT8, TWO, NAME, (kind, bytes(6144))), "no numbers of a known type")
        for kind in (0, 8, 14, 16, 20, 60_000)
    },
    "a million sides": (
        matlab(UINT8, (5, struct.pack("<i", 1000) * 10**6), NAME, (2, b"a")),
        "at most 32 sides, got 1000000",
    ),
    "a cell": (
        matlab((6, struct.pack("<II", 1, 0)), TWO, NAME, (14, bytes(6144))),
        "must hold X and y, got neither",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE_MATRICES.values(), ids=HOSTILE_MATRICES)
def test_hostile_matrices_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    official_files.svhn(tmp_path, made(5, 10, seed=0), made(3, 10, seed=1))
    (tmp_path / "train_32x32.mat").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("svhn", tmp_path)


def test_an_archive_with_two_files_of_one_name_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        official_files.member(tar, "cifar-100-python/train", b"one")
        official_files.member(tar, "cifar-100-python/train", b"two")
    with pytest.raises(ValueError, match="holds train twice"):
        load("cifar100", tmp_path)


def test_a_matlab_file_of_another_version_is_named(tmp_path: Path) -> None:
    official_files.svhn(tmp_path, made(5, 10, seed=0), made(3, 10, seed=1))
    (tmp_path / "test_32x32.mat").write_bytes(b"MATLAB 7.3 MAT-file".ljust(200))
    with pytest.raises(ValueError, match=r"version 7\.3, which is HDF5; save it with -v7"):
        load("svhn", tmp_path)


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
