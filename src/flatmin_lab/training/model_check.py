"""Checks of a model before it is trained or evaluated: it takes these inputs, and returns logits for these classes.

And a checkpoint can hold what it keeps: only a pickle could hold more than dense tensors, and none is ever loaded.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flatmin.core.model_state import eval_mode
from flatmin.core.random_state import random_state, set_random_state
from flatmin.doctor import own_lines
from flatmin_lab.system.rng import generator_devices
from flatmin_lab.system.user_code import DEVICE_ERRORS, user_lines


def check_outputs(model: nn.Module, x: Tensor, kind: str, classes: int) -> list[str]:
    """Raise where two inputs `x` of that kind do not become logits; notes on what looks odd about these."""
    with torch.no_grad(), eval_mode(model), _telling(f"the model does not take {kind}"):
        logits = model(x)
    _check_logits(logits, len(x), classes)
    notes = []
    if logits.shape[1] > classes:
        notes.append(f"the model has {logits.shape[1]} outputs, but the data has {classes} classes")
    if bool((logits >= 0).all()) and torch.allclose(logits.sum(dim=1), torch.ones_like(logits[:, 0]), atol=1e-3):
        notes.append("its outputs look like probabilities; return logits, before softmax")
    return notes


def check_single_output(model: nn.Module, x: Tensor, classes: int) -> None:
    """The shape for one input, which may be all of a batch, or of a prediction: `squeeze()` drops its dimension.

    A network that takes no single input passes: with the statistics of a batch, it may need two.
    """
    try:
        with _unchanged_generators(x.device), torch.no_grad(), eval_mode(model):
            logits = model(x[:1])
    except DEVICE_ERRORS:
        raise
    except Exception:  # a user's code may raise anything
        return
    _check_logits(logits, 1, classes, "; keep the first dimension: flatten(1) does, and squeeze() does not")


def check_training_outputs(model: nn.Module, x: Tensor, classes: int) -> None:
    """The same in training mode, where some networks return more; on a copy, so that no statistic moves."""
    with _unchanged_generators(x.device), torch.no_grad(), _telling("the model cannot be trained"):
        logits = copy.deepcopy(model).train()(x)
    _check_logits(logits, len(x), classes, " in training mode")


@contextmanager
def _unchanged_generators(device: torch.device) -> Iterator[None]:
    devices = generator_devices(device)
    states = [random_state(one) for one in devices]
    try:
        yield
    finally:
        for one, state in zip(devices, states, strict=True):
            set_random_state(one, state)


def check_saveable(model: nn.Module, name: str) -> None:
    """Raise where its state dict holds something other than dense tensors: better now than when the run is resumed."""
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


@contextmanager
def _telling(problem: str) -> Iterator[None]:
    """A forward pass that raises is reported as this problem, with the user's own lines if it ran any."""
    try:
        yield
    except Exception as error:
        if own_lines(error):
            with user_lines(f"{problem}: its forward pass"):
                raise
        if isinstance(error, DEVICE_ERRORS) or not isinstance(error, RuntimeError | ValueError | TypeError):
            raise
        raise ValueError(f"{problem}: {error}") from error


def _check_logits(logits: object, count: int, classes: int, when: str = "") -> None:
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != count or logits.shape[1] < classes:
        raise ValueError(
            f"the model must return logits ({count}, K) of {count} input{'s' if count > 1 else ''} for K = {classes} "
            f"classes, got {shape}{when}"
        )
    if not logits.is_floating_point():
        raise ValueError(f"the model must return logits as floating-point numbers, got {logits.dtype}")
