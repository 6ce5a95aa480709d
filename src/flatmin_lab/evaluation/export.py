"""A trained model in files that need no flatmin: its weights, or the whole program.

    model.safetensors     the state dict: for code that builds the network itself
    model.pt2             a torch.export program, normalisation included, any number of images: for code that does not

A JSON file beside it says what the model takes and returns, and where it comes from. A program is loaded again and
must reproduce the model's logits before it gets its name.
"""

import copy
import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatmin_lab.evaluation.subject import NormalisingModel
from flatmin_lab.evaluation.trained_model import TrainedModel
from flatmin_lab.runs.checkpoint import unshared
from flatmin_lab.system.files import atomic_write
from flatmin_lab.system.machine import facts
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.rng import generator

SUFFIXES = (".safetensors", ".pt2")
EXPORTED_BATCH = 2  # torch.export takes a batch of 1 for a constant
CHECKED_BATCHES = (1, 3, 8)
TOLERANCE = 1e-4  # of logits, relative to the largest: a program may sum in another order


class ExportError(ValueError):
    """The model cannot be exported like this."""


def description_of(path: Path) -> Path:
    """The JSON file beside an exported one."""
    return path.with_name(f"{path.name}.json")


def export(trained: TrainedModel, path: Path) -> dict[str, Any]:
    """Write the model to a .safetensors or .pt2 file, and its description beside it; returns the description."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--to takes a {' or a '.join(SUFFIXES)} file, got {path}")
    description = description_of(path)
    for file in (path, description):
        if file.exists():
            raise FileExistsError(f"{file} already exists; remove it, or choose another name with --to")
    if path.suffix == ".safetensors":
        content = _weights(trained)
        more: dict[str, Any] = {"format": "state dict", "input": _input_of(trained, is_normalised=True)}
    else:
        content, difference = _program(trained)
        more = {"format": "torch.export", "input": _input_of(trained, is_normalised=False)}
        more |= {"largest_difference": difference}
    said = {**more, **_describe(trained)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in ((path, content), (description, (json.dumps(said, indent=2) + "\n").encode())):
        with atomic_write(file) as opened:
            opened.write(text)
    return said


def _weights(trained: TrainedModel) -> bytes:
    save = need("safetensors.torch", "a safetensors file").save
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in trained.model.state_dict().items()}
    content: bytes = save(unshared(state), metadata={"format": "pt"})
    return content


class _Program(NormalisingModel):
    """A program has no `if`: bytes, which the model divides by 255, would pass for images from 0 to 1."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(torch.float32))  # torch.export makes this a check that they are float32


def _program(trained: TrainedModel) -> tuple[bytes, float]:
    """The program, and the largest difference of its logits from the model's."""
    model = copy.deepcopy(_Program(trained.model, trained.normalise)).cpu().eval()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    try:
        program = _traced(model, _images(trained, EXPORTED_BATCH))
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        return buffer.getvalue(), _check(buffer.getvalue(), model, trained)
    except ExportError:
        raise
    except Exception as error:  # a network may do anything
        first = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"torch.export cannot export this model for a variable number of images ({type(error).__name__}: {first}); "
            "export its weights instead, with --to NAME.safetensors"
        ) from error


def _traced(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    """Traced by running it, and where that fixes the number of images, as `len(x)` does, by reading its bytecode."""
    for strict in (False, True):
        try:
            with torch.no_grad(), _plain_attention(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about itself
                shapes = ({0: torch.export.Dim("batch")},)
                return torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict)
        except Exception:
            if strict:
                raise
    raise AssertionError("unreachable")


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without the fused kernel of nn.TransformerEncoderLayer: torch 2.11 cannot trace it, and few runtimes have it."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@torch.no_grad()
def _check(content: bytes, model: nn.Module, trained: TrainedModel) -> float:
    """The largest difference of the program's logits from the model's; an error where it is too large."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = torch.export.load(io.BytesIO(content)).module()
        found = [(again(x), model(x)) for x in (_images(trained, count) for count in CHECKED_BATCHES)]
    difference = max(float((theirs - ours).abs().max()) for theirs, ours in found)
    scale = max(1.0, *(float(ours.abs().max()) for _, ours in found))
    if not difference <= TOLERANCE * scale:
        raise ExportError(
            f"the exported program's logits differ from the model's by up to {difference:g}; nothing was written. "
            "Export the weights instead, with --to NAME.safetensors"
        )
    return difference


def _images(trained: TrainedModel, count: int) -> Tensor:
    return torch.rand(count, *trained.input_shape, generator=generator("export", count))


def _input_of(trained: TrainedModel, *, is_normalised: bool) -> dict[str, Any]:
    mean, std = trained.normalise.mean.tolist(), trained.normalise.std.tolist()
    values = "from 0 to 1" if trained.kind == "images" else "as in the data"
    normalisation = {"mean": mean, "std": std, "inside": not is_normalised}
    shape = ["batch", *trained.input_shape]
    return {"kind": trained.kind, "shape": shape, "values": values, "normalisation": normalisation}


def _describe(trained: TrainedModel) -> dict[str, Any]:
    recipe = trained.recipe
    return {
        "model": recipe.model,
        "classes": list(trained.classes),
        "weights": trained.weights,
        "epoch": trained.epoch,
        "metrics": dict(trained.metrics),
        "checkpoint": trained.checkpoint.name,
        "recipe": recipe.as_json(),
        "seed": trained.seed,
        **facts(torch.device("cpu")),
    }
