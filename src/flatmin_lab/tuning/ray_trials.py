"""The trials of a tuning over a cluster: drawn here one after the other, when a hand is free to train one.

Where a hand is lost, its trial is trained on from its last checkpoint by another; one whose third hand is lost has
failed, and the others go on. A trial that is to be pruned is told so.
"""

from collections.abc import Iterator, Set

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.execution.cluster.scheduler import Crew
from flatmin_lab.execution.cluster.task_queue import Ended, Losses, Lost
from flatmin_lab.execution.process_pool import Died, Stop
from flatmin_lab.runs.events import Event, Note, Stopped
from flatmin_lab.tuning.trial import PRUNED, Task, on_data


def spread_trials(
    tasks: Iterator[Task], count: int, data: Dataset, crew: Crew, pruned: Set[int], stop: Stop
) -> Iterator[tuple[Task, tuple[int, Event] | Died]]:
    """What is said of each of about so many tasks; where nobody is there to train them, `NoNodeError`.

    Those that come to be in `pruned` are asked to stop.
    """
    queue = _Trials(tasks, count, data, pruned, stop)
    for task, said, node in crew.work(on_data, queue):
        if isinstance(said, Lost):
            if not stop():
                yield task, (task.draw.number, queue.missed(task, said, node))
        elif not isinstance(said, Ended):
            yield task, said


class _Trials:
    def __init__(self, tasks: Iterator[Task], count: int, data: Dataset, pruned: Set[int], stop: Stop) -> None:
        self.tasks, self.count, self.data, self.pruned, self.stop = tasks, count, data, pruned, stop
        self.again: list[Task] = []
        self.losses = Losses()

    def waiting(self) -> int:
        return 0 if self.stop() else self.count + len(self.again)

    def asked(self, errand: Task) -> str | None:
        return self.stop() or (PRUNED if errand.draw.number in self.pruned else None)

    def take(self, hands: int, node: str, *, others: bool) -> tuple[Task, Dataset] | None:
        if self.stop():
            return None
        for task in self.again:
            if not self.losses.barred(task.draw.number, node, others=others):
                self.again.remove(task)
                return task, self.data
        new = next(self.tasks, None)
        self.count = 0 if new is None else max(self.count - 1, 0)
        return None if new is None else (new, self.data)

    def missed(self, task: Task, lost: Lost, node: str) -> Event:
        """Its hand has gone: again, with another one."""
        if task.draw.number in self.pruned:
            return Stopped(PRUNED, 0)
        told = self.losses.add(task.draw.number, lost, node)
        if isinstance(told, Note):
            self.again.append(task)
        return told
