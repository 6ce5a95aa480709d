"""Run as a program: random training runs as processes that are really stopped and killed, then resumed to the end.

    python -m tests.programs.random_histories FOLDER FIRST COUNT

Each number from FIRST on draws a recipe (support/random_runs.py) and what happens to its run: SIGKILL, SIGTERM or
SIGINT at a random moment, two signals, a kill at a call that makes a file last or with half a checkpoint written, a
full disk, a damaged checkpoint, an evaluation in between. What is printed, as JSON: how often each happened, and which
runs did not end with the bits of one that was left alone.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from flatmin_lab.runs import checkpoint
from tests import HANG_SECONDS
from tests.programs.kill_training import child, dies_at, dies_half_way, differences, ended, state_of
from tests.support.comparisons import saved
from tests.support.random_runs import draw_recipe, fill_disk

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "twice": signal.SIGINT}
POINTS: dict[str, Callable[[int], None]] = {"call": dies_at, "half": dies_half_way, "full": fill_disk}
HAPPENINGS = (*SIGNALS, *POINTS, "damage", "evaluate")


def interruptible() -> None:
    """A process that was started in the background may ignore Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def signalled(how: str, command: list[str], log: Path, seconds: float, draw: random.Random) -> int | None:
    number = child(command, log, interruptible)
    status = ended(number, draw.uniform(0, seconds))
    if status is not None:
        return status
    os.kill(number, SIGNALS[how])
    if how == "twice":
        time.sleep(draw.uniform(0, 0.05))
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGINT)
    return ended(number, HANG_SECONDS)


def happen(how: str, command: list[str], folder: Path, log: Path, seconds: float, draw: random.Random) -> None:
    if how in SIGNALS:
        signalled(how, command, log, seconds, draw)
    elif how in POINTS:
        ended(child(command, log, partial(POINTS[how], draw.randint(1, 12))), HANG_SECONDS)
    elif how == "damage":
        places = checkpoint.listed(folder)
        if len(places) > 1 and not (folder / "result.json").exists():
            content = bytearray(places[0].read_bytes())
            content[-3] ^= 1
            places[0].write_bytes(bytes(content))
    elif checkpoint.listed(folder):
        assert ended(child(["evaluate", str(folder)], log), HANG_SECONDS) == 0, log.read_text()


def main(place: Path, first: int, count: int) -> None:
    data, happened, apart = saved(place / "tiny.npz"), Counter[str](), list[str]()
    for seed in range(first, first + count):
        draw, here = random.Random(seed), place / str(seed)
        here.mkdir()
        log, config = here / "log", here / "recipe.json"
        config.write_text(json.dumps({**draw_recipe(draw).as_json(), "data": str(data)}))
        train = ["train", "--config", str(config), "--device", "cpu", "--seed", str(draw.choice([0, 3]))]
        begun = time.monotonic()
        assert ended(child([*train, "--out", str(here / "whole")], log), HANG_SECONDS) == 0, log.read_text()
        seconds = time.monotonic() - begun
        pace = draw.choice([["--checkpoint-minutes", "0"], ["--checkpoint-epochs", "2"], []])
        resumed = [*train, "--out", str(here / "run"), "--resume", *pace]
        for how in draw.choices(HAPPENINGS, k=draw.randint(1, 4)):
            happened[how] += 1
            happen(how, resumed, here / "run", log, seconds, draw)
        assert ended(child(resumed, log), HANG_SECONDS) == 0, log.read_text()
        found = differences(state_of(here / "whole"), state_of(here / "run"))
        left = [path.name for path in (here / "run").glob(".*.beside")]
        apart += [f"{seed}: {', '.join(sorted(found + left)[:5])}"] if found or left else []
    print(json.dumps({"happened": happened, "apart": apart}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
