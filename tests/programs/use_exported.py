"""Run as a program: loads exported models in a process that cannot import flatmin, and writes their logits.

    python tests/programs/use_exported.py FOLDER FILE-OF-NETWORKS

FOLDER has images.pt and, of each network, NAME.pt2 and NAME.safetensors with their descriptions. Written are
NAME.pt2.logits and NAME.safetensors.logits, and printed are the classes that a description names.
"""

import importlib.util
import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class Refusing(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] in ("flatmin", "flatmin_lab"):
            raise ModuleNotFoundError(f"{name} must not be needed", name=name)


@torch.no_grad()
def main(folder: Path, code: Path) -> None:
    images = torch.load(folder / "images.pt", weights_only=True)
    spec = importlib.util.spec_from_file_location("networks", code)
    assert spec is not None
    assert spec.loader is not None
    networks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(networks)
    for program in sorted(folder.glob("*.pt2")):
        torch.save(torch.export.load(program).module()(images), f"{program}.logits")
        weights = program.with_suffix(".safetensors")
        said = json.loads(Path(f"{weights}.json").read_text())
        _, channels, *size = said["input"]["shape"]
        mean, std = (torch.tensor(said["input"]["normalisation"][key]).view(-1, 1, 1) for key in ("mean", "std"))
        offered = {"num_classes": len(said["classes"]), "in_channels": channels, "image_size": tuple(size)}
        offered["input_shape"] = (channels, *size)
        make = getattr(networks, program.stem)
        taken = make.__init__.__annotations__
        model = make(**{key: value for key, value in offered.items() if key in taken})
        model.load_state_dict(load_file(weights))
        torch.save(model.eval()((images - mean) / std), f"{weights}.logits")
        print(" ".join(said["classes"]))
    assert not any(name.partition(".")[0] in ("flatmin", "flatmin_lab") for name in sys.modules)


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusing())
    main(Path(sys.argv[1]), Path(sys.argv[2]))
