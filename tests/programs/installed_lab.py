"""Run as a program where flatmin[lab] was installed as a wheel: the command trains, measures and writes its pages.

An editable installation finds templates, scripts and modules in the checkout even where the wheel has forgotten them.
"""

import json
import os
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"
TRAIN = "train --data digits --epochs 1 --batch-size 300 --device cpu --out run"
PAGES = {  # a command: the page that it writes, and what stands in it
    "report run": ("out/report.html", "AMP"),
    f"report {RESULTS} --out out/evidence.html": ("out/evidence.html", "Table"),
    "landscape run --points 3 --images 50": ("out/landscape.html", "<script>"),
    "theory": ("out/theory.html", "<script>"),
    "demo --seeds 1 --epochs 1": ("out/demo/demo.html", "AMP"),
}


def flatmin(words: str, folder: Path) -> str:
    command = Path(sysconfig.get_path("scripts")) / "flatmin"
    plain = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([command, *words.split()], cwd=folder, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, f"flatmin {words}: {done.stdout}{done.stderr}"
    return done.stdout


def check(folder: Path) -> None:
    assert flatmin("--version", folder).startswith(f"flatmin {version('flatmin')}, torch ")
    assert "no errors, no warnings" in flatmin("doctor --device cpu", folder)
    flatmin(TRAIN, folder)
    result = json.loads((folder / "run" / "result.json").read_text())
    assert (result["flatmin"], result["commit"]) == (version("flatmin"), None)  # an installation has no commit
    evaluated = json.loads(flatmin("evaluate run --json --device cpu", folder))
    assert evaluated["error"] == result["test_error"]
    for words, (page, content) in PAGES.items():
        flatmin(words, folder)
        assert content in (folder / page).read_text(), f"flatmin {words}: {page} lacks {content}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as elsewhere:
        check(Path(elsewhere))
    print(f"flatmin {version('flatmin')} runs its laboratory from a wheel")
