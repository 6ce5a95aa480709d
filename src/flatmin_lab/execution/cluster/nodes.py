"""Which nodes a Ray cluster has, how many workers fit on each, and why one was lost.

A worker takes one CPU, or on GPUs one CPU and a GPU or a fraction of one; how many share a GPU follows from that. Ray
accounts for CPUs and GPUs only: that there is too little memory shows only when a worker runs out of it.
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

CONNECT_TIMEOUT_SECONDS = 5.0  # for an address to answer; Ray itself would try for minutes
LOCAL_STARTS = 3  # attempts
HTTP2_SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty SETTINGS frame; its fourth byte is the type


class Share(NamedTuple):
    """What a worker takes of a node."""

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
        """How many workers fit, if nobody else uses the node."""
        fits = int(self.cpus / share.cpus)
        if not share.gpus:
            return fits
        return min(fits, int(self.gpus) * int(1 / share.gpus + 1e-6))  # no worker spans two GPUs


@contextmanager
def ray_connection(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster at that address; without one, to RAY_ADDRESS, or to a cluster started here."""
    address = _full_address(address)
    _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import: Ray sends usage statistics by default
    ray: Any = need("ray", "--executor ray", extra="cluster")
    own = ray.is_initialized()
    if not own:
        _init_ray(ray, address)
    try:
        yield ray
    finally:
        if not own:
            with suppress(Exception):  # the cluster may have gone
                ray.shutdown()


def _full_address(address: str | None) -> str:
    """`auto` as HOST:PORT. Ray itself would take any cluster that was ever started here, even a dead one."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "auto":
        return address
    latest = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if not latest.exists():
        raise RunError("no Ray cluster was started here; start one with `ray start --head`, or name HOST:PORT")
    return latest.read_text().strip()


def _check_reachable(address: str) -> None:
    """Raise within seconds if nothing answers there.

    Ray's own connection cannot: `ray.init` of Ray 2.60 was still trying after three minutes where nothing listens, and
    its health check is no public interface.
    """
    if address == "local":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ValueError(
            f"--address takes HOST:PORT of a Ray cluster, or auto for the one on this machine, got {address!r}; "
            "run the command on a machine of the cluster"
        )
    try:
        _check_http2(host, int(port))
    except (OSError, OverflowError) as error:
        raise RunError(
            f"no Ray cluster answers at {address} ({error}); see `ray status` there, start one with "
            "`ray start --head`, or leave out --address to start one on this machine"
        ) from error


def _check_http2(host: str, port: int) -> None:
    """Ray speaks gRPC over HTTP/2: such a server answers a client's preface with its own SETTINGS frame."""
    with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS) as server:
        server.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS_FRAME)
        if server.recv(9)[3:4] != HTTP2_SETTINGS_FRAME[3:4]:
            raise ConnectionError("what answers there is not Ray")


def _init_ray(ray: Any, address: str) -> None:
    """Join the cluster there, or start one here: with retries, since two that start at once may want the same port."""
    started: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    for left in reversed(range(LOCAL_STARTS if address == "local" else 1)):
        try:
            # Ray prefers RAY_ADDRESS; and a cluster started here must outlive a closed terminal until all is saved
            with _without_variable("RAY_ADDRESS"), _signal_ignored("SIGHUP"):
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **started)
            return
        except Exception as error:  # many kinds: not Ray, or another version of it
            if not left:
                raise RunError(_no_cluster(address, error)) from error
            with suppress(Exception):  # what has started of it
                ray.shutdown()


def _no_cluster(address: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if address == "local":
        return (
            f"no Ray cluster can be started on this machine ({reason}, {LOCAL_STARTS} times); its logs are in Ray's "
            "temporary folder, usually /tmp/ray/session_latest/logs. Leave out --executor ray to do without"
        )
    return (
        f"no Ray cluster can be joined at {address} ({reason}); if it asks for a token, set RAY_AUTH_MODE=token "
        "and use the same token here; otherwise see `ray status` there, or leave out --address to start one here"
    )


@contextmanager
def _without_variable(name: str) -> Iterator[None]:
    """The environment without that variable."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


@contextmanager
def _signal_ignored(name: str) -> Iterator[None]:
    """A signal ignored here, and by the processes that are started inside."""
    number = getattr(signal, name, None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def alive_nodes(ray: Any) -> list[Node]:
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


def describe_nodes(nodes: Sequence[Node]) -> str:
    """How large a cluster is: "3 nodes with 12 CPUs and 4 GPUs"."""
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    return f"{count} with {cpus:g} CPU{'s' if cpus != 1 else ''}" + (
        f" and {gpus:g} GPU{'s' if gpus != 1 else ''}" if gpus else ""
    )


def choose_device(nodes: Sequence[Node], device: str | None, gpus: float | None) -> tuple[str, Share]:
    """The device of a worker and its share of a node; an error if no node has room for it."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"on a cluster Ray chooses the GPU: --device takes cpu or cuda there, got {device!r}")
    if gpus is not None and not 0 < gpus <= 1:
        raise ValueError(f"a worker takes one GPU or a fraction of one, above 0 and up to 1, got --gpus {gpus:g}")
    if gpus is not None and device == "cpu":
        raise ValueError("--gpus belongs to runs on GPUs, but --device is cpu; leave out one of the two")
    there = any(node.gpus > 0 for node in nodes)
    where = device or ("cuda" if there or gpus is not None else "cpu")
    share = Share() if where == "cpu" else Share(gpus=gpus or 1.0)
    if not any(node.room(share) for node in nodes):
        raise ValueError(
            f"a worker takes {share} of one node, but none of the cluster's {describe_nodes(nodes)} has that; "
            f"{'give --device cpu, or ' if where == 'cuda' else ''}add nodes that do"
        )
    return ("cpu" if where == "cpu" else "cuda:0"), share


MAX_MESSAGE_LENGTH = 300  # characters: Ray's own messages are long, coloured and full of internal names
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def describe_loss(error: Exception) -> str:
    """Why a worker was lost.

    >>> describe_loss(RuntimeError("The actor died. Worker exit detail: Worker exits with code 1. Common causes ..."))
    'its process ended (Worker exits with code 1)'
    """
    if type(error).__name__ == "ActorUnavailableError":
        return "the connection to it broke"
    if (cause := getattr(error, "cause", None)) is not None:  # an error that its code raised
        return f"{type(cause).__name__}: {cause}"[:MAX_MESSAGE_LENGTH]
    text = ANSI_COLOURS.sub("", str(error)).strip()
    detail = re.search(r"exit detail: ([^.\n]+)", text)
    first = text.partition("\n")[0][:MAX_MESSAGE_LENGTH] or type(error).__name__
    return f"its process ended ({detail[1] if detail else first})"


def import_failure(error: Exception) -> str | None:
    """The line that says what a node could not import, if that is why its worker did not start.

    Ray replaces an actor whose class cannot be imported by one that raises a RuntimeError, with the traceback as text.

    >>> import_failure(RuntimeError("The actor failed to import.\\nModuleNotFoundError: No module named 'flatmin_lab'"))
    "ModuleNotFoundError: No module named 'flatmin_lab'"
    >>> import_failure(RuntimeError("The actor died."))
    """
    text = str(error)
    if "ModuleNotFoundError" not in text and "ImportError" not in text:
        return None
    return next(line.strip() for line in reversed(text.splitlines()) if "Error" in line)
