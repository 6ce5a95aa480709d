"""Before the first step: is there a share of every batch for every rank, and are all ranks about the same training?

A difference becomes an error on all ranks, which says in what they differ; later it would be a wait that never ends, or
weights that are not equal.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatmin_lab.team import Team


def check_batches(model: nn.Module, *, size: int, count: int, ranks: int) -> None:
    """Batches of that size, of so many pictures, among so many ranks: BatchNorm needs two pictures in each share."""
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    smallest = min(size, count % size or size)
    left = f"leaves one of {ranks} processes {smallest // ranks} of the {smallest} pictures of a batch"
    if norms and smallest // ranks < 2:
        left = left if ranks > 1 else f"leaves one of {count} pictures alone"
        raise ValueError(
            f"BatchNorm needs batches of two pictures or more, and a batch size of {size} {left}; "
            "choose another --batch-size"
        )
    if smallest < ranks:
        raise ValueError(
            f"every process needs a picture of every batch, and a batch size of {size} {left}; "
            "choose another --batch-size, or fewer processes"
        )


def compare(config: Mapping[str, Any], device: torch.device, team: Team, *, checkpoint_epochs: int) -> None:
    """Versions first: with others, the rest may not even be comparable."""
    team.compare(
        {key: config[key] for key in ("flatmin", "commit", "torch")},
        way_out="install the same on every machine (FLATMIN_COMMIT names a source that has no history with it)",
    )
    asked = {**config["recipe"], "seed": config["seed"], "checkpoint_epochs": checkpoint_epochs}
    way_out = "call it with the same flags on every machine"
    team.compare({**asked, "kind of device": device.type}, way_out=way_out)
    team.compare(
        {"data set (SHA-256)": config["data_sha256"]},
        way_out="put the same files on every machine, or name them with --data",
    )
