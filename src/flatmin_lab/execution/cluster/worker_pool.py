"""The worker pool: starts workers on nodes with room, checks that each has this flatmin, and stops them.

A worker counts once it has answered and its source is the same as here. So a node that is full, has just died or has
another version delays nothing. A node where a worker was lost gets no new workers for a while, as long as there are
other nodes; one that other jobs fill gets none until the first of ours has room there; one with another source is
excluded.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from flatmin_lab.execution.cluster import nodes
from flatmin_lab.execution.cluster.nodes import Node, Share, import_failure
from flatmin_lab.execution.cluster.worker import Worker, WorkerInfo, worker_info
from flatmin_lab.execution.task_queue import NoWorkerError
from flatmin_lab.system.machine import commit
from flatmin_lab.system.optional_deps import need

POLL_SECONDS = 1.0  # between two checks of the nodes
START_TIMEOUT_SECONDS = 15.0  # after this, a worker that has not answered no longer counts: its node may be full
NODE_WAIT_SECONDS = 60.0  # without any usable node, before giving up: one may be starting
COOLDOWN_SECONDS = 30.0  # without new workers for a node that lost one; doubled with every loss
MAX_COOLDOWN_SECONDS = 600.0
MAX_EARLY_LOSSES = 3  # workers in a row that die before they answer; then the node counts as unusable


@dataclass(eq=False)
class WorkerHandle:
    """A worker, seen from the scheduler."""

    actor: Any
    node: Node
    pending: Any  # what Ray will deliver: its info, or the stream of its task's messages
    started_at: float = field(default_factory=monotonic)
    info: WorkerInfo | None = None  # None: it has not answered yet
    task: Any = None
    task_number: int = 0
    stop_asked_at: float | None = None

    @property
    def is_busy(self) -> bool:
        return self.task is not None

    @property
    def is_up_or_starting(self) -> bool:
        """Has it answered, or may it do so soon?"""
        return self.info is not None or monotonic() - self.started_at < START_TIMEOUT_SECONDS


@dataclass(eq=False)
class NodeHistory:
    """How often workers were lost on a node, and until when it gets no new ones.

    Ray knows dead nodes (`alive_nodes`), but not those that are alive and kill every worker, for instance for lack of
    memory: it would start the next one there again.
    """

    losses: int = 0
    early: int = 0  # of these, in a row, before the worker had answered
    lost_at: float = float("-inf")
    cooldown_until: float = 0.0

    def record_loss(self, *, early: bool = False) -> None:
        """Workers that are lost together, with their node, count as one loss."""
        if monotonic() - self.lost_at > POLL_SECONDS:
            self.losses, self.early = self.losses + 1, self.early + early
            self.lost_at = monotonic()
            self.cooldown_until = self.lost_at + min(COOLDOWN_SECONDS * 2 ** (self.losses - 1), MAX_COOLDOWN_SECONDS)


@dataclass(eq=False, kw_only=True)
class WorkerPool:
    """The workers on a cluster."""

    ray: Any
    device: str
    share: Share
    max_workers: int | None = None  # at once
    say: Callable[[str], object] = lambda _: None
    workers: list[WorkerHandle] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)  # nodes with another source or without flatmin, and why
    histories: dict[str, NodeHistory] = field(default_factory=dict)  # by node
    polled_at: float = float("-inf")
    usable_at: float = field(default_factory=monotonic)  # when there was last a usable node
    has_said_waiting: bool = False  # has it been reported that there is no room?

    @property
    def hardware(self) -> str:
        return f"a Ray cluster of {nodes.describe_nodes(nodes.alive_nodes(self.ray))}"

    def room(self) -> int:
        """How many workers fit on the cluster."""
        total = sum(node.room(self.share) for node in self.usable_nodes())
        return min(total, self.max_workers or total)

    def usable_nodes(self) -> list[Node]:
        return [node for node in nodes.alive_nodes(self.ray) if node.room(self.share) and node.key not in self.excluded]

    def is_filled(self, node: Node) -> bool:
        """Do other jobs use all of the node? Our workers have waited there for room, and none of them is up."""
        ours = [worker for worker in self.workers if worker.node.key == node.key]
        return bool(ours) and not any(worker.is_up_or_starting for worker in ours)

    def history(self, node: Node) -> NodeHistory:
        return self.histories.setdefault(node.key, NodeHistory())

    def start_workers(self, wanted: int) -> None:
        """Up to so many idle workers, where there is room; on a node that lost one lately only if there is no other."""
        if monotonic() - self.polled_at < POLL_SECONDS:
            return
        self.polled_at = monotonic()
        usable = self.usable_nodes()
        self._check_usable(usable, wanted)
        rested = [node for node in usable if self.history(node).cooldown_until < monotonic()] or usable
        free = wanted - sum(worker.is_up_or_starting and not worker.is_busy for worker in self.workers)
        open_nodes = [node for node in rested if not self.is_filled(node)]
        for node in sorted(open_nodes, key=lambda node: (self.history(node).losses, self._count_on(node))):
            counted = sum(worker.is_up_or_starting for worker in self.workers)
            spare = (self.max_workers or free + len(self.workers)) - counted
            for _ in range(min(node.room(self.share) - self._count_on(node), free, spare)):
                self.workers.append(self._start_worker(node))
                free -= 1

    def _check_usable(self, usable: Sequence[Node], wanted: int) -> None:
        """Raise if no worker has answered and no node can start one, now or soon."""
        up = any(worker.info is not None for worker in self.workers)
        if up or any(self.history(node).early < MAX_EARLY_LOSSES for node in usable):
            self.usable_at = monotonic()
        only_excluded = bool(self.excluded) and not usable
        if wanted and (only_excluded or monotonic() - self.usable_at > NODE_WAIT_SECONDS):
            why = "; ".join(self.excluded.values()) or (
                f"every worker started on node {usable[0].name} dies" if usable else f"none has {self.share} any more"
            )
            raise NoWorkerError(
                f"no node of the cluster can train it: {why}; add nodes that can, and run the same command again"
            )
        slow = [worker for worker in self.workers if not worker.is_up_or_starting]
        if slow and not up and not self.has_said_waiting:
            self.has_said_waiting = True
            names = sorted({worker.node.name for worker in slow})
            self.say(f"waiting for room: other jobs use node{'s' if len(names) > 1 else ''} {', '.join(names)}")

    def _count_on(self, node: Node) -> int:
        return sum(worker.node.key == node.key for worker in self.workers)

    def _start_worker(self, node: Node) -> WorkerHandle:
        """Ray does not restart it: a restarted one would get the files that its task began with, not the checkpoints
        since, and would be on the node that lost it.
        """
        strategies = need("ray.util.scheduling_strategies", "--executor ray", extra="cluster")
        actor = (
            self.ray.remote(Worker)
            .options(
                num_cpus=self.share.cpus,
                num_gpus=self.share.gpus,
                max_concurrency=2,
                max_restarts=0,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node.key, soft=False),
            )
            .remote(commit())
        )
        return WorkerHandle(actor, node, actor.info.remote(self.device))

    def stop_worker(self, worker: WorkerHandle) -> None:
        """At once: all that it had to send has been received."""
        self.workers.remove(worker)
        with suppress(Exception):
            self.ray.kill(worker.actor)

    def check_worker(self, worker: WorkerHandle) -> None:
        """It has answered, or died: it gets tasks if its source is the same as here, else its node is excluded."""
        ours = worker_info("cpu")
        try:
            info: WorkerInfo = self.ray.get(worker.pending)
        except self.ray.exceptions.RayError as error:
            self.stop_worker(worker)
            self._lose_early(worker.node, error)
            return
        if info.source != ours.source:
            self._exclude(
                worker.node, f"it has {info.version}, but this machine has {ours.version}; install the same one there"
            )
            return
        here, there = ours.facts["torch"], info.facts["torch"]
        if here != there and not any(worker.node.key == other.node.key and other.info for other in self.workers):
            self.say(f"note: node {worker.node.name} has torch {there}, but this machine has {here}: not the same bits")
        worker.info, worker.pending = info, None
        self.history(worker.node).early = 0

    def _lose_early(self, node: Node, error: Exception) -> None:
        if (missing := import_failure(error)) is not None:
            self._exclude(node, f"{missing}; install flatmin[cluster] there, the same version as here")
        else:
            self.history(node).record_loss(early=True)

    def _exclude(self, node: Node, why: str) -> None:
        if node.key not in self.excluded:
            self.excluded[node.key] = f"node {node.name}: {why}"
            self.say(f"left out: {self.excluded[node.key]}")
        for worker in [worker for worker in self.workers if worker.node.key == node.key and not worker.is_busy]:
            self.stop_worker(worker)
