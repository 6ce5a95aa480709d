"""A training step for inputs of one shape, as a CUDA graph.

What it does is in functional_step.py; here it is run a few times to warm up, with nothing changed by it, and then
recorded. What a scheduler moves (lr, ε, ζ) lies in device memory, and is written there before a replay where it has
changed. A graph draws from the random generator as eager code would; for the extra passes it has clones of the
generator, which are set before each replay to where the clean pass begins.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from numbers import Real
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from flatmin.capture.functional_step import Gradients, Masks, Passes, StandIns
from flatmin.capture.packed_outputs import Packed
from flatmin.capture.step_spec import CannotCaptureError, Task, in_a_line, undone
from flatmin.core import multi_tensor
from flatmin.core.model_state import HostRandom
from flatmin.optim.step_info import Last, loss_in
from flatmin.optim.wrapper import Group

PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MOVED = ("lr", "epsilon", "inner_lr")  # the values of a group that may change without a new capture
REPLACED = [0]  # how often a broken capture cost a generator's state: graphs that draw from the old one are stale
WAITS = "called a synchronizing"  # how torch's warning begins
WARM = 3  # runs before a capture: compilation, cuDNN's search, memory


class StateMissingError(RuntimeError):
    """The optimizer has no state yet for a weight that got a gradient: an ordinary step will make it."""


class Workspace:
    """What all recordings of a task share: streams, memory, and the tensors that stand in for the weights."""

    def __init__(self, task: Task) -> None:
        self.stream, self.beside = torch.cuda.Stream(task.device), torch.cuda.Stream(task.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.others = StandIns()
        if task.wrapper is not None:
            task.wrapper._theta.release()  # what ordinary steps kept θ in


class Recording:
    """A captured step; `replay` is the step."""

    def __init__(
        self,
        task: Task,
        forward: Callable[..., Any],
        space: Workspace,
        inputs: Sequence[Any],
        *,
        by_kernel: bool,
        by_torch: bool,
    ) -> None:
        """With the base's step in it if our kernel takes that, or torch can capture it."""
        self.task, self.space = task, space
        self.inputs = tree_map_only(Tensor, partial(_kept, device=task.device), tuple(inputs))
        self.knobs = _Knobs(task.optimizer, task.device)
        self.rates: _Numbers | None = None
        if by_kernel:  # our own, for SGD
            self.rates = _Numbers(lambda: multi_tensor.rates_of(task.base), torch.float64, task.device)
        self.inside = by_kernel or by_torch
        count = task.wrapper.inner_iter if task.wrapper is not None and task.wrapper._shares_a_step() else 0
        self.masks = _Clones(task.device, count)
        joined, compiled = getattr(forward, "joined", None), getattr(forward, "compiled", None)
        self.passes = Passes(
            task,
            forward,
            space.others,
            self.inputs,
            masks=self.masks,
            rates=None if self.rates is None else self.rates.there,
            base_too=self.inside,
            compiled=compiled,
            around=nullcontext if joined is None else partial(joined, space.beside),
        )
        with undone(task), self.knobs.in_groups():
            try:
                self._warm_up()
            finally:  # before anything is put back
                torch.cuda.synchronize(task.device)
            self._capture()
        # memory that the graph writes to, and that the optimizer might let go of
        self.held = [] if task.wrapper is None else task.wrapper._rooms()

    def _warm_up(self) -> None:
        self.space.stream.wait_stream(torch.cuda.current_stream(self.task.device))
        with torch.cuda.stream(self.space.stream):
            self._run()  # compiles, for which some draw random numbers
            host = HostRandom()
            for _ in range(WARM - 1):
                gradients = self._run()
            _check_result(self.passes.result, self.task.device)
            if host.has_moved():
                raise CannotCaptureError("it draws random numbers on the CPU, which a graph would repeat")
            with no_waiting():
                self._run()
            if self.rates is not None:
                if not multi_tensor.has_state(self.task.base, gradients):
                    raise StateMissingError
                skip = torch.zeros((), dtype=torch.bool, device=self.task.device)
                multi_tensor.rehearse_sgd(self.task.base, gradients, self.rates.there, skip)

    def _run(self) -> Gradients:
        self.masks.step_begins()
        return self.passes.run()

    def _capture(self) -> None:
        task, space = self.task, self.space
        self.graph = torch.cuda.CUDAGraph()
        own = [] if (generator := task.generator()) is None else [generator]
        for generator in (*self.masks.clones, *own):
            self.graph.register_generator_state(generator)
        passes = 1 if task.wrapper is None else task.wrapper.inner_iter + 1
        with ExitStack() as around:
            for generator in (self.masks.origin, *own):
                around.enter_context(sound_generator(generator, task.device))
            self.tables = around.enter_context(multi_tensor.bound(task.params, passes))
            graph = torch.cuda.graph(
                self.graph, pool=space.pool, stream=space.stream, capture_error_mode="thread_local"
            )
            around.enter_context(graph)
            self.passes.step()
            self.leaves, self.shape = tree_flatten(self.passes.result)
            handed = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
            if self.passes.perturbs:
                handed += [*self.passes.measured.values(), self.passes.skip]
            self.packed = Packed(handed)

    @torch.no_grad()
    def replay(self, inputs: Sequence[Any]) -> Any:
        for here, given in zip(tree_leaves(self.inputs), tree_leaves(tuple(inputs)), strict=True):
            if isinstance(here, Tensor):
                here.copy_(given)  # one by one: for few large tensors torch's foreach takes ten times longer
        self.knobs.refresh()
        if self.rates is not None:
            self.rates.refresh()
        self.masks.step_begins()
        self.graph.replay()
        skipped = None if self.inside else self.passes.step_base()
        fresh = self.packed.fresh()
        leaves = [fresh.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        result = tree_unflatten(leaves, self.shape)
        if self.task.wrapper is not None:
            self.task.wrapper.last = self._last(result, fresh, skipped)
        return result

    def _last(self, result: Any, fresh: Sequence[Tensor], skipped: Tensor | None) -> Last:
        if not self.passes.perturbs:
            return Last(loss=loss_in(result), skipped=skipped)
        return Last(skipped=fresh[-1], **dict(zip(self.passes.measured, fresh[:-1], strict=True)))


class _Clones(Masks):
    """A graph cannot set a generator back, but it can draw from another one: a clone for each extra pass."""

    def __init__(self, device: torch.device, count: int) -> None:
        super().__init__(device)
        self.origin = torch.cuda.default_generators[device.index or 0]
        self.clones = [self.origin.clone_state() for _ in range(count)]
        self.start_offset = self.ahead = 0  # ahead: what the batch draws before the clean pass begins

    def step_begins(self) -> None:
        """Set the clones to where the clean pass will begin."""
        if not self.clones:
            return
        start, self.start_offset = self.origin.get_state(), self.origin.get_offset()
        for clone in self.clones:
            clone.set_state(start)
            if self.ahead:
                clone.set_offset(self.start_offset + self.ahead)

    def clean_pass_begins(self) -> None:
        if self.clones and not torch.cuda.is_current_stream_capturing():
            self.ahead = self.origin.get_offset() - self.start_offset

    @contextmanager
    def drawn_again(self, n: int) -> Iterator[None]:
        own = self.origin.graphsafe_get_state()
        self.origin.graphsafe_set_state(self.clones[n])
        try:
            yield
        finally:
            self.origin.graphsafe_set_state(own)


@contextmanager
def sound_generator(default: torch.Generator, device: torch.device) -> Iterator[None]:
    """A capture that breaks off leaves torch's generator waiting for its end, and perhaps another stream in place."""
    before, stream = default.get_state(), torch.cuda.current_stream(device)
    try:
        yield
    except BaseException as error:
        torch.cuda.set_stream(stream)
        fresh = torch.Generator(device)
        fresh.set_state(before)
        default.graphsafe_set_state(fresh)
        REPLACED[0] += 1
        if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError | CannotCaptureError):
            raise
        raise CannotCaptureError(f"a graph cannot hold what it does ({in_a_line(error)})") from error


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

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        self.optimizer = optimizer  # not its groups: loading a checkpoint makes new ones
        places = [(i, key) for i, group in enumerate(groups) for key in MOVED if _is_number(key, group.get(key))]
        self.places = places
        self.values = _Numbers(lambda: [float(optimizer.param_groups[i][key]) for i, key in places], dtype, device)

    @property
    def _groups(self) -> list[Group]:
        return self.optimizer.param_groups

    def refresh(self) -> None:
        self.values.refresh()

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        own = [self._groups[i][key] for i, key in self.places]
        for (i, key), scalar in zip(self.places, self.values.there, strict=True):
            self._groups[i][key] = scalar
        try:
            yield
        finally:
            for (i, key), value in zip(self.places, own, strict=True):
                self._groups[i][key] = value


