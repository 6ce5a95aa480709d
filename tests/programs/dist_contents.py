"""Is what was built what a user should get? `python -m tests.programs.dist_contents DIST AGAIN`: two builds' folders.

The wheel has the two packages, with every file that is not Python, the licence and nothing else; the source archive
has what the repository has. Two builds, the second of them from the unpacked archive, are the same bytes.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import flatmin

ROOT = Path(__file__).parents[2]
LARGEST = 1_000_000  # bytes
APART = (".ci/",)  # of the repository, what an archive has no use for


def one(folder: Path, pattern: str) -> Path:
    """The only file of that kind: an old one beside it would be uploaded with it."""
    found = sorted(folder.glob(pattern))
    assert len(found) == 1, f"{folder} should have one {pattern}, has {[path.name for path in found]}"
    return found[0]


def tracked() -> set[str] | None:
    """The repository's files; None where this is no checkout, or git is not there or will not tell."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    return set(listed.stdout.split("\0")) - {""} or None


def check_wheel(path: Path) -> None:
    about = f"flatmin-{flatmin.__version__}.dist-info"
    assert path.name == f"flatmin-{flatmin.__version__}-py3-none-any.whl", path.name
    assert path.stat().st_size < LARGEST, f"{path.name} has {path.stat().st_size:,} bytes"
    with zipfile.ZipFile(path) as wheel:
        packed = {name for name in wheel.namelist() if not name.startswith(about)}
        metadata = message_from_bytes(wheel.read(f"{about}/METADATA"))
        assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert b"flatmin = flatmin_lab.__main__:main" in wheel.read(f"{about}/entry_points.txt")
    source = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*") if file.is_file()}
    differing = packed ^ {name for name in source if "__pycache__" not in name and ".egg-info" not in name}
    assert not differing, f"in the wheel or under src, not in both: {sorted(differing)}"
    assert {"flatmin/py.typed", "flatmin_lab/py.typed", "flatmin_lab/report/templates/page.css"} <= packed
    assert metadata["Version"] == flatmin.__version__
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.partition(">")[0] for line in needed] == ["torch"], needed


def check_archive(path: Path, files: set[str]) -> None:
    top = f"flatmin-{flatmin.__version__}"
    assert path.name == f"{top}.tar.gz", path.name
    with tarfile.open(path) as archive:
        packed = {member.name.removeprefix(f"{top}/") for member in archive.getmembers() if member.isfile()}
    expected = {name for name in files if not name.startswith(APART)} | {"PKG-INFO"}
    assert not packed - expected, f"in the archive, not in the repository: {sorted(packed - expected)}"
    assert not expected - packed, f"in the repository, not in the archive: {sorted(expected - packed)}"


if __name__ == "__main__":
    dist, again = map(Path, sys.argv[1:])
    wheel, archive = one(dist, "*.whl"), one(dist, "*.tar.gz")
    check_wheel(wheel)
    files = tracked()
    if files is None:
        print("no repository here to compare the archive with")
    else:
        check_archive(archive, files)
    for path in (wheel, archive):
        assert path.read_bytes() == (again / path.name).read_bytes(), f"{path.name} is not the same bytes again"
    print(*(f"{path}: {path.stat().st_size:,} bytes, twice the same" for path in (wheel, archive)), sep="\n")
