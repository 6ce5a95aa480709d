"""Run as a program on a tiny file system: train until it is full, make room, resume."""

import sys
from pathlib import Path

from flatmin_lab.runs.events import Finished, RunError
from tests.support.small_runs import lasting, run, same, tiny_recipe


def main(place: Path) -> None:
    ballast = place / "ballast"
    recipe = tiny_recipe(method="amp", settings={"epsilon": 0.1}, epochs=12)
    with ballast.open("wb") as file:
        file.write(bytes(120 << 10))
    try:
        while True:  # each epoch makes the checkpoint's list of epochs longer
            for event in run(recipe, place / "run", resume=True, checkpoint_minutes=0):
                if isinstance(event, Finished):
                    sys.exit("the disk never filled up")
    except RunError as error:
        if "the disk is full" not in str(error) or "--resume" not in str(error):
            raise
        print("full")
    ballast.unlink()
    run(recipe, place / "run", resume=True)
    whole = place / "whole"
    run(recipe, whole)
    if same(lasting(place / "run"), lasting(whole)):
        print("resumed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
