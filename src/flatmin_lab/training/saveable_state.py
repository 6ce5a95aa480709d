"""What a checkpoint can hold of a user's own code: dense tensors, numbers and words. The rest is refused at the start.

Only a pickle could hold more, and none is ever loaded. Better to know before the first step than when a run is resumed.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def check_model(model: nn.Module, name: str) -> None:
    """Raise if a module keeps something other than dense tensors that only a pickle could hold."""
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"a checkpoint holds a model's tensors, but {key} of {name} is a {type(value).__name__}; let its "
                "get_extra_state return a tensor, or keep the value as a buffer"
            )
        if value.layout is not torch.strided:
            raise ValueError(
                f"a checkpoint holds dense tensors, but {key} of {name} is sparse ({value.layout}); keep its indices "
                "and values as buffers, or register it with persistent=False if it never changes"
            )


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
