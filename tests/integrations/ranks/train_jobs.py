"""Runs of one model on several ranks, for test_train_ranks.py: what each rank saw, beside a single process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatmin_lab.data import Normalisation
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.runs import checkpoint
from flatmin_lab.runs.events import Epoch, Event, Finished, Note, RunError, Saved, Stopped
from flatmin_lab.training.captured_forward import CapturedForward
from flatmin_lab.training.data_parallel import sharded_logits
from flatmin_lab.training.evaluation import logits_of
from flatmin_lab.training.learner import Learner
from flatmin_lab.training.loop import train
from flatmin_lab.training.ranks import DistributedRankGroup, RankGroup
from tests.support.small_runs import TIMES, after, images, lasting, tiny_data, tiny_recipe

MLP: dict[str, Any] = {"model": "mlp", "model_settings": {"side": 6}, "augment": "vanilla"}
METHODS: dict[str, dict[str, Any]] = {
    "erm": {"method": "erm", "label_noise": 0.3},
    "label_smoothing": {"method": "label_smoothing"},
    "flooding": {"method": "flooding", "settings": {"level": 0.8}},
    "mixup": {"method": "mixup", "ema": 0.9},
    "adversarial": {"method": "adversarial", "settings": {"epsilon": 0.02}},
    "rmp": {"method": "rmp"},
    "amp": {"method": "amp", "settings": {"epsilon": 0.2}},
    "amp, N = 2": {"method": "amp", "settings": {"epsilon": 0.2, "inner_iter": 2}, "clip_norm": 0.5},
}
APART: dict[str, dict[str, Any]] = {  # not as one process does it, but the same every time, and on all ranks
    "dropout": {"method": "dropout", "settings": {"rate": 0.3}, **MLP},
    "convnet": {"method": "amp", "settings": {"epsilon": 0.2}, "ema": 0.9, "batch_size": 11},
    "adversarial, BatchNorm": {"method": "adversarial", "settings": {"epsilon": 0.1}},
    "fp16": {"method": "amp", "settings": {"epsilon": 0.2}, "precision": "fp16", **MLP},
    "a perturbation a rank": {"method": "amp", "settings": {"epsilon": 0.2, "sync_perturbation": False}, **MLP},
}


def ranks_of(rank: int) -> RankGroup:
    return DistributedRankGroup(rank=rank, size=dist.get_world_size())


def trained(recipe: Recipe, rank: int, folder: Path, **more: Any) -> list[Event]:
    return list(train(recipe, tiny_data(), ranks=ranks_of(rank), folder=folder, **more))


def numbers_of(events: list[Event]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.numbers.items() if k not in TIMES} for r in events if isinstance(r, Epoch)]


class Watched:
    """The weights of the learner that was made last."""

    def __init__(self) -> None:
        self.real = Learner.join

    def __enter__(self) -> "Watched":
        def join(learner: Learner) -> None:
            self.learner = learner
            self.real(learner)

        setattr(Learner, "join", join)  # noqa: B010
        return self

    def __exit__(self, *what: object) -> None:
        setattr(Learner, "join", self.real)  # noqa: B010

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.learner.model.parameters()]


def as_one(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Batches of ten, the last of four: among three ranks, shares of three and four, and of one and two."""
    recipe = tiny_recipe(**{**MLP, **METHODS[name]})
    with Watched() as watched:
        ours = trained(recipe, rank, folder / name)
        weights = watched.weights()
        theirs = list(train(recipe, tiny_data()))
        expected = watched.weights()
    result = ours[-1].result if isinstance(ours[-1], Finished) else {}
    return {
        "weights": weights,
        "expected": expected,
        "lines": numbers_of(ours),
        "expected_lines": numbers_of(theirs),
        "ranks": result["ranks"],
    }


