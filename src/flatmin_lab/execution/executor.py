"""How tasks are executed: one interface for this process, a pool of processes, and a Ray cluster.

    with open_executor("local", ...) as executor:
        for number, event in run_tasks(executor, function, queue): ...

`function(task, data, stop)` trains the runs of a task and yields their events. An executor takes a task from the queue
whenever a worker is free for it, and passes on what the function yields and how the task ended. It decides nothing
else: what is retried, what has failed, and that everything ends exactly once, is up to the queue (task_queue.py).
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

from flatmin_lab.execution.task_queue import NoWorkerError, TaskFunction, TaskMessage, TaskQueue
from flatmin_lab.runs.events import Event, Stopped


class Executor(Protocol):
    """Runs tasks on its workers. Every task that it takes ends with a `TaskEnd`, a `TaskFailure` or a `WorkerLoss`."""

    @property
    def device(self) -> str:
        """The device of its workers, or of the first of them."""

    @property
    def device_here(self) -> str:
        """The device of this machine that estimates are made on."""

    @property
    def hardware(self) -> str: ...

    def facts(self) -> Mapping[str, Any]:
        """What a result file says about the machine."""

    def capacity(self, tasks: int) -> tuple[int, str]:
        """How many of these tasks it runs at once, as a number and in words."""

    def run(self, function: TaskFunction, queue: TaskQueue[Any]) -> Generator[tuple[Any, TaskMessage, str], None, None]:
        """Run `function` on the tasks of the queue until there are none: each message with its task and its node.

        Raises `NoWorkerError` where no worker is left that could.
        """


def run_tasks(executor: Executor, function: TaskFunction, queue: TaskQueue[Any]) -> Iterator[tuple[int, Event]]:
    """The events of all runs or trials of the queue as they come, each with its number."""
    try:
        with closing(executor.run(function, queue)) as messages:
            for task, message, node in messages:
                yield from queue.receive(task, message, node)
                yield from queue.take_refused()
    except NoWorkerError as error:
        yield from queue.abandon(error)
    yield from queue.take_refused()
    for number in queue.unfinished():
        yield queue.end(number, Stopped(queue.stop() or "asked to stop", 0))
