"""The weights θ of a model, which are moved to θ + Δ and always restored.

They are moved in place, so this works for any model, even a compiled one or one that keeps references to its weights.
They are copied first and copied back, not subtracted: p + d − d ≠ p in floating point.

A model that draws random numbers in eval mode draws the same ones at every point, so the loss is a function of θ. An
autocast around the call has no effect, because it would affect the algebra here; put it into the loss.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatmin.core.copies import Copies
from flatmin.core.model_state import eval_mode_with_gradients
from flatmin.core.random_state import RandomStates
from flatmin.core.tensors import compute_dtype, moved_within
from flatmin.flatness.risk import LossPart, value, value_and_gradient


class Weights:
    """θ: the parameters that require a gradient, or those given; with `trainable_only=False`, frozen ones as well.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> weights, before = Weights(layer), layer.weight.item()
    >>> with weights.movable():
    ...     weights.move([torch.ones(1, 1)])
    ...     layer.weight.item() == before + 1
    True
    >>> layer.weight.item() == before
    True
    """

    def __init__(
        self,
        model: Callable[..., Any],
        parameters: Iterable[Tensor] | None = None,
        *,
        trainable_only: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(parameters, Tensor):
            raise TypeError("parameters must be several tensors, got one; give a list, [parameter]")
        self.model = model
        chosen = list(dict.fromkeys(model.parameters() if parameters is None else parameters))
        for p in chosen:
            _check(p)
        self.tensors = [p for p in chosen if p.requires_grad or not trainable_only]
        if not self.tensors:
            raise ValueError(
                "the model must have parameters that require a gradient, got none; call model.requires_grad_()"
            )
        self._theta: Copies[Tensor] = Copies()
        self._random: RandomStates | None = None  # of when they became movable

    @property
    def dimension(self) -> int:
        return sum(p.numel() for p in self.tensors)

    @contextmanager
    def movable(self) -> Iterator[None]:
        """The model is in eval mode inside; however the block ends, everything is restored."""
        self._theta.take({p: p for p in self.tensors})
        self._random = RandomStates({p.device for p in self.tensors})
        try:
            plain = torch.autocast(self.tensors[0].device.type, enabled=False)
            with plain, eval_mode_with_gradients(self.model), _buffers_kept(self.model), _hooks_off(self.tensors):
                yield
        finally:
            self._theta.put_back({p: p for p in self.tensors})
            self._random.put_back()

    @torch.no_grad()
    def move(self, delta: Sequence[Tensor]) -> None:
        """Move to θ + Δ, added in at least float32 and rounded to the weights' dtype."""
        for p, d in zip(self.tensors, delta, strict=True):
            theta = self._theta[p]
            p.copy_(theta.to(compute_dtype(theta)) + d.to(theta.device))

    @torch.no_grad()
    def move_within(self, delta: Sequence[Tensor]) -> None:
        """Move to θ + Δ, rounded towards θ and so never out of a ball; Δ becomes the rounded difference."""
        for p, d in zip(self.tensors, delta, strict=True):
            theta = self._theta[p]
            p.copy_(moved_within(theta, d.to(theta.device)))
            d.copy_(p.to(d.dtype) - theta.to(d.dtype))

    def theta(self) -> list[Tensor]:
        """Copies of the weights as they were when they became movable."""
        return [self._theta[p] for p in self.tensors]

    def value(self, parts: Sequence[LossPart]) -> Tensor:
        """L at the current weights."""
        self.replay()
        return value(self.model, parts)

    def value_and_gradient(self, parts: Sequence[LossPart]) -> tuple[Tensor, list[Tensor]]:
        self.replay()
        return value_and_gradient(self.model, parts, self.tensors)

    def replay(self) -> None:
        """Reset the random state, so that every pass draws the same numbers."""
        if self._random is not None:
            self._random.put_back()

    def zeros(self) -> list[Tensor]:
        """A Δ of 0, in at least float32."""
        return [torch.zeros_like(p, dtype=compute_dtype(p), requires_grad=False) for p in self.tensors]


def _check(p: object) -> None:
    if not isinstance(p, Tensor):
        raise TypeError(f"parameters must be tensors, got {type(p).__name__}; give model.parameters()")
    if is_lazy(p):
        raise ValueError("a lazy module has no weights yet; run a batch through the model first")
    if hasattr(p, "placements"):
        kind = type(p.data).__name__
        raise TypeError(
            f"flatness can be measured only for whole parameters, got a {kind}; gather a sharded model first"
        )
    if p.requires_grad and p.is_complex():  # frozen ones, and frozen integers, do not move
        raise TypeError(
            f"flatness can be measured only for real parameters, got {p.dtype}; keep the real and imaginary parts as "
            "two parameters, or freeze it with requires_grad_(False)"
        )
    if p.is_inference():
        raise ValueError("a model that was created in inference mode has no gradients; create it outside of it")


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Buffers that a pass changes, replaces or adds are restored; the others are not written to."""
    modules = [(module, dict(module._buffers)) for module in model.modules()]
    known = [buffer for buffer in model.buffers() if not is_lazy(buffer) and not buffer.is_inference()]
    before = [(buffer, buffer._version, buffer.clone()) for buffer in known]
    try:
        yield
    finally:
        for module, buffers in modules:
            _restore(module._buffers, buffers)
        with torch.no_grad():
            for buffer, version, content in before:
                if buffer._version != version or (buffer.layout == torch.strided and not torch.equal(buffer, content)):
                    buffer.copy_(content)


def _restore(held: Any, before: dict[str, Tensor | None]) -> None:
    """The same tensors in the same order; what TorchScript holds can only be assigned to."""
    if isinstance(held, dict):
        held.clear()
        held.update(before)
        return
    for name, buffer in before.items():
        if held[name] is not buffer:
            held[name] = buffer


@contextmanager
def _hooks_off(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Without the parameters' hooks: one that clips gradients in training, for example, is not part of L."""
    hooks = [(p, p._backward_hooks) for p in tensors]
    try:
        for p, own in hooks:
            if own:
                p._backward_hooks = None
        yield
    finally:
        for p, own in hooks:
            if own:
                p._backward_hooks = own


def check_radius(epsilon: float) -> None:
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"epsilon must be at least 0 and finite, got {epsilon}")


def derived_generator(generator: torch.Generator | None) -> torch.Generator:
    """A new generator on the CPU: with seed 0, or with a seed drawn from the given one.

    It gives the same numbers on every device, and a model that draws from the given generator cannot disturb them.
    """
    if generator is None:
        return torch.Generator().manual_seed(0)
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator().manual_seed(int(seed))
