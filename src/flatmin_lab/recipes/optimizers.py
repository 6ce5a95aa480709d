"""Base optimizers: torch's by name, or a function of the user's own; AMP and RMP wrap whichever it is.

    sgd                         the paper's, with its momentum
    adamw, adam, nadam, …       with torch's own rate and weight decay, unless given
    muon                        orthogonal momentum for matrices and filters, SGD for the rest (muon.py)
    file.py:make_optimizer      called with those of params, model, lr, weight_decay that it declares

A schedule scales the rate of every group: groups that start with different rates keep their ratio.
"""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from flatmin_lab.recipes.muon import Muon
from flatmin_lab.system.user_code import is_user_code, load_function, parameters_of

DEFAULT = "make_optimizer"
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adamw": AdamW,
    "adam": Adam,
    "nadam": NAdam,
    "radam": RAdam,
    "adamax": Adamax,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "muon": Muon,
}
FIELDS = {"lr", "weight_decay"}  # of the recipe, for every optimizer
SGD_FIELDS = {"momentum", "nesterov"}  # of the recipe, for SGD alone
OWN_RATE = 1e-3  # of a user's optimizer whose function declares no default


def is_known(name: str) -> bool:
    return name in OPTIMIZERS or is_user_code(name)


def setting_names(name: str) -> list[str]:
    """The names of a built-in optimizer's settings, besides the fields of the recipe.

    >>> setting_names("adamw")[:3]
    ['betas', 'eps', 'amsgrad']
    """
    taken = {"self", "params", *FIELDS, *(SGD_FIELDS if name == "sgd" else ())}
    return [key for key in signature(OPTIMIZERS[name]).parameters if key not in taken]


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raise if a built-in optimizer does not take these; a user's function raises by itself."""
    if name not in OPTIMIZERS:
        return
    known = setting_names(name)
    if unknown := [key for key in settings if key not in known]:
        fields = [
            f"--{key.replace('_', '-')}" for key in unknown if key in FIELDS | (SGD_FIELDS if name == "sgd" else set())
        ]
        way_out = f"; give {' and '.join(fields)} instead" if fields else ""
        raise ValueError(f"optimizer_settings of {name} are {', '.join(known)}, got {', '.join(unknown)}{way_out}")


def default_fields(name: str) -> dict[str, float]:
    """An optimizer's default rate and weight decay; none for SGD, which has the paper's.

    >>> default_fields("adamw"), default_fields("sgd")
    ({'lr': 0.001, 'weight_decay': 0.01}, {})
    """
    if name == "sgd":
        return {}
    declared = _declared(name)
    found = {key: declared[key].default if key in declared else Parameter.empty for key in ("lr", "weight_decay")}
    usual = {"lr": OWN_RATE, "weight_decay": 0.0}
    return {key: float(value) if isinstance(value, int | float) else usual[key] for key, value in found.items()}


def _declared(name: str) -> Mapping[str, Parameter]:
    if name in OPTIMIZERS:
        return signature(OPTIMIZERS[name]).parameters
    return parameters_of(load_function(name, DEFAULT)) if is_user_code(name) else {}
