"""A named pipe in the place of a file: opening it waits for a writer, unless what it is was asked before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread


@contextmanager
def pipe(path: Path) -> Iterator[Path]:
    """A pipe with a writer that has nothing to say: a reader gets an empty file, and no test waits for ever."""
    os.mkfifo(path)
    writer = Thread(target=path.write_bytes, args=(b"",), daemon=True)
    writer.start()
    try:
        yield path
    finally:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # where nobody has read, the writer still waits
        writer.join()
        os.close(reader)
