"""Fingerprints of what flatmin computes: a refactor leaves every one as it was.

    make fingerprint        records them in out/fingerprint.txt; where that file is there, names each that differs

    step       SHA-256 of the weights after 20 steps: every base, ball and norm, AMP with N = 1 and 2, and RMP
    captured   the same through `captured_step`, which on the CPU takes ordinary steps
    train      digits, 2 epochs with each of the eight methods: the last checkpoint's tensors, the metrics, the result
    resume     a run killed with SIGKILL after its first epoch and then resumed
    reproduce  the result files of `reproduce table1 --protocol smoke`
    report     the page of `flatmin report results`, byte for byte

Only the public interface, the command and the files it writes are used, so the same script serves before and after a
move. Times, and the commit that a result names, are left out. Fingerprints belong to one machine and one torch.
"""

import argparse
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import flatmin
from tests.support.cases import MODELS, OPTIMIZERS, Setup, run, setup

ROOT = Path(__file__).parents[2]
STEPS = 20
METHODS = ("erm", "label_smoothing", "flooding", "mixup", "adversarial", "dropout", "rmp", "amp")
NOT_COMPUTED = {
    "seconds",
    "cpu_seconds",
    "resumed",
    "attack_seconds",
    "flatness_seconds",
    "landscape_seconds",
    "commit",
    "hardware",
    "threads",
}
START_SECONDS = 300  # for the first epoch of a run on a loaded machine
Fingerprint = tuple[str, str]


def digest_of(tensors: Iterator[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def perturbing(name: str, base: torch.optim.Optimizer, case: Setup, **settings: Any) -> flatmin.AMP | flatmin.RMP:
    epsilon = 0.1 if settings["norm"] == "l2" else 0.01
    if name == "rmp":
        generator = torch.Generator().manual_seed(1)
        return flatmin.RMP(base, epsilon=epsilon, model=case.model, generator=generator, **settings)
    return flatmin.AMP(base, epsilon=epsilon, model=case.model, inner_iter=int(name[-1]), **settings)


def stepped(method: str, base: str, ball: str, norm: str, *, captured: bool) -> Iterator[Tensor]:
    """The weights and buffers of every model of the table after 20 steps."""
    for model in MODELS:
        case = setup(model)
        optimizer = perturbing(method, OPTIMIZERS[base](case.model.parameters()), case, ball=ball, norm=norm)
        if captured:
            step = flatmin.captured_step(case.model, lambda _, loss=case.loss: loss(), optimizer)
            for _ in range(STEPS):
                step()
        else:
            run(case, optimizer, STEPS)
        yield from case.weights()
        yield from case.buffers()


def steps() -> Iterator[Fingerprint]:
    table = itertools.product(("amp1", "amp2", "rmp"), OPTIMIZERS, ("global", "group", "tensor"), ("l2", "linf"))
    for method, base, ball, norm in table:
        name = f"{method} {base} {ball} {norm}"
        yield f"step {name}", digest_of(stepped(method, base, ball, norm, captured=False))
        if ball == "global" and norm == "l2":
            yield f"captured {name}", digest_of(stepped(method, base, ball, norm, captured=True))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "flatmin_lab", *map(str, arguments)]


def called(*arguments: object) -> None:
    subprocess.run(command(*arguments), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def without_times(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: without_times(value) for key, value in values.items() if key not in NOT_COMPUTED}
    return [without_times(value) for value in values] if isinstance(values, list) else values


def digest_of_json(*documents: str) -> str:
    plain = [without_times(json.loads(document)) for document in documents]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def run_folder(name: str, folder: Path) -> Iterator[Fingerprint]:
    checkpoint = max(folder.glob("checkpoint-*.safetensors"))
    tensors = load_file(checkpoint)
    yield f"{name} weights", digest_of(tensors[key] for key in sorted(tensors))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    yield f"{name} metrics", digest_of_json(*lines)
    yield f"{name} result", digest_of_json((folder / "result.json").read_text())


def trained(place: Path) -> Iterator[Fingerprint]:
    for method in METHODS:
        called("train", "--data", "digits", "--epochs", 2, "--method", method, "--out", place / method)
        yield from run_folder(f"train {method}", place / method)


def resumed(place: Path) -> Iterator[Fingerprint]:
    folder = place / "resumed"
    arguments = command("train", "--data", "digits", "--epochs", 4, "--out", folder)
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + START_SECONDS
    while not list(folder.glob("checkpoint-*.safetensors")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    called("train", "--resume", "--out", folder)
    yield from run_folder("resume", folder)


def reproduced(place: Path) -> Iterator[Fingerprint]:
    results = place / "results"
    called("reproduce", "table1", "--protocol", "smoke", "--results", results, "--runs", place / "runs")
    for path in sorted(results.rglob("*.json")):
        if path.name != "planned.json":
            yield f"reproduce {path.relative_to(results)}", digest_of_json(path.read_text())


def reported(place: Path) -> Iterator[Fingerprint]:
    page = place / "report.html"
    called("report", "results", "--out", page)
    yield "report results", hashlib.sha256(page.read_bytes()).hexdigest()


def fingerprints() -> Iterator[Fingerprint]:
    torch.set_num_threads(1)
    yield from steps()
    with tempfile.TemporaryDirectory() as folder:
        for part in (trained, resumed, reproduced, reported):
            yield from part(Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description="Record fingerprints of what flatmin computes, or compare them.")
    parser.add_argument("file", type=Path, help="compared with, if it is there; else written")
    file: Path = parser.parse_args().file
    found = dict(fingerprints())
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{digest}  {name}\n" for name, digest in found.items()))
        print(f"{len(found)} fingerprints written to {file}")
        return 0
    lines = (line.split("  ", 1) for line in file.read_text().splitlines())
    known = {name: digest for digest, name in lines}
    apart = [name for name in sorted(known.keys() | found.keys()) if known.get(name) != found.get(name)]
    for name in apart:
        print(f"differs: {name}")
    print(f"{len(found)} fingerprints, {len(apart)} differ from those in {file}")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
