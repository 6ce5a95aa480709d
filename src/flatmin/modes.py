"""A model as it is looked at: in eval mode, and so that gradients can be taken of it there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Every module in eval mode; afterwards, also after an exception, each in the mode it had.

    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1).eval())
    >>> with evaluating(model):
    ...     [module.training for module in model.modules()]
    [False, False, False]
    >>> [module.training for module in model.modules()]
    [True, True, False]
    """
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def with_gradients(model: object) -> Iterator[None]:
    """Eval mode for whoever takes gradients: cuDNN's recurrent networks have none in it, and torch's own stand in."""
    recurrent = isinstance(model, nn.Module) and any(isinstance(module, nn.RNNBase) for module in model.modules())
    cudnn = torch.backends.cudnn
    enabled = cudnn.enabled
    try:
        cudnn.enabled = enabled and not recurrent
        with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
            yield
    finally:
        cudnn.enabled = enabled
