"""The flags of `flatmin train`, turned into what is trained: a recipe, a seed, the data, a folder.

A new run has the default recipe for its data, changed by the flags. A resumed run has its folder's recipe, and the
flags must agree with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flatmin_lab.cli.config_file import overridden
from flatmin_lab.data import DATA_SETS, Dataset, load
from flatmin_lab.data.formats.download_progress import download_bar
from flatmin_lab.data.registry import NAMED, is_folder
from flatmin_lab.models.user_model import short_name
from flatmin_lab.recipes.defaults import default_recipe
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.recipes.user_files import named_files, recorded
from flatmin_lab.runs import config as run_config
from flatmin_lab.system.user_code import search_beside
from flatmin_lab.tuning import result_file
from flatmin_lab.tuning.result import Tuning


class Plan(NamedTuple):
    recipe: Recipe
    seed: int
    data: Dataset
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Request:
    """The flags that were given. One that was not is None, or missing in `changes` and `settings`."""

    data: str | None
    method: str | None
    seed: int | None
    out: Path | None
    resume: bool
    data_dir: Path
    download: bool
    changes: Mapping[str, Any]  # fields of the recipe
    settings: Mapping[str, Any]  # of the method

    def plan(self) -> Plan:
        if self.out is not None and self.resume and run_config.exists(self.out):
            return self._resume(self.out)
        if self.resume and self.out is not None and (seeds := _seeds_in(self.out)):
            first = f"--seed {seeds[0]} " if seeds[0] else ""
            raise ValueError(
                f"--resume resumes the run in --out, but {self.out} is a folder of runs: it holds "
                f"{', '.join(f'seed-{seed}' for seed in seeds)}; add {first}--seeds {seeds[-1] - seeds[0] + 1}"
            )
        new = self._new()
        return self._resume(new.folder) if self.resume and run_config.exists(new.folder) else new

    def plans(self, count: int) -> list[Plan]:
        """The plans of `count` seeds, starting at --seed, all with the same recipe and data.

        Each run has a folder of its own: the one it would have alone, or with --out a folder inside it. To resume, the
        recipe is that of any run that is there.
        """
        if count == 1:
            return [self.plan()]
        if self.out is not None and run_config.exists(self.out):
            raise ValueError(
                f"with --seeds every run is a folder in --out, but {self.out} is a run itself; "
                "choose another folder, or leave --seeds out"
            )
        seeds = range(self.seed or 0, (self.seed or 0) + count)
        there = [] if self.out is None or not self.resume else _seeds_in(self.out)
        known = next((seed for seed in (*seeds, *there) if seed in there), seeds[0])
        one = replace(self, seed=known, out=self._seed_folder(known)).plan()
        return [Plan(one.recipe, seed, one.data, self._folder(one, seed)) for seed in seeds]

    def _seed_folder(self, seed: int) -> Path | None:
        return None if self.out is None else self.out / f"seed-{seed}"

    def _folder(self, one: Plan, seed: int) -> Path:
        return self._seed_folder(seed) or _default_folder(one.data, one.recipe, seed)

    def _new(self) -> Plan:
        if self.data is None and self.resume:
            missing = "name the run's folder with --out" if self.out is None else f"{self.out} has no run to resume"
            raise ValueError(f"--resume resumes a run, but {missing}; or start one with --data")
        if self.data is None:
            raise ValueError(f"--data must name a data set ({', '.join(DATA_SETS)}, or a path)")
        data = read_data(self.data, self.data_dir, download=self.download, size=self.changes.get("size"))
        recipe = default_recipe(
            data_location(self.data), data, method=self.method or "amp", settings=self.settings, **self.changes
        )
        seed = self.seed or 0
        return Plan(recipe, seed, data, self.out or _default_folder(data, recipe, seed))

    def _resume(self, folder: Path) -> Plan:
        known = run_config.read_config(folder)
        recipe = self._with_changes(run_config.recipe_of(folder, known))
        seed = int(known["seed"]) if self.seed is None else self.seed
        run_config.check_recipe(folder, known, recipe, seed)
        data = read_run_data(recipe, self.data, self.data_dir, download=self.download)
        # changed data are the reason, whatever else does not fit because of them
        run_config.check_same(folder, known, {**known, "data_sha256": data.checksum})
        return Plan(recipe, seed, data, folder)

    def _with_changes(self, recipe: Recipe) -> Recipe:
        """The folder's recipe, changed by the flags. A user's own files may have moved: their contents are compared."""
        changes: dict[str, Any] = dict(self.changes)
        if "model_settings" in changes and changes.get("model", recipe.model) == recipe.model:
            changes["model_settings"] = {**recipe.model_settings, **changes["model_settings"]}
        if "optimizer_settings" in changes and changes.get("optimizer", recipe.optimizer) == recipe.optimizer:
            changes["optimizer_settings"] = {**recipe.optimizer_settings, **changes["optimizer_settings"]}
        kept = {field: known for field, known in recipe.files.items() if field not in changes}
        moved = self.data is not None and not {self.data, recipe.data} & set(DATA_SETS)
        named: dict[str, Any] = {} if self.data is None or moved else {"data": self.data}
        if self.method is not None:
            named["method"] = self.method
        inherited = recipe.settings if self.method in (None, recipe.method) else {}
        changed = replace(recipe, **named, **changes, settings={**inherited, **self.settings}, files=kept)
        for name in named_files(recipe).values():
            search_beside(name.rpartition(":")[0])
        return recorded(changed)


def _seeds_in(folder: Path) -> list[int]:
    """The seeds that have a run in the folder."""
    names = (path.name.removeprefix("seed-") for path in folder.glob("seed-*") if run_config.exists(path))
    return sorted(int(name) for name in names if name.isdecimal())


def _default_folder(data: Dataset, recipe: Recipe, seed: int) -> Path:
    return Path("runs") / f"{data.name}-{short_name(recipe.model)}-{recipe.method}-{seed}"


def data_location(data: str) -> str:
    """The name of a data set, or an absolute path."""
    return data if data in NAMED else str(Path(data).expanduser().absolute())


def read_data(name: str, root: Path, *, download: bool, size: tuple[int, int] | None) -> Dataset:
    """A data set; a bar shows the progress of a download."""
    with download_bar() as progress:
        return load(name, root, download=download, progress=progress, size=size)


def read_run_data(recipe: Recipe, data: str | None, root: Path, *, download: bool) -> Dataset:
    """A run's data, from where they were or, with --data, from where they are now."""
    place = data or recipe.data
    size = recipe.size if is_folder(place) else None
    try:
        return read_data(place, root, download=download, size=size)
    except FileNotFoundError as error:
        if data is not None or recipe.data in DATA_SETS:
            raise
        raise FileNotFoundError(f"{error}; if it has moved, name its new place with --data") from error