def _is_number(key: str, value: Any) -> bool:
    """Is it read on the host? A tensor of the CPU is: a graph would keep the number that it saw."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu"
    return isinstance(value, Real) and not (key == "epsilon" and value == 0)


def _kept(given: Tensor, *, device: torch.device) -> Tensor:
    """Memory of the graph's own for an input. One number of the CPU goes to the device, where it counts the same."""
    if given.device != device and given.dim():
        raise CannotCaptureError(f"an input is on {given.device}, and the weights on {device}; move it there before")
    there = torch.empty_like(given.detach(), device=device).copy_(given.detach())
    return there.requires_grad_(given.requires_grad)


def _check_result(result: Any, device: torch.device) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.device != device:
            raise CannotCaptureError(f"loss_fn returns a tensor on {leaf.device}, and the weights are on {device}")
        if not isinstance(leaf, PLAIN):
            raise CannotCaptureError(
                f"loss_fn returns an object of type {type(leaf).__name__}; tensors come back in dicts, tuples and lists"
            )


def captures_itself(task: Task) -> bool:
    """Can torch capture the base's step, with lr as a tensor? Hooks are Python, which a graph does not run again."""
    base = task.base
    if task.scaler is not None or multi_tensor.has_hooks(base):
        return False
    in_torch = type(base).__module__.startswith("torch.optim.")
    return in_torch and all(group.get("capturable", group.get("fused")) for group in base.param_groups)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises at the end if the host waited for the device: there a capture would break off, and leave a mess.

    By warnings, not errors, because the mode is everybody's: another thread, which loads data, may wait.
    """
    before, mine, waited = torch.cuda.get_sync_debug_mode(), get_ident(), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # which warns that it is a prototype
        warnings.filterwarnings("always", message=WAITS)
        others = warnings.showwarning

        def heard(message: Warning | str, *rest: Any, **more: Any) -> None:
            if get_ident() != mine:
                others(message, *rest, **more)
            elif WAITS in str(message):
                waited.append(str(message))

        warnings.showwarning = heard
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if waited:
        raise CannotCaptureError("it reads a number back from the device, to decide or to print")
