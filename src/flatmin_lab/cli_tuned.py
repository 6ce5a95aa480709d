"""`flatmin train --tuned tuning.json`: the values that a tuning chose, in the training that it was made for."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flatmin_lab.data import DATA_SETS, Dataset
from flatmin_lab.request import Plan
from flatmin_lab.tuning import result_file
from flatmin_lab.tuning.result import Tuning


class Chosen(NamedTuple):
    """A tuning, and the file that it was read from."""

    path: Path
    tuning: Tuning

    @staticmethod
    def of(path: Path, *, data: str | None, method: str | None) -> "Chosen":
        """An error where it is of another method or data set than the ones asked for, or has chosen nothing yet."""
        found = result_file.read(path)
        asked = {"method": method, "data": data}
        for name, there in (("method", found.method), ("data", found.data)):
            moved = name == "data" and not {asked[name], there} & set(DATA_SETS)  # its content is compared later
            if asked[name] not in (None, there) and not moved:
                raise ValueError(f"{path} is of --{name} {there}, got {asked[name]}; leave one of the two flags out")
        if found.chosen is None:
            raise ValueError(f"no trial of {path} has finished, so nothing is chosen; go on with `flatmin tune`")
        return Chosen(path, found)

    def changes(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's fields; those that are asked for win. Another model has other settings."""
        there = self.tuning.changes()
        if "model" in asked:
            del there["model_settings"]
        return {**there, **asked}

    def settings(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.tuning.settings(), **asked}

    def check(self, data: Dataset) -> None:
        """Whether these are the data; they may lie elsewhere now."""
        if data.checksum != self.tuning.data_sha256:
            raise ValueError(
                f"{self.path} was tuned on {self.tuning.data} with SHA-256 {self.tuning.data_sha256}, and this "
                f"{data.name} has {data.checksum}; give the same data, or tune on these"
            )

    def notes(self, plan: Plan) -> Iterator[str]:
        """In what the training is not the one that was tuned for."""
        here, there = plan.recipe, self.tuning
        if here.epochs != there.epochs:
            yield (
                f"the values were tuned at {there.epochs} epochs, and this training has {here.epochs}: what is best "
                "follows the length, as a radius grows with it; tune with the same --epochs"
            )
        if here.model != there.model:
            yield f"the values were tuned for {there.model}, and this training is of {here.model}"
        if there.ended < there.wanted:
            yield f"{there.ended} of {there.wanted} trials have ended: the values may change; go on with `flatmin tune`"
