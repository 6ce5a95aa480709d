"""What a number was measured with: the hardware, the threads, the versions, the commit."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import flatmin


def facts(device: torch.device) -> dict[str, Any]:
    return {
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flatmin": flatmin.__version__,
        "commit": commit(),
    }


def device_named(name: str | None) -> torch.device:
    """The device of that name, if it exists; without a name, a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; available: {', '.join(here)}") from error
    if f"{device.type}:{device.index or 0}" not in here and str(device) not in here:
        raise ValueError(f"there is no device {name!r} here; available: {', '.join(here)}")
    return device


def devices_named(names: str | None) -> list[str]:
    """The devices of a comma-separated list; without one, all GPUs of this machine, or the CPU."""
    if names is not None:
        found = [str(device_named(name.strip())) for name in names.split(",")]
    elif torch.cuda.is_available():
        found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    else:
        found = ["cpu"]
    if len(set(found)) < len(found) or ("cpu" in found and len(found) > 1):
        raise ValueError(f"--device takes GPUs, each once, or cpu alone, got {names}")
    return found


@cache
def hardware(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


@cache
def commit() -> str | None:
    """The commit of this source, marked dirty if it was changed since; None outside a checkout.

    If the source comes without its history, FLATMIN_COMMIT names the commit.
    """
    if said := os.environ.get("FLATMIN_COMMIT"):
        return said
    here = Path(__file__)

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(here.parent), *words], capture_output=True, text=True, check=False)

    try:
        if git("ls-files", "--error-unmatch", here.name).returncode:  # someone else's repository around an installation
            return None
        return git("describe", "--always", "--dirty", "--exclude=*").stdout.strip() or None
    except OSError:  # no git
        return None
