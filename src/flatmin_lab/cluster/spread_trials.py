"""The trials of a tuning over a cluster: drawn here one after the other, when a hand is free to train one.

Where a hand is lost, its trial is trained on from its last checkpoint by another; one whose third hand is lost has
failed, and the others go on. A trial that is to be pruned is told so.
"""

from collections import Counter, deque
from collections.abc import Iterator

from flatmin_lab.cluster.crew import Crew, Lost
from flatmin_lab.cluster.spread import TRIES
from flatmin_lab.data.dataset import Dataset
from flatmin_lab.records import Failed, Note, Record
from flatmin_lab.trials import PRUNED, Task, on_data
from flatmin_lab.workers import Died, Stop


def spread_trials(
    tasks: Iterator[Task], count: int, data: Dataset, crew: Crew, stop: Stop
) -> Iterator[tuple[Task, tuple[int, Record] | Died]]:
    """What is said of each of about so many tasks; where nobody is there to train them, `NoNodeError`."""
    queue = _Trials(tasks, count, data, stop)
    for task, said in crew.work(on_data, queue):
        if not isinstance(said, Lost):
            yield task, said
        elif not stop():
            yield task, (task.draw.number, queue.missed(task, said))


class _Trials:
    def __init__(self, tasks: Iterator[Task], count: int, data: Dataset, stop: Stop) -> None:
        self.tasks, self.count, self.data, self.stop = tasks, count, data, stop
        self.again: deque[Task] = deque()
        self.lost: Counter[int] = Counter()

    def waiting(self) -> int:
        return 0 if self.stop() else self.count + len(self.again)

    def asked(self, errand: Task) -> str | None:
        return self.stop() or (PRUNED if (errand.folder / PRUNED).exists() else None)

    def take(self, hands: int) -> tuple[Task, Dataset] | None:
        if self.stop():
            return None
        if self.again:
            return self.again.popleft(), self.data
        task = next(self.tasks, None)
        self.count = 0 if task is None else max(self.count - 1, 0)
        return None if task is None else (task, self.data)

    def missed(self, task: Task, lost: Lost) -> Record:
        """Its hand has gone: again, with another one."""
        number = task.draw.number
        self.lost[number] += 1
        if self.lost[number] == TRIES:
            return Failed(f"lost {TRIES} times with its worker, at last on node {lost.where}: {lost.why}")
        self.again.append(task)
        return Note(f"lost on node {lost.where}: {lost.why}; tried again, {self.lost[number] + 1} of {TRIES}")
