"""A file of weights: safetensors, or a state dict written by torch.save; no pickled code is run.

Whether they fit a model is checked before any of them is assigned: keys and shapes that differ are named.
"""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatmin_lab.system.optional_deps import need

STATE_DICT_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
)  # where trainers put a state dict in a larger checkpoint
CHECKPOINT_METADATA = {"state", "sha256"}  # of the checkpoints that flatmin writes (runs/checkpoint.py)
# of DataParallel and torch's AveragedModel, of torch.compile, of Lightning
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")
AVERAGED_MODELS_OWN = "n_averaged"  # beside its "module." keys


def load_weights(model: nn.Module, path: Path, *, without: Sequence[str] = ()) -> None:
    """Load a file of weights into the model; an error names the keys and shapes that differ.

    Keys that begin with one of `without` are left as they are in the model.
    """
    weights = _without_wrapper_prefix(read_weights(path), set(model.state_dict()))
    assign_weights(model, weights, str(path), without=without)


def read_weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; with --model, give the file with its weights")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the file with the model's weights")
    if path.suffix == ".safetensors":
        safetensors = need("safetensors", "reading safetensors")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                is_checkpoint = (file.metadata() or {}).keys() >= CHECKPOINT_METADATA
                weights = {} if is_checkpoint else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error})") from error
        if is_checkpoint:
            raise ValueError(
                f"{path} is a run's checkpoint, which holds more than weights; its weights become a file with "
                "`flatmin export RUN --to weights.safetensors`, where RUN is the run's folder"
            )
        return weights
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{path} cannot be read as weights alone: it is damaged, or holds other objects, which are never run; "
            "save model.state_dict()"
        ) from error
    for name in STATE_DICT_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        shown = f" with {_few(sorted(map(str, content)))}" if isinstance(content, Mapping) else ""
        raise ValueError(f"{path} must hold a state dict, got {type(content).__name__}{shown}; save model.state_dict()")
    return dict(content)


def _without_wrapper_prefix(weights: dict[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """Without the prefixes that wrappers put before every key, unless the model has such keys itself."""
    weights = {key: value for key, value in weights.items() if key != AVERAGED_MODELS_OWN or key in wanted}
    while weights and not weights.keys() & wanted:
        found = [prefix for prefix in WRAPPER_PREFIXES if all(key.startswith(prefix) for key in weights)]
        if not found:
            break
        weights = {key.removeprefix(found[0]): value for key, value in weights.items()}
    return weights


def assign_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str, *, without: Sequence[str] = ()) -> None:
    """Assign weights to a model; if they are another model's, the error names the keys that differ."""
    own = model.state_dict()
    if unknown := [prefix for prefix in without if not any(_is_under(key, prefix) for key in own)]:
        names = list(dict.fromkeys(key.partition(".")[0] for key in own))
        raise ValueError(f"the model has no module called {', '.join(unknown)}; it has {_few(names, 12)}")
    kept = {key for key in own if any(_is_under(key, prefix) for prefix in without)}
    has = {key: tuple(value.shape) for key, value in own.items() if key not in kept}
    given = {key: tuple(value.shape) for key, value in weights.items() if not any(_is_under(key, p) for p in without)}
    missing, foreign = has.keys() - given.keys(), given.keys() - has.keys()
    apart = [f"{key} is {given[key]}, not {has[key]}" for key in has if key in given and given[key] != has[key]]
    apart += [
        f"{key} is {weights[key].dtype}, not {own[key].dtype}"
        for key, parameter in model.named_parameters()
        if key in has and key in given and parameter.is_floating_point() and not weights[key].is_floating_point()
    ]
    differences = [
        *([f"without {_few(sorted(missing))}"] if missing else []),
        *([f"with {_few(sorted(foreign))}, which the model does not have"] if foreign else []),
        *([_few(apart)] if apart else []),
    ]
    if differences:
        of_shape = {key for key in has if key in given and given[key] != has[key]}
        raise WeightsError(f"{where} holds the weights of another model: {'; '.join(differences)}", of_shape, missing)
    model.load_state_dict({**{key: own[key] for key in kept}, **{key: weights[key] for key in has}})


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict leaves out (`persistent=False`): a pass may change them too.

    Sparse and complex ones, which a safetensors file may not hold, are left to the code that makes the model.
    """
    saved = model.state_dict().keys()
    others = ((name, buffer) for name, buffer in model.named_buffers() if name not in saved)
    return {name: buffer for name, buffer in others if buffer.layout is torch.strided and not buffer.is_complex()}


def constant_buffers(model: nn.Module) -> set[str]:
    """The names of buffers that are no statistics: those that are not finite now, such as a mask with −∞, or sparse."""
    return {name for name, buffer in model.named_buffers() if not _is_dense_and_finite(buffer)}


def _is_dense_and_finite(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and (not buffer.is_floating_point() or bool(buffer.isfinite().all()))


@torch.no_grad()
def load_unsaved_buffers(model: nn.Module, known: Mapping[str, Tensor]) -> None:
    """Copy these values into such buffers; one of another shape, such as a cache that grows, is left as it is."""
    for name, buffer in unsaved_buffers(model).items():
        if name in known and known[name].shape == buffer.shape:
            buffer.copy_(known[name])


class WeightsError(ValueError):
    """Weights that do not fit: `of_shape` has the keys with another shape, `missing` those not in the file."""

    def __init__(self, text: str, of_shape: Set[str], missing: Set[str]) -> None:
        super().__init__(text)
        self.of_shape, self.missing = of_shape, missing


def _is_under(key: str, prefix: str) -> bool:
    """Is the key of that module, or of one inside it?

    >>> _is_under("head.fc.weight", "head"), _is_under("header.weight", "head")
    (True, False)
    """
    return key == prefix or key.startswith(f"{prefix.rstrip('.')}.")


def _few(names: list[Any], most: int = 4) -> str:
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
