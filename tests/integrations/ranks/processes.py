"""Several gloo processes for the tests: each runs the jobs of a table in turn and leaves what its rank saw.

A job is a function of its rank; a wait that never ends becomes an error after a time limit.
"""

import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests import HANG_SECONDS


class Job(Protocol):
    def __call__(self, rank: int) -> dict[str, Any]: ...


def in_ranks(jobs: Mapping[str, Job], ranks: int, folder: Path, *, limit: float = HANG_SECONDS) -> list[dict[str, Any]]:
    """What every job returned, for each rank."""
    processes = spawn(work, args=(jobs, ranks, str(folder)), nprocs=ranks, join=False)
    assert processes is not None
    end = time.monotonic() + limit
    while not processes.join(timeout=1):
        if time.monotonic() > end:
            for process in processes.processes:
                process.kill()
            reached = {p.name: p.read_text() for p in sorted(folder.glob("at-*"))}
            raise TimeoutError(f"{ranks} ranks were not done after {limit} s; they were at {reached}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def work(rank: int, jobs: Mapping[str, Job], ranks: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    seen = {}
    for name, job in jobs.items():
        (Path(folder) / f"at-{rank}").write_text(name)
        seen[name] = job(rank)
        dist.barrier()
    torch.save(seen, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
