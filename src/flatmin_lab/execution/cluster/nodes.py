"""Which nodes a Ray cluster has, and how many trainings fit on each.

A training takes one CPU, or on GPUs one CPU and a GPU or a fraction of one; how many share a GPU follows from that. Ray
keeps the books of CPUs and GPUs only: whether the memory suffices is seen when it does not.
"""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from flatmin_lab.runs.events import RunError
from flatmin_lab.system.optional_deps import need

ANSWER = 5.0  # seconds that an address has to answer
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # a frame of HTTP/2 that says nothing; its fourth byte is its kind


class Share(NamedTuple):
    """What a training takes of a node."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")


class Node(NamedTuple):
    key: str
    name: str
    cpus: float
    gpus: float

    def room(self, share: Share) -> int:
        """For how many trainings, if nobody else worked there."""
        fits = int(self.cpus / share.cpus)
        if not share.gpus:
            return fits
        return min(fits, int(self.gpus) * int(1 / share.gpus + 1e-6))  # no share is of two GPUs


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster at that address; without one, to RAY_ADDRESS, or to one that is started here."""
    address = _named(address)
    _check(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: it would report to its makers
    ray: Any = need("ray", "--executor ray", extra="cluster")
    own = ray.is_initialized()
    if not own:
        _open(ray, address)
    try:
        yield ray
    finally:
        if not own:
            with suppress(Exception):  # a cluster that has gone cannot be left
                ray.shutdown()


def _named(address: str | None) -> str:
    """Said in full. Ray itself would take any cluster that was ever started here, also one that is dead by now."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "auto":
        return address
    latest = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if not latest.exists():
        raise RunError("no Ray cluster was started here; start one with `ray start --head`, or name HOST:PORT")
    return latest.read_text().strip()


def _check(address: str) -> None:
    """Does anything answer there? Ray itself would ask for minutes."""
    if address == "local":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ValueError(
            f"--address takes HOST:PORT of a Ray cluster, or auto for the one on this machine, got {address!r}; "
            "call it on a machine of the cluster"
        )
    try:
        _greet(host, int(port))
    except (OSError, OverflowError) as error:
        raise RunError(
            f"no Ray cluster answers at {address} ({error}); see `ray status` there, start one with "
            "`ray start --head`, or leave out --address to start one on this machine"
        ) from error


def _greet(host: str, port: int) -> None:
    """Ray speaks gRPC, which is HTTP/2: whoever does answers a client's first words with its settings."""
    with socket.create_connection((host, port), timeout=ANSWER) as there:
        there.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
        if there.recv(9)[3:4] != SETTINGS[3:4]:
            raise ConnectionError("what answers there is no Ray")


def _open(ray: Any, address: str) -> None:
    started: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        # Ray would prefer that address; and what is started here must outlive a closed terminal until all is saved
        with _without("RAY_ADDRESS"), _ignored("SIGHUP"):
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **started)
    except Exception as error:  # of many kinds: what answers is no Ray, or another version of it
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RunError(
            f"no Ray cluster can be joined at {address} ({reason}); where it asks for a token, set RAY_AUTH_MODE=token "
            "and have the same token here; else see `ray status` there, or leave out --address to start one here"
        ) from error


@contextmanager
def _without(name: str) -> Iterator[None]:
    """A variable of the environment, put aside."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


@contextmanager
def _ignored(name: str) -> Iterator[None]:
    """A signal, also for the processes that are started inside."""
    number = getattr(signal, name, None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def alive(ray: Any) -> list[Node]:
    found = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(
            node["NodeID"],
            f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})",
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in found
    ]


def in_words(nodes: Sequence[Node]) -> str:
    """How large a cluster is: "3 nodes with 12 CPUs and 4 GPUs"."""
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    return f"{count} with {cpus:g} CPU{'s' if cpus != 1 else ''}" + (
        f" and {gpus:g} GPU{'s' if gpus != 1 else ''}" if gpus else ""
    )


def chosen(nodes: Sequence[Node], device: str | None, gpus: float | None) -> tuple[str, Share]:
    """The device of a training, and its share of a node; an error where none has room for it."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"on a cluster Ray chooses the GPU: --device takes cpu or cuda there, got {device!r}")
    if gpus is not None and not 0 < gpus <= 1:
        raise ValueError(f"a training takes one GPU or a fraction of one, above 0 and up to 1, got --gpus {gpus:g}")
    if gpus is not None and device == "cpu":
        raise ValueError("--gpus belongs to trainings on GPUs, and --device is cpu; leave out one of the two")
    there = any(node.gpus > 0 for node in nodes)
    where = device or ("cuda" if there or gpus is not None else "cpu")
    share = Share() if where == "cpu" else Share(gpus=gpus or 1.0)
    if not any(node.room(share) for node in nodes):
        raise ValueError(
            f"a training takes {share} of one node, and none of the cluster's {in_words(nodes)} has that; "
            f"{'give --device cpu, or ' if where == 'cuda' else ''}add nodes that have"
        )
    return ("cpu" if where == "cpu" else "cuda:0"), share


MESSAGE_LETTERS = 300  # of what Ray says of a lost worker: its messages are long, coloured and full of its own names
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def told(error: Exception) -> str:
    """What happened.

    >>> told(RuntimeError("The actor died. Worker exit detail: Worker exits with code 1. Some common causes ..."))
    'its process ended (Worker exits with code 1)'
    """
    if type(error).__name__ == "ActorUnavailableError":
        return "the connection to it broke"
    if (cause := getattr(error, "cause", None)) is not None:  # an error in what it did
        return f"{type(cause).__name__}: {cause}"[:MESSAGE_LETTERS]
    text = COLOURS.sub("", str(error)).strip()
    detail = re.search(r"exit detail: ([^.\n]+)", text)
    first = text.partition("\n")[0][:MESSAGE_LETTERS] or type(error).__name__
    return f"its process ended ({detail[1] if detail else first})"
