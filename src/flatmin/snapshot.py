"""What the extra passes of a step must leave as the clean pass left it.

A step of AMP runs the model N + 1 times on one batch. Each forward pass moves BatchNorm's running statistics and draws
dropout masks, so without care the statistics would mix those of θ with those of θ + Δ, and the ascent would climb one
network's loss and descend another's. A `Snapshot` holds a model's buffers and the states of the random generators
(torch's, and Python's and numpy's, which some models and augmentations draw from) at one moment and puts them back:
buffers by copying in place (no attribute of a module is touched, so nothing that torch.compile guards on changes),
generators by setting their state.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatmin.host_random import HostRandom
from flatmin.tensors import Copies

Place = tuple[int, str]  # of a buffer: its module, and its name there


class Snapshot:
    """A model's buffers and some devices' random states, as they were at the last `take_buffers` and `take_random`.

    >>> norm = nn.BatchNorm1d(1)
    >>> snapshot = Snapshot(norm)
    >>> snapshot.take_buffers()
    >>> _ = norm(torch.tensor([[1.0], [3.0]]))
    >>> snapshot.put_back_buffers()
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0.]), tensor(0))
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._buffers: Copies[Place] = Copies()
        self._random: dict[torch.device, Tensor] = {}
        self._host: HostRandom | None = None

    def take_buffers(self) -> None:
        self._buffers.forget()
        self._buffers.take({place: buffer for place, buffer in self._found() if not is_lazy(buffer)})

    def put_back_buffers(self) -> None:
        self._buffers.put_back(dict(self._found()))

    def _found(self) -> Iterator[tuple[Place, Tensor]]:
        """The model's buffers by place, twice a step; `named_buffers` takes five times longer to go through it."""
        seen, ahead = set[nn.Module](), [self.model]
        while ahead:
            module = ahead.pop()
            if module in seen:
                continue
            seen.add(module)
            ahead += [child for child in module._modules.values() if child is not None]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (id(module), name), buffer

    def take_random(self, devices: Iterable[torch.device], *, since: "Snapshot | None" = None) -> None:
        """`since`: an earlier moment, which is returned to first."""
        self._host = HostRandom(since=None if since is None else since._host)
        self._random = {device: random_state(device) for device in devices if device.type != "cpu"}

    def put_back_random(self) -> None:
        if self._host is not None:
            self._host.put_back()
        for device, state in self._random.items():
            set_random_state(device, state)


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that a device draws from by default."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)