class TunedValues(NamedTuple):
    """The values that a tuning has chosen, and its file."""

    path: Path
    tuning: Tuning

    @staticmethod
    def of(path: Path, *, data: str | None, method: str | None) -> "TunedValues":
        """Read a tuning; an error if its method or data set differs from the flags, or if nothing is chosen yet."""
        found = result_file.read(path)
        asked = {"method": method, "data": data}
        for name, there in (("method", found.method), ("data", found.data)):
            moved = name == "data" and not {asked[name], there} & set(DATA_SETS)  # its content is compared later
            if asked[name] not in (None, there) and not moved:
                raise ValueError(f"{path} has --{name} {there}, got {asked[name]}; leave out one of the two flags")
        if found.chosen is None:
            raise ValueError(f"no trial of {path} has finished, so nothing is chosen; resume it with `flatmin tune`")
        return TunedValues(path, found)

    def changes(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's fields; flags take precedence."""
        return overridden(self.tuning.changes(), asked)

    def settings(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.tuning.settings(), **asked}

    def check(self, data: Dataset) -> None:
        """Check that this is the data used for tuning; its path may have changed."""
        if data.checksum != self.tuning.data_sha256:
            raise ValueError(
                f"{self.path} was tuned on {self.tuning.data} with SHA-256 {self.tuning.data_sha256}, but this "
                f"{data.name} has {data.checksum}; give the same data, or tune on these"
            )

    def notes(self, plan: Plan) -> Iterator[str]:
        """Notes on how the run differs from the tuned one."""
        here, there = plan.recipe, self.tuning
        if here.epochs != there.epochs:
            yield (
                f"the values were tuned at {there.epochs} epochs, but this run has {here.epochs}: the best values "
                "depend on the length, and the radius grows with it; tune with the same --epochs"
            )
        if here.model != there.model:
            yield f"the values were tuned for {there.model}, but this run trains {here.model}"
        if here.optimizer != there.recipe.optimizer:
            yield (
                f"the values were tuned with {there.recipe.optimizer}, but this run has {here.optimizer}, with its own "
                "rate and weight decay unless you give them"
            )
        if there.is_better_than_erm is False:
            yield f"on the validation split, the tuned {there.method} was no better than ERM; --method erm trains that"
        if there.ended < there.wanted:
            yield f"{there.ended} of {there.wanted} trials have ended: values may change; resume with `flatmin tune`"
