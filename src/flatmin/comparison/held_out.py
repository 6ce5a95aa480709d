"""A model measured on held-out data: by the user's own `evaluate()`, or by error, NLL and ECE of a classifier.

With held-out pairs (inputs, classes), error and NLL are known for each example, so that two runs can be compared
example by example. With `evaluate()`, only what it returns is known. A radius that is found while training is matched
to the training loss itself, which only the closure knows: with smoothed labels, for example, the NLL is another loss.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map_only

from flatmin import metrics
from flatmin.comparison.verdict import PERCENT
from flatmin.core.messages import describe
from flatmin.core.model_state import Snapshot, eval_mode, eval_mode_with_gradients
from flatmin.core.random_state import seed_everything
from flatmin.doctor.finding import during
from flatmin.doctor.training import preserve_generators
from flatmin.doctor.user_training import UserTraining
from flatmin.optim.telemetry.step_info import loss_in, whole
from flatmin.optim.update.grad_scaler import forget_unscaled

UNNAMED = "loss"  # the name if evaluate() returns a number
HIGHER_IS_BETTER = ("acc", "accuracy", "top1", "top5", "f1", "auc", "auroc", "r2", "bleu", "iou", "map")
SPLITS = ("val", "valid", "validation", "eval", "dev", "test", "held", "out")  # before a measure's name


class Measured(NamedTuple):
    """Measures by name, and for each example where they are known."""

    measures: dict[str, float]
    per_example: dict[str, list[float]]

    def failure(self) -> str | None:
        """Why these measures say nothing: one is not finite."""
        bad = [name for name, value in self.measures.items() if not math.isfinite(value)]
        return f"the held-out {bad[0]} is not finite: the run diverged" if bad else None


def check_can_measure(training: UserTraining) -> None:
    """Raise if there is nothing to compare by."""
    if (training.held_out is None) == (training.evaluate is None):
        got = "neither" if training.held_out is None else "both"
        raise ValueError(
            "a comparison measures every run on data that it was not trained on; make_training must return a "
            f"mapping with either held_out (a loader of inputs and classes) or evaluate (a function), got {got}"
        )
    apart = {name: getattr(training, name) for name in ("batches", "held_out", "radius_data")}
    for one, other in combinations([name for name, data in apart.items() if data is not None], 2):
        if apart[one] is apart[other]:
            raise ValueError(
                f"{one} and {other} of make_training must be different data, got the same loader for both; what is "
                "measured must not be what is trained on"
            )


def measures_before_training(training: UserTraining) -> list[str] | None:
    """The names of the measures; raises where the data cannot be measured, before hours of training and not after.

    None with `evaluate()`, which may need a trained model.
    """
    if training.radius_data is not None:
        loss_on_radius_data(training)
    return None if training.held_out is None else list(_measured(training, training.held_out).measures)


def measure(training: UserTraining) -> Measured:
    """Measure the model as it is now; modes and random generators are restored."""
    return _measured(training, training.held_out)


def loss_on_radius_data(training: UserTraining) -> float:
    """The mean training loss on `radius_data`, as the closure computes it; the NLL if the closure takes no batch.

    The model is in eval mode. Buffers, modes and random generators are restored, and gradients are dropped.
    """
    data = () if training.radius_data is None else training.radius_data
    if training.batches is None:
        return _measured(training, data).measures["nll"]
    buffers = Snapshot(training.model)
    buffers.take_buffers()
    total, count = 0.0, 0
    with preserve_generators(), eval_mode_with_gradients(training.model):
        seed_everything(0)
        for batch in data:
            loss, examples = _loss_on(training, batch)
            total, count = total + loss * examples, count + examples
    buffers.put_back_buffers()
    training.optimizer.zero_grad()
    if not count:
        raise ValueError("radius_data must have at least one example, got none; a generator can be read only once")
    return total / count


def _loss_on(training: UserTraining, batch: Any) -> tuple[float, int]:
    """The closure's loss on a batch, and how many examples it is the mean of."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    own = tree_map_only(Tensor, Tensor.clone, batch)  # which the closure may change in place
    optimizer = training.optimizer
    with during("calling the closure on a batch of radius_data"):
        loss = loss_in(training.closure_on(own)())
    forget_unscaled(training.scaler, (optimizer, getattr(optimizer, "base", optimizer)))
    if loss is None or loss.numel() != 1:
        raise ValueError(
            "a radius is matched to the closure's loss on radius_data, so the closure must return its loss, one "
            f"number, got {'none' if loss is None else f'a tensor of shape {tuple(loss.shape)}'}"
        )
    return float(whole(loss)), len(tensors[0]) if tensors else 1


