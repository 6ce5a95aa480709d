"""A moment of a training that can be returned to: weights, buffers and the states of the random generators."""

import torch
from torch import Tensor

from flatmin.core.model_state import HostRandom, Snapshot, random_state, set_random_state
from flatmin.core.tensors import Copies, plain
from flatmin.doctor.finding import Finding
from flatmin.doctor.set_up import EPSILON, SetUp


class Moment:
    """Weights, buffers and random generators as they are now."""

    def __init__(self, set_up: SetUp) -> None:
        self._params = set_up.params
        self.weights: Copies[Tensor] = Copies()
        self.weights.take({param: param for param in self._params})
        self._buffers = Snapshot(set_up.model)
        self._buffers.take_buffers()
        self.host = HostRandom()
        self._random = {device: random_state(device) for device in set_up.devices}

    def put_back(self, *, buffers: bool = True, host: bool = True) -> None:
        """Return to it; without `host`, Python's and numpy's generators go on."""
        self.weights.put_back({param: param for param in self._params})
        if buffers:
            self._buffers.put_back_buffers()
        if host:
            self.host.put_back()
        for device, state in self._random.items():
            set_random_state(device, state)

    def has_weights(self) -> bool:
        """Are the weights the same to the last bit?"""
        return all(same_bits(param, self.weights[param]) for param in self._params)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """To the last bit, also where both are nan."""
    pair = [plain(tensor.detach()).contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*pair)


def alike(one: SetUp, other: SetUp) -> Finding:
    """Do two calls of make_training give equal weights?"""
    optimizer = one.optimizer
    given = "" if optimizer.model is None else ", model=model"
    kind = f"{type(optimizer).__name__} around {type(one.base).__name__}"
    if one.was_plain:
        kind = f"{type(one.base).__name__}, examined as flatmin.AMP(optimizer, epsilon={EPSILON}{given})"
    count = sum(param.numel() for param in one.params)
    seen = f"{kind}; {count:,} parameters in {len(one.params)} tensors"
    pairs = list(zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=False))
    apart = sum(not same_bits(*pair) for pair in pairs if all(isinstance(value, Tensor) for value in pair))
    if not apart and len(one.params) == len(other.params):
        return Finding("set-up", "ok", f"{seen}; two calls of make_training() give the same weights")
    return Finding(
        "set-up",
        "warning",
        f"{seen}; two calls of make_training() give other weights ({apart} of {len(pairs)} tensors differ), "
        "although the generators of torch, Python and numpy are seeded before each",
        "make the weights from these generators, or from a seed of your own; until then ε = 0 cannot be compared",
    )
