"""A user's own model: a function or class that builds it, and a file with its weights.

Weights are safetensors, or a state dict written by torch.save; no pickled code is run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatmin_lab.evaluation.user_code import find_function, is_user_code
from flatmin_lab.system.optional_deps import need

STATE_DICT_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
)  # where trainers put a state dict in a larger checkpoint
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile and Lightning


def make_model(name: str) -> nn.Module:
    """The model that the function makes; it is called without arguments."""
    if not is_user_code(name):
        raise ValueError(
            f"--model takes file.py:make_model or mymodule:make_model, got {name!r}; a model trained by flatmin is "
            "named by its run's folder"
        )
    function = find_function(name, "make_model")
    try:
        model = function()
    except TypeError as error:
        raise TypeError(f"{name} is called without arguments ({error})") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must make a torch.nn.Module, got {type(model).__name__}")
    return model


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a file of weights into the model; an error names the keys and shapes that differ."""
    assign_weights(model, _without_wrapper_prefix(read_weights(path), set(model.state_dict())), str(path))


def read_weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; with --model, give the file with its weights")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the file with the model's weights")
    if path.suffix == ".safetensors":
        safetensors = need("safetensors.torch", "reading safetensors")
        try:
            return dict(safetensors.load_file(path))
        except Exception as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error})") from error
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
    """Without the prefix that a wrapper put before every key, unless the model has such keys itself."""
    for prefix in WRAPPER_PREFIXES:
        if weights and all(key.startswith(prefix) for key in weights) and not weights.keys() & wanted:
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def assign_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Assign weights to a model; if they are another model's, the error names the keys that differ."""
    has = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    given = {key: tuple(value.shape) for key, value in weights.items()}
    missing, foreign = has.keys() - given.keys(), given.keys() - has.keys()
    apart = [f"{key} is {given[key]}, not {has[key]}" for key in has if key in given and given[key] != has[key]]
    differences = [
        *([f"without {_few(sorted(missing))}"] if missing else []),
        *([f"with {_few(sorted(foreign))}, which the model does not have"] if foreign else []),
        *([_few(apart)] if apart else []),
    ]
    if differences:
        raise ValueError(f"{where} holds the weights of another model: {'; '.join(differences)}")
    model.load_state_dict(dict(weights))


def _few(names: list[Any], most: int = 4) -> str:
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
