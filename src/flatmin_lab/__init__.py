"""The laboratory: data, models, training and reports around flatmin. It imports flatmin; flatmin never imports it.

trained = flatmin_lab.load_run("runs/first")        a trained model, its normalisation and its classes
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatmin_lab.evaluation.trained_model import TrainedModel, load_run

__all__ = ["TrainedModel", "load_run"]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: the command needs not all of it."""
    if name not in __all__:
        raise AttributeError(f"module 'flatmin_lab' has no attribute {name!r}")
    return getattr(import_module("flatmin_lab.evaluation.trained_model"), name)
