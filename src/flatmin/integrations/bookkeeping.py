"""An object's attributes, to be restored: what a pass counts, appends or replaces there is undone.

A trainer's loss may count tokens and append metrics to lists. A pass that is replayed at θ + Δ calls it again, and must
leave no trace there. Attributes are restored by name, and plain collections in place, so that everything else that
holds one of them sees it restored too. So are tensors with one element, such as counters on a GPU:
sentence-transformers adds to one in place. Larger tensors and objects of other classes are left alone: they would have
to be copied.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

# by exact type: subclasses have their own rules
_PLAIN = {dict, defaultdict, OrderedDict, Counter, list, deque, set}


class Bookkeeping:
    """An object's attributes, and the contents of its plain collections at any depth, to be restored.

    Of tensors, only those with one element that are attributes or values of a dict: lists are only appended to.

    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(tokens=5, metrics={"loss": [0.7]})
    >>> before = Bookkeeping(trainer)
    >>> trainer.tokens += 5
    >>> trainer.metrics["loss"].append(0.9)
    >>> before.put_back()
    >>> trainer.tokens, trainer.metrics
    (5, {'loss': [0.7]})

    `shallow`: attributes whose contents are left alone, such as data sets, which are large and do not change.
    """

    def __init__(self, owner: object, *, shallow: Collection[str] = ()) -> None:
        attributes = vars(owner)
        self._kept: dict[int, tuple[Any, Any]] = {id(attributes): (attributes, attributes.copy())}
        self._counters: list[tuple[Tensor, int, Tensor]] = []  # each with its version and a copy
        left = [value for name, value in attributes.items() if name not in shallow]
        self._keep_counters(left)
        while left:
            value = left.pop()
            if type(value) in _PLAIN and id(value) not in self._kept:
                self._kept[id(value)] = value, value.copy()
                left.extend(value.values() if isinstance(value, dict) else value)
                if isinstance(value, dict):
                    self._keep_counters(value.values())

    def _keep_counters(self, values: Iterable[Any]) -> None:
        for value in values:
            if _is_counter(value):
                self._counters.append((value, value._version, value.clone()))

    def put_back(self) -> None:
        for counter, version, before in self._counters:
            if counter._version != version:
                counter.copy_(before)
        for collection, before in self._kept.values():
            if isinstance(collection, dict):
                _put_back_entries(collection, before)
            elif isinstance(collection, list):
                collection[:] = before
            elif isinstance(collection, deque):
                collection.clear()
                collection.extend(before)
            else:
                collection.clear()
                collection.update(before)


def _is_counter(value: object) -> bool:
    """A plain tensor with one element that is not trained; torch keeps no version of an inference tensor."""
    return type(value) is Tensor and value.numel() == 1 and not value.requires_grad and not value.is_inference()


def _put_back_entries(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Not emptied first, so that the object whose attributes these are stays whole if Ctrl-C comes in between."""
    for key, value in before.items():  # not update(), which adds to a Counter
        entries[key] = value  # noqa: PERF403
    for key in entries.keys() - before.keys():
        del entries[key]
    if list(entries) != list(before):  # one was deleted, and is now the last
        for key in before:
            entries[key] = entries.pop(key)