def _measured(training: UserTraining, pairs: Iterable[Any] | None) -> Measured:
    """On these pairs; without any, by `evaluate()`."""
    with preserve_generators(), torch.no_grad(), eval_mode(training.model):
        seed_everything(0)  # a loader that shuffles gives the examples in the same order each time
        if training.evaluate is None or pairs is not None:
            return measure_pairs(training.model, () if pairs is None else pairs)  # a loader may have no len()
        with during("evaluate()"):
            return Measured(_named(training.evaluate()), {})


def _named(found: Any) -> dict[str, float]:
    named = dict(found) if isinstance(found, Mapping) else {UNNAMED: found}
    try:
        values = {str(name): float(value) for name, value in named.items()}
    except (TypeError, ValueError):
        raise TypeError(f"evaluate() must return a number, or numbers by name, got {describe(found)}") from None
    if not values:
        raise ValueError("evaluate() must return at least one number, got an empty mapping")
    for name, value in values.items():
        if _without_split(name) in HIGHER_IS_BETTER:
            raise ValueError(
                f"lower must be better in every measure, but for {name!r} higher seems to be; return 1 − {name} "
                "under another name (1 − accuracy is the error)"
            )
        if name in PERCENT and math.isfinite(value) and not 0 <= value <= 1:
            raise ValueError(
                f"a measure called {name!r} is a share from 0 to 1, which is shown in per cent, got {value:g}; "
                f"call yours something else, such as mean_{name}"
            )
    return values


def _without_split(name: str) -> str:
    """The name as one word, without what says on which data.

    >>> _without_split("eval_accuracy"), _without_split("Top-1"), _without_split("test/acc loss")
    ('accuracy', 'top1', 'accloss')
    """
    words = re.findall("[a-z0-9]+", name.lower())
    while words and words[0] in SPLITS:
        del words[0]
    return "".join(words)


def measure_pairs(model: nn.Module, pairs: Iterable[Any]) -> Measured:
    """Error, NLL and ECE of a classifier on batches of inputs and classes; the model is in eval mode."""
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in pairs:
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise TypeError(
                f"held-out batches must be pairs (inputs, classes), got {describe(batch)}; or give evaluate"
            )
        inputs, classes = batch
        with during("calling the model on held-out inputs"):
            # a copy, which the model may change in place: a list of batches is measured again and again
            answer = model(inputs.to(device, copy=True) if isinstance(inputs, Tensor) else inputs)
        answer = getattr(answer, "logits", answer)
        if (
            not isinstance(answer, Tensor)
            or answer.ndim != 2
            or answer.shape[1] < 2
            or classes.is_floating_point()
            or classes.shape != answer.shape[:1]
        ):
            raise TypeError(
                "held-out pairs are for classifiers: the model must return logits (N, K), K at least 2, and classes "
                f"must be whole numbers (N,), got {_seen(answer)} and {_seen(classes)}; give evaluate for anything else"
            )
        logits.append(answer.cpu().double())
        labels.append(classes.long().cpu())
    if not logits:
        raise ValueError("held-out data must have at least one example, got none; a generator can be read only once")
    every, truth = torch.cat(logits), torch.cat(labels)
    if not bool(metrics.has_probabilities(every).all()):
        return Measured({"error": math.nan, "nll": math.nan, "ece": math.nan}, {})
    ece = float(metrics.ece(every, truth))  # first: it names a label that is not a class
    wrong = (every.argmax(1) != truth).double()
    losses = cross_entropy(every, truth, reduction="none")
    found = {"error": float(wrong.mean()), "nll": float(losses.mean()), "ece": ece}
    return Measured(found, {"error": wrong.tolist(), "nll": losses.tolist()})


def _seen(thing: object) -> str:
    return f"{thing.dtype} of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else describe(thing)
