"""Other tensors in place of a model's weights and buffers, for one pass.

`with_substitutes` gives parameters other memory; the tensor objects stay, so everything that holds one (a module, a
loss function) sees the substitute. Under autocast a layer casts its float32 weight to half precision in every pass. If
nothing else ever happens to a weight (`weights_cast_once` finds out), its substitute may be in half precision from the
start: the same numbers, no casts, and a gradient of half the size.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def with_substitutes(substitutes: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside, each tensor has the memory (and dtype) of the one it is mapped to.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> with with_substitutes({weight: torch.tensor([2.0], dtype=torch.bfloat16)}):
    ...     print(weight.data)
    tensor([2.], dtype=torch.bfloat16)
    >>> weight.data
    tensor([1.])
    """
    own = {tensor: tensor.data for tensor in substitutes}
    try:
        for tensor, other in substitutes.items():
            tensor.data = other
        yield
    finally:
        for tensor, data in own.items():
            tensor.data = data


class _UseCounter(TorchDispatchMode):
    """Counts the uses of some tensors: `casts` to a dtype, and all `uses`."""

    def __init__(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watched, self.dtype = {id(tensor) for tensor in tensors}, dtype
        self.casts: Counter[int] = Counter()
        self.uses: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self.dtype
        for mine in self.watched.intersection(found):
            self.uses[mine] += found.count(mine)
            self.casts[mine] += is_cast
        return func(*args, **kwargs)


def weights_cast_once(params: Iterable[Tensor], dtype: torch.dtype, work: Callable[[], object]) -> set[Tensor]:
    """The float32 parameters that `work`, forward and backward, uses only once: to cast them to `dtype`.

    Weights with a gradient hook are excluded: the hook would get the gradient in half precision.

    >>> layer = torch.nn.Linear(2, 2)
    >>> def work():
    ...     with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
    ...         return layer(torch.ones(1, 2)).sum() + layer.bias.sum()      # so the bias is used twice
    >>> weights_cast_once(layer.parameters(), torch.bfloat16, work) == {layer.weight}
    True
    """
    known = [p for p in params if p.dtype == torch.float32]
    with _UseCounter(known, dtype) as seen:
        work()
    return {p for p in known if seen.uses[id(p)] == seen.casts[id(p)] == 1 and not p._backward_hooks}