def apart(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Once without a stop, once stopped in the middle by a reason that one rank alone has, at a step of its own."""
    recipe = tiny_recipe(**APART[name])
    with Watched() as watched:
        whole = trained(recipe, rank, folder / name)
        weights = watched.weights()
    again = folder / f"{name} again"
    last = dist.get_world_size() - 1
    stopped = trained(recipe, rank, again, stop=after(7) if rank == last else lambda: None)
    ended = stopped[-1]
    while not isinstance(ended, Finished):
        assert isinstance(ended, Stopped)
        ended = trained(recipe, rank, again, resume=True, checkpoint_minutes=0)[-1]
    dist.barrier()
    bits = [lasting(folder / name), lasting(again)]
    same = [key for key in bits[0] if _same(bits[0][key], bits[1][key])]
    stop = stopped[-1]
    return {
        "weights": weights,
        "lines": numbers_of(whole),
        "stopped": [stop.reason, stop.step] if isinstance(stop, Stopped) else [],
        "apart": [key for key in bits[0] if key not in same],
    }


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def resumes_as_one(rank: int, folder: Path) -> dict[str, Any]:
    """Started by several ranks, resumed by one, and the other way round: right to rounding, and a note says so."""
    recipe, place, other = tiny_recipe(**MLP), folder / "to-one", folder / "to-several"
    trained(recipe, rank, place, stop=after(7))
    notes: list[str] = []
    if rank == 0:
        notes += _notes(list(train(recipe, tiny_data(), folder=place, resume=True)))
        list(train(recipe, tiny_data(), folder=other, stop=after(7)))
    dist.barrier()
    notes += _notes(trained(recipe, rank, other, resume=True))
    dist.barrier()
    list(train(recipe, tiny_data(), folder=folder / f"alone-{rank}"))
    weights = [sorted(lasting(run).items()) for run in (place, other, folder / f"alone-{rank}")]
    return {"notes": notes, "weights": [[t for k, t in w if k.startswith("model.")] for w in weights]}


def _notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def measured_in_shares(rank: int, folder: Path) -> dict[str, Any]:
    """30 images in batches of 8: as one process measures them; and broken off on all ranks where one is asked."""
    data, more = tiny_data(), images(30, 5)
    torch.manual_seed(0)
    forward = CapturedForward(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3)))
    normalise = Normalisation.of(data.train)
    shared = sharded_logits(forward, more, normalise, ranks=ranks_of(rank), batch_size=8)
    few = sharded_logits(forward, more, normalise, ranks=ranks_of(rank), batch_size=30)
    alone = logits_of(forward, more, normalise, batch_size=8)
    stopped = sharded_logits(forward, more, normalise, ranks=ranks_of(rank), batch_size=8, stop=lambda: rank == 0)
    assert shared is not None
    assert few is not None
    assert alone is not None
    return {"shared": shared, "few": few, "alone": alone, "stopped": stopped is None}


def raised(act: Callable[[], Any]) -> list[str]:
    try:
        act()
    except (RunError, ValueError, TypeError, OSError) as error:
        return [type(error).__name__, str(error)]
    return []


def spoilt(rank: int, folder: Path) -> dict[str, Any]:
    """The last rank's weights or statistics alone become infinite: all ranks stop at once, and nothing is saved."""
    real = Learner.is_finite
    setattr(Learner, "is_finite", lambda _: rank != dist.get_world_size() - 1)  # noqa: B010
    try:
        found = raised(lambda: trained(tiny_recipe(**MLP), rank, folder / "spoilt"))
    finally:
        setattr(Learner, "is_finite", real)  # noqa: B010
    diverged = raised(lambda: trained(tiny_recipe(**MLP, lr=1e30, schedule="constant"), rank, folder / "diverged"))
    dist.barrier()
    return {"found": found, "diverged": diverged, "saved": len(checkpoint.listed(folder / "spoilt"))}


def refused(rank: int, folder: Path) -> dict[str, Any]:
    """What is wrong on one rank is an error on all."""
    last = rank == dist.get_world_size() - 1
    (folder / "file").write_text("")
    begin = partial(trained, rank=rank, folder=folder / "refused")
    other = tiny_data(test=21) if last else tiny_data()
    wrong: dict[str, Callable[[], Any]] = {
        "recipe": lambda: begin(tiny_recipe(lr=0.2 if last else 0.1)),
        "seed": lambda: begin(tiny_recipe(), seed=int(last)),
        "data": lambda: list(train(tiny_recipe(), other, ranks=ranks_of(rank), folder=folder / "refused")),
        "epochs": lambda: begin(tiny_recipe(), checkpoint_epochs=1 + last),
        "model": lambda: begin(tiny_recipe(model="vgg16", model_settings={}) if last else tiny_recipe()),
        "folder": lambda: trained(tiny_recipe(), rank, folder / "file" / "run"),
        "small": lambda: begin(tiny_recipe(**MLP, batch_size=1)),
        "norm": lambda: begin(tiny_recipe(batch_size=41)),
        "inputs": lambda: begin(tiny_recipe(method="adversarial", settings={"epsilon": 0.1, "bounds": [0.4, 0.6]})),
        "set": lambda: begin(tiny_recipe(method="amp", settings={"sync_perturbation": "no"})),
    }
    found = {name: raised(act) for name, act in wrong.items()}
    return {"found": found, "begun": (folder / "refused").exists()}


def full_disk(rank: int, folder: Path) -> dict[str, Any]:
    """The first rank cannot write its second checkpoint: all of them leave, and the first one is whole."""
    events: list[Event] = []

    def begin() -> None:
        for event in train(tiny_recipe(**MLP), tiny_data(), ranks=ranks_of(rank), folder=folder / "full"):
            events.append(event)
            if isinstance(event, Saved):
                (folder / "full" / ".lock").unlink()  # as if the folder had been taken away

    return {"found": raised(begin), "epochs": sum(isinstance(event, Epoch) for event in events)}


JOBS: dict[str, Any] = {
    **{f"as one: {name}": partial(as_one, name=name) for name in METHODS},
    **{f"apart: {name}": partial(apart, name=name) for name in APART},
    "resumes as one": resumes_as_one,
    "measured": measured_in_shares,
    "spoilt": spoilt,
    "refused": refused,
    "full disk": full_disk,
}
