"""The line between two models of one architecture: are they in one valley, or is there a barrier between them?

    θ(t) = (1 − t)·θ_A + t·θ_B,   t from 0 to 1
    barrier = max over t of L(θ(t)) − ((1 − t)·L(θ_A) + t·L(θ_B))

Buffers of floating numbers are interpolated as parameters are; integers are those of the nearer model. BatchNorm's
statistics half-way between two models are not those of the model half-way: activations partly cancel out there, and
their variance is smaller. So the statistics can be computed anew at each point, from batches of training data
(`renew=`), as `torch.optim.swa_utils.update_bn` does for averaged weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatmin.core.tensors import compute_dtype
from flatmin.flatness.risk import Loss, parts_of
from flatmin.flatness.weights import Weights

Renew = Callable[[nn.Module], object] | Iterable[Any]


class Between(NamedTuple):
    """`losses[i]` is L at (1 − ts[i])·A + ts[i]·B, and `errors[i]` is the second function there, if one was given."""

    ts: Tensor
    losses: Tensor
    errors: Tensor | None = None

    @property
    def barrier(self) -> Tensor:
        """How far L rises above the straight line from L(A) to L(B); 0 where it stays below it, as a convex L does."""
        return _above_chord(self.ts, self.losses).max()

    @property
    def error_barrier(self) -> Tensor | None:
        return None if self.errors is None else _above_chord(self.ts, self.errors).max()

    @property
    def highest(self) -> Tensor:
        """The t at which the barrier is highest."""
        return self.ts[_above_chord(self.ts, self.losses).argmax()]


def _above_chord(ts: Tensor, values: Tensor) -> Tensor:
    heights = values.cpu().double()
    return heights - torch.lerp(heights[0], heights[-1], ts)  # which rounds nothing at the ends, nor between equal ones


def between(
    model: nn.Module,
    other: nn.Module | Mapping[str, Any],
    loss: Loss,
    *,
    points: int = 21,
    error: Loss | None = None,
    renew: Renew | None = None,
    progress: Callable[[int], object] | None = None,
) -> Between:
    """The loss, and the error if there is a function for it, on the line from a model to another one, or to its state.

    The model is moved along the line and restored; the other one is only read. At the ends both have exactly their own
    weights and buffers. `renew` recomputes BatchNorm's statistics at every point, the ends included: batches to pass
    through the model in train mode (inputs, or tuples that begin with them; the same at every point), or a function
    that passes them. A point costs a forward pass over the data of `loss`, of `error` and of `renew`.
    `progress(n)` is called when n points are done.

    >>> a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> found = between(a, b, lambda model: model.weight.square().sum())        # convex
    >>> len(found.losses), found.barrier
    (21, tensor(0., dtype=torch.float64))
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, the two models themselves, got {points}")
    weights = Weights(model, trainable_only=False)
    measures = [parts_of(given) for given in (loss, error) if given is not None]
    line = _Line(model, other)
    batches = None if renew is None else _checked(renew)
    ts = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu")
    found: list[list[Tensor]] = [[] for _ in measures]
    with weights.movable():
        for done, t in enumerate(ts.tolist(), start=1):
            line.move(t)
            if batches is not None:
                weights.replay()  # the same augmentation and dropout at every point
                _renew_statistics(model, batches)
            for values, parts in zip(found, measures, strict=True):
                values.append(weights.value(parts))
            if progress is not None:
                progress(done)
    losses, *errors = map(torch.stack, found)
    return Between(ts, losses, errors[0] if errors else None)


