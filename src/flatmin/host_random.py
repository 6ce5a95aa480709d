"""The random generators of the host: torch's, Python's, and numpy's where somebody has imported it.

The passes of a step must draw the same numbers, so their states are put back between them. And a CUDA graph repeats a
number that was drawn on the host for ever, so a step that draws some must not be captured. A generator that a user
keeps (`numpy.random.default_rng()`) cannot be seen from here.
"""

import pickle
import random
import sys
from typing import Any

import torch


class HostRandom:
    """Their states as they are now.

    >>> before = HostRandom()
    >>> _ = random.random()
    >>> before.has_moved()
    True
    >>> before.put_back()
    >>> before.has_moved()
    False
    """

    def __init__(self, *, since: "HostRandom | None" = None) -> None:
        """`since`: an earlier moment. If numpy stood still from there to here, both leave it so: it is slow to set."""
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.numpy = None if (numpy := _numpy_random()) is None else numpy.get_state(legacy=False)
        self._sets_numpy = self.numpy is not None
        if since is not None and _same(self.numpy, since.numpy):
            self._sets_numpy = since._sets_numpy = False

    def has_moved(self) -> bool:
        """Has anyone drawn from one since?"""
        return not torch.equal(self.torch, torch.get_rng_state()) or bool(self.moved_besides_torch())

    def moved_besides_torch(self) -> list[str]:
        """Those of Python and numpy that someone has drawn from since, in words."""
        now = HostRandom()
        python = ["Python's random"] if self.python != now.python else []
        numpy = ["numpy.random"] if self.numpy is not None and not _same(self.numpy, now.numpy) else []
        return python + numpy

    def put_back(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self._sets_numpy:
            _numpy_random().set_state(self.numpy)


def _same(state: Any, other: Any) -> bool:
    """Of numpy's states."""
    if state is None or other is None or not state["bit_generator"] == other["bit_generator"] == "MT19937":
        return pickle.dumps(state) == pickle.dumps(other)
    here, there = state["state"], other["state"]
    alike = here["pos"] == there["pos"] and state["has_gauss"] == other["has_gauss"]
    return alike and bool((here["key"] == there["key"]).all())


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")
