"""What the user's `make_training()` returns: a training setup, ready to start.

A tuple `(model, optimizer, closure)`, or with a GradScaler `(model, optimizer, closure, scaler)`, is enough to take
steps on one batch. A mapping names these parts, and the others of a whole run:

    return {
        "model": model,
        "optimizer": optimizer,
        "closure": closure,              closure(*batch), or closure(batch) if a batch is not a tuple or list
        "batches": loader,               iterated again in each epoch; or a function that returns an iterable
        "held_out": held_out_loader,     pairs of inputs and classes that are not trained on
        "scheduler": scheduler,          its step() is called after each epoch
        "epochs": 20,
    }

The generators of torch, Python and numpy are seeded before every call, so that two calls return the same setup.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flatmin.core.messages import describe
from flatmin.core.random_state import seed_everything
from flatmin.doctor.finding import during

MakeTraining = Callable[[], Any]


@dataclass(frozen=True)
class UserTraining:
    """The parts of a training setup. Without batches the closure takes no arguments, and an epoch is one step.

    evaluate            a function without arguments that returns a number, or numbers by name: lower is better
    scheduler_per_step  a scheduler whose step() is called after each step
    radius_data         batches like those in batches, of other data, whose loss a radius is matched to while training
    """

    model: nn.Module
    optimizer: Optimizer
    closure: Callable[..., Any]
    scaler: GradScaler | None = None
    batches: Iterable[Any] | Callable[[], Iterable[Any]] | None = None
    held_out: Iterable[Any] | None = None
    evaluate: Callable[[], Any] | None = None
    scheduler: Any = None
    scheduler_per_step: Any = None
    radius_data: Iterable[Any] | None = None
    epochs: int | None = None

    def closures(self) -> Iterator[Callable[[], Any]]:
        """The closure of each step of an epoch."""
        if self.batches is None:
            yield self.closure
            return
        with during("iterating over the batches"):
            batches = iter(self.batches() if callable(self.batches) else self.batches)
        while True:
            with during("drawing a batch"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield self.closure_on(batch)

    def closure_on(self, batch: Any) -> Callable[[], Any]:
        closure = self.closure
        return (lambda: closure(*batch)) if isinstance(batch, tuple | list) else (lambda: closure(batch))


NAMES = tuple(field.name for field in fields(UserTraining))
ITERABLE = ("batches", "held_out", "radius_data")


def call(make_training: MakeTraining, seed: int) -> UserTraining:
    """A new setup; the same for the same seed, if it draws only from the usual generators."""
    seed_everything(seed)
    with during("make_training()"):
        made = make_training()
    return _read(made)


def batch_count(batches: object) -> int | None:
    """None if it is not known: a DataLoader of an IterableDataset has a `__len__` that raises."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def _read(made: object) -> UserTraining:
    if isinstance(made, Mapping):
        unknown, missing = set(made) - set(NAMES), [name for name in NAMES[:3] if name not in made]
        if unknown or missing:
            what = f"without {missing[0]!r}" if missing else f"with {sorted(map(str, unknown))[0]!r}"
            raise TypeError(
                "make_training must return a mapping with model, optimizer and closure, and optionally "
                f"{', '.join(NAMES[3:])}, got one {what}"
            )
        training = UserTraining(**made)
    elif isinstance(made, tuple | list) and len(made) in (3, 4):
        training = UserTraining(*made)
    else:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else describe(made)
        raise TypeError(
            f"make_training must return (model, optimizer, closure), optionally a scaler, or a mapping, got {got}"
        )
    _check(training, "" if isinstance(made, Mapping) else " as the {} value")
    return training


def _check(training: UserTraining, place: str) -> None:
    kinds = {"torch.nn.Module": (training.model, nn.Module), "torch.optim.Optimizer": (training.optimizer, Optimizer)}
    for (kind, (thing, wanted)), number in zip(kinds.items(), ("first", "second"), strict=True):
        if not isinstance(thing, wanted):
            raise TypeError(
                f"make_training must return (model, optimizer, closure), got {describe(thing)}{place.format(number)}, "
                f"where a {kind} belongs"
            )
    if any(map(is_lazy, chain(training.model.parameters(), training.model.buffers()))):
        raise TypeError("the model of make_training has lazy layers without a shape: run a batch through it first")
    if not callable(training.closure):
        raise TypeError(
            "the closure of make_training must be a function without arguments, or of a batch if there are batches, "
            f"got {describe(training.closure)}; for several micro-batches, write one that runs them all"
        )
    if training.scaler is not None and not isinstance(training.scaler, GradScaler):
        raise TypeError(f"the scaler of make_training must be a torch.amp.GradScaler, got {describe(training.scaler)}")
    for name in ITERABLE:
        thing = getattr(training, name)
        fits = thing is None or isinstance(thing, Iterable) or (name == "batches" and callable(thing))
        if isinstance(thing, Iterator) or not fits:
            raise TypeError(
                f"the {name} of make_training must be something to iterate over repeatedly, such as a DataLoader "
                f"or a list, got {describe(thing)}"
            )
    for name in ("scheduler", "scheduler_per_step"):
        if (thing := getattr(training, name)) is not None and not callable(getattr(thing, "step", None)):
            raise TypeError(f"the {name} of make_training must have a step(), got {describe(thing)}")
        if isinstance(thing, ReduceLROnPlateau):
            raise TypeError(
                f"the {name} of make_training must step without arguments, got a ReduceLROnPlateau; use a schedule "
                "that does not depend on the loss, such as CosineAnnealingLR, so that it is the same in all runs"
            )
    if training.evaluate is not None and not callable(training.evaluate):
        raise TypeError(
            f"evaluate of make_training must be a function without arguments, got {describe(training.evaluate)}"
        )
