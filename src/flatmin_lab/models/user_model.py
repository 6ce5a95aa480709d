"""Networks that are not built in: a function or class of the user's own, and timm's by name.

file.py:make_model, mymodule:Net        called with those of the names below that it declares
timm:resnet18                           timm.create_model, where timm is installed

num_classes     how many logits an input has
in_channels     of the images; for points, how many numbers a point has
image_size      (height, width), for images alone
input_shape     (channels, height, width), or (numbers,)
dropout         the method's rate: 0 except for the method dropout
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatmin.core.tensors import written_once
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.user_code import call_with, is_user_code, load_function, parameters_of, split_name, user_lines

DEFAULT, TIMM = "make_model", "timm:"  # the function's name if none is given; before the name of a network of timm's


def is_timm(name: str) -> bool:
    return name.startswith(TIMM)


def is_own(name: str) -> bool:
    """Is it the user's own, in a file or a module?"""
    return is_user_code(name) and not is_timm(name)


def short_name(name: str) -> str:
    """For names of folders.

    >>> short_name("/home/me/nets/mine.py:make_model"), short_name("timm:resnet18"), short_name("convnet")
    ('mine-make_model', 'timm-resnet18', 'convnet')
    """
    if not is_own(name):
        return name.replace(":", "-").replace("/", "-")
    place, function = split_name(name, DEFAULT)
    return f"{place.replace('/', '.').removesuffix('.py').rpartition('.')[2]}-{function}"


def make_user_model(
    name: str, shape: Sequence[int], *, num_classes: int, dropout: float = 0.0, settings: Mapping[str, Any]
) -> nn.Module:
    """The network that the user's function makes, or timm's, for inputs of that shape."""
    if is_timm(name):
        return _make_timm(name.removeprefix(TIMM), shape, num_classes=num_classes, dropout=dropout, settings=settings)
    if not is_own(name):
        raise ValueError(
            f"--model takes file.py:make_model or mymodule:make_model, got {name!r}; a model trained by flatmin is "
            "named by its run's folder"
        )
    function = load_function(name, DEFAULT)
    offered: dict[str, Any] = {"num_classes": num_classes, "in_channels": shape[0]}
    offered |= {"image_size": tuple(shape[1:])} if len(shape) == 3 else {}
    offered |= {"input_shape": tuple(shape), "dropout": dropout}
    if dropout > 0 and "dropout" not in settings and "dropout" not in parameters_of(function):
        raise ValueError(f"the method dropout needs a network with dropout: let {name} take dropout, its rate")
    model = call_with(name, function, offered, settings)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must make a torch.nn.Module, got {type(model).__name__}")
    _materialise(model, shape, name)
    _unfold_buffers(model)
    return model


def _materialise(model: nn.Module, shape: Sequence[int], name: str) -> None:
    """Give lazy layers their weights, which they get in a first pass.

    The pass is in eval mode, so that batch normalisation's statistics do not include it; layers used only in training
    need a second one.
    """
    modes = {module: module.training for module in model.modules()}
    for training in (False, True):
        if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            model.train(training)
            with user_lines(f"the first pass of {name}"), torch.no_grad():
                model(torch.zeros(2, *shape))
    for module, training in modes.items():
        module.training = training


def _unfold_buffers(model: nn.Module) -> None:
    """Give expanded buffers a place for each of their numbers: else no checkpoint could be loaded into them."""
    unfolded: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.layout is torch.strided and written_once(buffer) is not buffer:
                setattr(module, name, unfolded.setdefault(buffer, buffer.contiguous()))


def _make_timm(
    name: str, shape: Sequence[int], *, num_classes: int, dropout: float, settings: Mapping[str, Any]
) -> nn.Module:
    try:
        timm = need("timm", f"the model timm:{name}")
    except ImportError as error:
        raise ImportError(
            f"the model timm:{name} needs timm, which is not installed here: pip install timm", name=error.name
        ) from error
    rate = {"drop_rate": dropout} if dropout > 0 else {}
    given = {"num_classes": num_classes, "in_chans": shape[0], **rate, **settings}
    with user_lines(f"timm.create_model({name!r}, {', '.join(f'{key}={value!r}' for key, value in given.items())})"):
        model: nn.Module = timm.create_model(name, pretrained=False, **given)
    return model