class _Line:
    """The tensors in which two models differ: those of the first, which move, and copies of both ends."""

    def __init__(self, model: nn.Module, other: nn.Module | Mapping[str, Any]) -> None:
        ours, theirs = _tensors(model), _tensors_of_other(other)
        _check_alike(model, ours, theirs)
        ends: dict[Tensor, Tensor] = {}
        for name, tensor in ours.items():
            if name in theirs and tensor.layout == torch.strided:  # a graph's sparse adjacency stays as it is
                end = theirs[name].detach().to(tensor.device)
                known = ends.setdefault(tensor, end)
                if known is not end and not known.equal(end):
                    raise ValueError(f"{name} is tied to another weight in the first model, and not in the second")
        self._moving = [
            (tensor, tensor.detach().clone(), end.clone()) for tensor, end in ends.items() if not tensor.equal(end)
        ]

    @torch.no_grad()
    def move(self, t: float) -> None:
        for tensor, start, end in self._moving:
            if t in (0, 1) or not (tensor.is_floating_point() or tensor.is_complex()):
                tensor.copy_(start if t <= 0.5 else end)
            else:
                dtype = compute_dtype(tensor)
                tensor.copy_((1 - t) * start.to(dtype) + t * end.to(dtype))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, by name; a tied weight has several."""
    plain = getattr(model, "_orig_mod", model)  # of torch.compile, which would put its own name before all others
    return {
        **dict(plain.named_parameters(remove_duplicate=False)),
        **dict(plain.named_buffers(remove_duplicate=False)),
    }


def _tensors_of_other(other: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    if isinstance(other, nn.Module):
        return _tensors(other)
    if not isinstance(other, Mapping) or not any(isinstance(value, Tensor) for value in other.values()):
        raise TypeError(
            f"the other end must be a torch.nn.Module or its state, got {type(other).__name__}; "
            "give the model, or its state_dict()"
        )
    return {name.removeprefix("_orig_mod."): value for name, value in other.items() if isinstance(value, Tensor)}


def _check_alike(model: nn.Module, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise where the architectures differ, at the first tensor that does; and where both ends are the same memory."""
    plain = getattr(model, "_orig_mod", model)
    needed = plain.state_dict(keep_vars=True).keys()  # a state has no buffers that are not persistent
    for name, tensor in ours.items():
        if name not in theirs:
            if name in needed:
                raise ValueError(f"both models must have the same architecture, and only the first has {name}")
            continue
        their = theirs[name]
        if (tensor.shape, tensor.dtype) != (their.shape, their.dtype):
            first, second = (f"{tuple(one.shape)} of {str(one.dtype)[6:]}" for one in (tensor, their))
            raise ValueError(
                f"both models must have the same architecture, and {name} is {first} in the first model, "
                f"{second} in the second"
            )
    only = next((name for name in theirs if name not in ours), None)
    if only is not None:
        raise ValueError(f"both models must have the same architecture, and only the second has {only}")
    if all(p.data_ptr() == theirs[name].data_ptr() for name, p in plain.named_parameters()):
        raise ValueError(
            "both ends are the same weights in memory; a state_dict() follows its model, so keep a copy: "
            "copy.deepcopy(model.state_dict())"
        )


# ---- BatchNorm's statistics


def _checked(renew: Renew) -> Renew:
    if not callable(renew) and not isinstance(renew, Iterable):
        raise TypeError(f"renew must be batches, or a function of the model, got {type(renew).__name__}")
    if isinstance(renew, Iterator):
        raise TypeError("renew is needed at every point, and an iterator is used up after one; give a list or a loader")
    return renew


def _renew_statistics(model: nn.Module, renew: Renew) -> None:
    """The mean over all batches of their means and variances, at the weights as they are."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    with torch.no_grad(), _cumulative(model, norms):
        if callable(renew):
            renew(model)
        else:
            device = next(model.parameters()).device
            for batch in renew:
                x = batch[0] if isinstance(batch, list | tuple) else batch
                model(x.to(device, copy=True) if isinstance(x, Tensor) else x)  # which it may change in place
        if not any(int(norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None):
            raise ValueError("renew must pass at least one batch through the model, got none")


@contextmanager
def _cumulative(model: nn.Module, norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Train mode, statistics from scratch, and every batch counts alike; then the modes and momenta as they were."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    try:
        model.train()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
