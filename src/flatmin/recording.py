"""A training step for inputs of one shape, as a CUDA graph.

What it does is in passes.py; here it is run a few times to warm up, with nothing changed by it, and then recorded. What
a scheduler moves (lr, ε, ζ) lies in device memory, and is written there before a replay where it has changed. A graph
draws from the random generator as eager code would; for the extra passes it has clones of the generator, which are set
before each replay to where the clean pass begins.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from flatmin import lists
from flatmin.passes import Masks, Passes, StandIns, Task, undone
from flatmin.shell import Group
from flatmin.wrapper import Last, loss_in

MOVED = ("lr", "epsilon", "inner_lr")  # the values of a group that may change without a new capture
WARM = 3  # runs before a capture: compilation, cuDNN's search, memory


class CannotCaptureError(RuntimeError):
    """What a step does that a CUDA graph cannot."""


class Workspace:
    """What all recordings of a task share: streams, memory, and the tensors that stand in for the weights."""

    def __init__(self, task: Task, inputs: Sequence[Any]) -> None:
        self.stream, self.beside = torch.cuda.Stream(task.device), torch.cuda.Stream(task.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.others = StandIns(task, inputs)
        if task.wrapper is not None:
            task.wrapper._theta.release()  # what ordinary steps kept θ in


class Recording:
    """A captured step; `replay` is the step."""

    def __init__(self, task: Task, forward: Callable[..., Any], space: Workspace, inputs: Sequence[Any]) -> None:
        self.task, self.space = task, space
        self.inputs = tree_map_only(Tensor, lambda x: torch.empty_like(x).copy_(x), tuple(inputs))
        self.knobs = _Knobs(task.optimizer.param_groups, task.device)
        self.rates: _Numbers | None = None
        if task.scaler is None and lists.takes_sgd(task.base):
            self.rates = _Numbers(lambda: lists.rates_of(task.base), torch.float64, task.device)
        self.inside = self.rates is not None or (task.scaler is None and _captures_itself(task.base))
        count = task.wrapper.inner_iter if task.wrapper is not None and task.wrapper.shares_a_step() else 0
        self.masks = _Clones(task.device, count)
        joined, compiled = getattr(forward, "joined", None), getattr(forward, "compiled", None)
        self.passes = Passes(
            task,
            forward,
            space.others,
            masks=self.masks,
            rates=None if self.rates is None else self.rates.there,
            base_too=self.inside,
            compiled=compiled,
            around=nullcontext if joined is None else partial(joined, space.beside),
        )
        with undone(task), self.knobs.in_groups():
            self._warm_up()
            self._capture()

    def _warm_up(self) -> None:
        self.space.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.space.stream):
            before = torch.get_rng_state()
            for _ in range(WARM):
                gradients = self.passes.run(self.inputs)
            if not torch.equal(before, torch.get_rng_state()):
                raise CannotCaptureError("it draws random numbers on the CPU, which a graph would repeat")
            with no_waiting():
                self.passes.run(self.inputs)
            if self.rates is not None:
                skip = torch.zeros((), dtype=torch.bool, device=self.task.device)
                lists.rehearse_sgd(self.task.base, gradients, self.rates.there, skip)
        torch.cuda.synchronize(self.task.device)

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        own = getattr(self.task.optimizer, "generator", None)
        for generator in (*self.masks.clones, *([] if own is None else [own])):
            self.graph.register_generator_state(generator)
        space = self.space
        with (
            _sound_generator(self.masks.origin, self.task.device),
            lists.bound(self.task.params) as self.tables,
            torch.cuda.graph(self.graph, pool=space.pool, stream=space.stream, capture_error_mode="thread_local"),
        ):
            self.passes.step(self.inputs)

    def replay(self, inputs: Sequence[Any]) -> Any:
        for here, given in zip(tree_leaves(self.inputs), tree_leaves(tuple(inputs)), strict=True):
            if isinstance(here, Tensor):
                here.copy_(given)  # one by one: for few large tensors torch's foreach takes ten times longer
        self.knobs.refresh()
        if self.rates is not None:
            self.rates.refresh()
        self.masks.rewind()
        self.graph.replay()
        self._note(None if self.inside else self.passes.step_base())
        return tree_map_only(Tensor, Tensor.clone, self.passes.result)

    def _note(self, skipped: Tensor | None) -> None:
        """What the optimizer tells of its last step, in tensors of its own."""
        wrapper, measured = self.task.wrapper, self.passes.measured
        if wrapper is None:
            return
        if measured is None:
            loss = loss_in(self.passes.result)
            wrapper.last = Last(loss=None if loss is None else loss.clone(), skipped=skipped)
            return
        values = dict(zip(self.passes.names, measured.clone().unbind(), strict=True))
        wrapper.last = Last(skipped=self.passes.skip.clone(), **values)


class _Clones(Masks):
    """A graph cannot set a generator back, but it can draw from another one: a clone for each extra pass."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.origin = torch.cuda.default_generators[device.index or 0]
        self.clones = [self.origin.clone_state() for _ in range(count)]
        super().__init__(device)

    def rewind(self) -> None:
        if self.clones:
            start = self.origin.get_state()
            for clone in self.clones:
                clone.set_state(start)

    @contextmanager
    def drawn_again(self, n: int) -> Iterator[None]:
        own = self.origin.graphsafe_get_state()
        self.origin.graphsafe_set_state(self.clones[n])
        try:
            yield
        finally:
            self.origin.graphsafe_set_state(own)


