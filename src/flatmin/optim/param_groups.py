"""Which parameters are perturbed: the groups of an optimizer, split by name.

Only parameters in a group with ε > 0 are perturbed; ε is a group setting, like weight decay. To perturb only norm
layers, all but biases, or only adapters, each group is split into two that differ only in ε.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from flatmin.core.messages import describe
from flatmin.optim.wrapper import Group


def groups(
    model: nn.Module, *, perturb: Callable[[str, nn.Parameter], bool], among: Iterable[Group] | None = None
) -> list[Group]:
    """Groups for an optimizer in which only the parameters that `perturb(name, parameter)` selects are perturbed.

    The rest is trained as usual, with `epsilon=0`. `among` holds groups of the model's parameters, which keep their
    settings; without it, all parameters form one group. A tied weight has several names, and is selected if any of
    them is.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> chosen, rest = groups(model, perturb=lambda name, parameter: name.endswith("weight"))
    >>> len(chosen["params"]), len(rest["params"]), rest["epsilon"]
    (2, 2, 0.0)
    """
    if not isinstance(model, nn.Module) or not callable(perturb):
        raise TypeError(
            f"groups takes a model and a function perturb(name, parameter), got {describe(model)} and "
            f"{describe(perturb)}; "
            'write groups(model, perturb=lambda name, parameter: "norm" in name)'
        )
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    chosen = {param for param, known in names.items() if any(perturb(name, param) for name in known)}
    split = []
    for group in [{"params": list(names)}] if among is None else among:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        plain = [
            param[1] if isinstance(param, tuple) else param for param in params
        ]  # torch takes (name, parameter) too
        if strangers := sum(param not in names for param in plain):
            raise ValueError(
                f"groups() splits the parameters of its model, got {strangers} that it does not have; "
                "give it the model that the optimizer trains"
            )
        for is_chosen in (True, False):
            places = [place for place, param in enumerate(plain) if (param in chosen) == is_chosen]
            part = {**group, "params": [params[place] for place in places]}
            if "param_names" in group:
                part["param_names"] = [group["param_names"][place] for place in places]
            split.append(part if is_chosen else {**part, "epsilon": 0.0})
    if all(group.get("epsilon") == 0 for group in split if group["params"]):
        raise ValueError(
            f"perturb must select at least one parameter, got none of {len(names)}; "
            f"the first names are {', '.join(known[0] for known in list(names.values())[:3])}"
        )
    return [group for group in split if group["params"]]
