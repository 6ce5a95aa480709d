"""Ports for processes of a test that are told beforehand where to meet."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile.

    It is bound here and nobody listens there, so that a process that allows for reuse, as torch's stores do, can still
    listen there. A port that was only found free may be another's before it is used.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
