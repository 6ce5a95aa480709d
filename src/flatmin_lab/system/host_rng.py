"""Python's and numpy's global generators, which a network of the user's own may draw from in place of torch's.

    if random.random() < 0.5: ...        a layer that is skipped now and then

A run seeds both, swaps them in while it computes (rng.py), and keeps them in its checkpoints as it does torch's: else
the same seed would give other weights every time.
"""

import random
from typing import Any

import numpy as np

MT19937 = "MT19937"  # numpy's global generator, unless someone has replaced it


def seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def host_state() -> dict[str, Any]:
    """Both states, as JSON holds them.

    >>> seed_host(7)
    >>> before = host_state()
    >>> drawn = random.random(), np.random.rand()
    >>> set_host_state(before)
    >>> drawn == (random.random(), np.random.rand())
    True
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(words), gauss]}
    known: Any = np.random.get_state(legacy=False)
    if known["bit_generator"] == MT19937:
        found["numpy"] = {**known, "state": {"key": known["state"]["key"].tolist(), "pos": int(known["state"]["pos"])}}
    return found


def set_host_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        known = state["numpy"]
        words = np.array(known["state"]["key"], dtype=np.uint32)
        np.random.set_state({**known, "state": {"key": words, "pos": known["state"]["pos"]}})