@contextmanager
def _sound_generator(default: torch.Generator, device: torch.device) -> Iterator[None]:
    """A capture that breaks off leaves torch's generator waiting for its end; it gets a state of its own again."""
    before = default.get_state()
    try:
        yield
    except Exception as error:
        fresh = torch.Generator(device)
        fresh.set_state(before)
        default.graphsafe_set_state(fresh)
        said = str(error).strip().partition("\n")[0]
        raise CannotCaptureError(f"a graph cannot hold what it does ({said})") from error


class _Numbers:
    """Numbers of the host in device memory, copied there where they have changed."""

    def __init__(self, read: Callable[[], Any], dtype: torch.dtype, device: torch.device) -> None:
        self.read = read
        self.here = read()
        self.there = torch.tensor(self.here, dtype=dtype, device=device)

    def refresh(self) -> None:
        now = self.read()
        if now != self.here:
            self.there.copy_(torch.tensor(now, dtype=self.there.dtype), non_blocking=True)
            self.here = now


class _Knobs:
    """What a scheduler moves, as device scalars that can stand in the groups during a capture.

    A radius of 0 stays as it is, because it means another step; so does what is a tensor already.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        params = [p for group in groups for p in group["params"]]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        self.places = [(group, key) for group in groups for key in MOVED if _is_number(key, group.get(key))]
        self.values = _Numbers(lambda: [float(group[key]) for group, key in self.places], dtype, device)

    def refresh(self) -> None:
        self.values.refresh()

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        own = [group[key] for group, key in self.places]
        for (group, key), scalar in zip(self.places, self.values.there, strict=True):
            group[key] = scalar
        try:
            yield
        finally:
            for (group, key), value in zip(self.places, own, strict=True):
                group[key] = value


def _is_number(key: str, value: object) -> bool:
    return isinstance(value, int | float) and not (key == "epsilon" and value == 0)


def _captures_itself(base: Optimizer) -> bool:
    """Can torch capture its step, with lr as a tensor? Hooks are Python, which a graph does not run again."""
    if base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks:
        return False
    in_torch = type(base).__module__.startswith("torch.optim.")
    return in_torch and all(group.get("capturable", group.get("fused")) for group in base.param_groups)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host would wait for the device: there a capture would break off, and leave a mess."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "synchronization debug mode is a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            raise CannotCaptureError("it reads a number back from the device, to decide or to print") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
