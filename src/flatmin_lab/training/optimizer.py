"""The base optimizer of a recipe: torch's by name, or the user's own, over the parameters that are trained.

On a GPU, those of torch's that can be part of a CUDA graph are made so (`capturable`), and Adam and AdamW as one kernel
(`fused`); outside the graph, such a step would take longer than the passes of a small network.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from inspect import signature
from typing import Any

from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from flatmin.capture.clipped_sgd import ClippedSGD, ClippedStep
from flatmin_lab.recipes.optimizers import DEFAULT, OPTIMIZERS
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.system.user_code import call_with, load_function, parameters_of

IMPLEMENTATION = ("capturable", "foreach", "fused", "differentiable")  # settings that are not part of the mathematics


@cache
def _clipped(kind: type[Optimizer]) -> Any:
    return ClippedSGD if kind is SGD else type(f"Clipped{kind.__name__}", (ClippedStep, kind), {})


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The optimizer of torch itself, which a captured step may have a kernel for; or one that clips its gradient."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ValueError(f"{recipe.model} has no parameter that requires a gradient: there is nothing to train")
    if recipe.optimizer not in OPTIMIZERS:
        return _own(recipe, model, params)
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in recipe.optimizer_settings.items()
    }
    settings |= {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        settings |= {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
    kind: Any = OPTIMIZERS[recipe.optimizer]
    settings = {**_for_graphs(recipe, kind, params), **settings}
    groups = _groups(params) if recipe.exempt_norms else params
    try:
        if recipe.clip_norm is None:
            made: Optimizer = kind(groups, **settings)
        else:
            made = _clipped(kind)(groups, clip_norm=recipe.clip_norm, **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{recipe.optimizer} does not take {dict(recipe.optimizer_settings)}: {error}") from error
    return made


def _for_graphs(recipe: Recipe, kind: type[Optimizer], params: list[nn.Parameter]) -> dict[str, bool]:
    """What makes the step part of a CUDA graph, where it can be: it cannot with a scaler (fp16), nor if it clips."""
    known = signature(kind).parameters
    in_graph = all(param.is_cuda for param in params) and recipe.precision != "fp16" and recipe.clip_norm is None
    if not in_graph or "capturable" not in known:
        return {}
    is_chosen = any(name in recipe.optimizer_settings for name in IMPLEMENTATION)
    return {"capturable": True, **({"fused": True} if "fused" in known and not is_chosen else {})}


def _groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Those with a weight decay, and those of norms and biases without one; no group is empty."""
    decayed, exempt = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _own(recipe: Recipe, model: nn.Module, params: list[nn.Parameter]) -> Optimizer:
    name, function = recipe.optimizer, load_function(recipe.optimizer, DEFAULT)
    declared = parameters_of(function)
    if "lr" not in declared:
        raise ValueError(f"{name} must take lr, the peak learning rate, which the schedule scales")
    if "weight_decay" not in declared and recipe.weight_decay:
        raise ValueError(f"{name} takes no weight_decay, got {recipe.weight_decay}; let it take one, or leave it out")
    if recipe.clip_norm is not None:
        raise ValueError(
            f"--clip-norm works only with torch's optimizers, got {recipe.clip_norm} and {name}; clip in its own step"
        )
    offered = {"params": params, "model": model, "lr": recipe.lr, "weight_decay": recipe.weight_decay}
    made = call_with(name, function, offered, recipe.optimizer_settings)
    if not isinstance(made, Optimizer):
        raise TypeError(f"{name} must make a torch.optim.Optimizer, got {type(made).__name__}")
    if isinstance(made, LBFGS):
        raise ValueError(
            f"{name} must take one step per gradient, got LBFGS, which runs a search of its own; use another"
        )
    known = {id(param) for param in model.parameters()}
    if any(id(param) not in known for group in made.param_groups for param in group["params"]):
        raise ValueError(f"{name} must step the parameters that it is given as params, got others among its groups")
    return made


# ---- what a checkpoint can hold of a user's own optimizer


def check_by_parameter(state: Mapping[Any, Any], name: str) -> None:
    """Raise if an optimizer keeps something that belongs to no parameter."""
    if others := [key for key in state if not isinstance(key, int)]:
        raise ValueError(
            f"a checkpoint holds an optimizer's state by parameter, but {name} keeps {others[0]!r} beside them; keep "
            "it in the state of a parameter, or in param_groups"
        )


def check_plain(parts: Iterable[Mapping[str, Any]], name: str) -> None:
    """Raise if an optimizer keeps something other than tensors that JSON cannot hold."""
    for key, value in ((key, value) for values in parts for key, value in values.items()):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a checkpoint holds tensors, numbers and words, but {name} keeps {key} as a {type(value).__name__} "
                f"({error}); keep it as one of these in the optimizer's state"
            ) from error
