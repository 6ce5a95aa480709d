"""A tuning as an Optuna study on disk: which trials were drawn, how they ended, and what is drawn next.

TPE draws the trials. What it draws depends on the seed, the trial's number and the trials that have ended, and on no
state of this process: a resumed study draws what it would have drawn anyway. The first trial is ERM's, which has no
hyper-parameter, the second has the values that would be used without tuning. A study that was started without ERM's
trial gets it as the next one.

A trial is pruned if, past half of its epochs, its best measure is worse than the median of the finished trials after
the same epoch, but not before five have finished. In the first half the learning rate is high, and the measure says
little. ERM's trial is never pruned: the others are compared with it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.models.user_model import short_name
from flatmin_lab.recipes.recipe import Recipe, differences
from flatmin_lab.runs.events import RunError
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.rng import generator
from flatmin_lab.tuning.result import State, Trial
from flatmin_lab.tuning.search_space import HyperParameter, SearchSpace

DATABASE = "study.db"
MIN_FINISHED_TRIALS = 5  # before any is pruned: a median of fewer says little
KEPT_METRICS = ("epoch", "seconds", "validation_error", "validation_nll")  # of the last epoch, in the study
ERM = "erm"  # the attribute of ERM's trial in the study
STATES: dict[str, State] = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


class OtherTuningError(ValueError):
    """The study belongs to another tuning."""


class Draw(NamedTuple):
    """A trial as it was drawn: its number, and its settings by the names of the hyper-parameters."""

    number: int
    settings: dict[str, float]
    is_erm: bool = False


@contextmanager
def open_study(search: SearchSpace, data: Dataset, *, folder: Path, storage: str | None) -> Iterator["Study"]:
    """The study in the folder's own database, or in `storage` the one named like the folder; created if there is none.

    A study of another tuning is an error. So is a database that cannot be written any more, as on a full disk.
    """
    optuna: Any = need("optuna", "flatmin tune")
    broken = need("sqlalchemy.exc", "flatmin tune").SQLAlchemyError
    where = "" if storage else f" in {folder / DATABASE}"
    try:
        database = optuna.storages.RDBStorage(storage or _storage_url(folder))
    except (broken, OSError) as error:
        way_out = (
            "--storage takes a database's address, as in sqlite:///study.db"
            if storage
            else "if the disk is full, make room; if the study is damaged, put a good copy there"
        )
        raise ValueError(f"the study{where} cannot be opened ({_reason(error)}); {way_out}") from error
    try:
        try:
            known = [folder.absolute().name] if storage else optuna.get_all_study_names(database)
            name = next(iter(known), default_name(search.recipe, data))
            study = Study(optuna, search, search.identity(data.checksum), name, database)
            study.all_trials()
        except OtherTuningError:
            raise
        except Exception as error:  # a damaged database can raise anything
            raise ValueError(
                f"the study{where} cannot be read or written ({_reason(error)}); if the disk is full, make room; if "
                "the study is damaged, put a good copy there, or choose another folder with --out"
            ) from error
        try:
            yield study
        except (broken, optuna.exceptions.StorageInternalError) as error:
            raise RunError(
                f"the study{where} could not be written ({_reason(error)}); once it can be, repeat the command: trials "
                "that have ended stay, and the others resume"
            ) from error
    finally:
        database.remove_session()
        database.engine.dispose()


def _reason(error: BaseException) -> str:
    """The first line of the error beneath: Optuna's own says only that something could not be committed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"


def default_name(recipe: Recipe, data: Dataset) -> str:
    """The name of a tuning for which none is given."""
    return f"{data.name}-{short_name(recipe.model)}-{recipe.method}-{recipe.epochs}-epochs"


def _storage_url(folder: Path) -> str:
    """The address of the folder's own database, whatever characters are in its name."""
    address = need("sqlalchemy", "flatmin tune").URL.create("sqlite", database=str(folder.absolute() / DATABASE))
    return str(address.render_as_string(hide_password=False))


class Study:
    """Made by `open_study`."""

    def __init__(self, optuna: Any, search: SearchSpace, identity: Mapping[str, Any], name: str, storage: Any) -> None:
        self.optuna, self.search = optuna, search
        past_half = search.recipe.epochs // 2 + 1
        pruner = optuna.pruners.MedianPruner(n_startup_trials=MIN_FINISHED_TRIALS, n_warmup_steps=past_half)
        self.study = optuna.create_study(
            study_name=name,
            storage=storage,
            direction="minimize",
            pruner=pruner if search.pruning else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._check(identity)
        self.running: dict[int, Any] = {}  # Optuna's trials, by number

    def _check(self, identity: Mapping[str, Any]) -> None:
        known = self.study.user_attrs.get("tuning", {})
        if not known and not self._frozen_trials():
            self.study.set_user_attr("tuning", identity)
            return
        here, there = ({**one.pop("recipe", {}), **one} for one in (dict(identity), dict(known)))
        if differing := differences(there, here):
            raise OtherTuningError(
                f"the study {self.study.study_name} belongs to another tuning: {'; '.join(differing)}. "
                "Give the same flags to resume it, or choose another folder with --out"
            )

    def _frozen_trials(self) -> list[Any]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name in STATES]

    # ---- drawing

    def unfinished(self) -> list[Draw]:
        """Trials that were being trained when an earlier process ended."""
        found = [trial for trial in self._frozen_trials() if trial.state.name == "RUNNING"]
        return [self._suggest(self.optuna.trial.Trial(self.study, trial._trial_id)) for trial in found]

    def draw(self, wanted: int) -> Draw | None:
        """The next trial, if there are fewer than `wanted`."""
        if len(self._frozen_trials()) >= wanted:
            return None
        known = self.study.get_trials(deepcopy=False)
        waits = any(trial.state.name == "WAITING" for trial in known)  # enqueued, by an earlier call or by the user
        if self.search.has_erm_trial and not waits and not any(map(_is_erm, known)):
            self.study.enqueue_trial({}, user_attrs={ERM: True})
        if all(map(_is_erm, known)):
            self.study.enqueue_trial(self.search.default_settings())
        return self._suggest(self.study.ask())

    def _suggest(self, trial: Any) -> Draw:
        """Draw the settings it lacks; a trial that was killed while it was drawn gets those it would have had."""
        seed = torch.randint(2**31, (), generator=generator("trial", self.search.seed, trial.number))
        self.study.sampler = self.optuna.samplers.TPESampler(seed=int(seed))
        self.running[trial.number] = trial
        if _is_erm(trial):
            return Draw(trial.number, {}, is_erm=True)
        return Draw(trial.number, {p.name: self._suggest_value(trial, p) for p in self.search.hyper_parameters})

    def _suggest_value(self, trial: Any, p: HyperParameter) -> float:
        """A value that is stored already is drawn again, and dropped, for the sake of the random numbers after it."""
        here = self.study.get_trials(deepcopy=False)[trial.number]
        if p.name in here.params and p.name not in here.system_attrs.get("fixed_params", {}):
            values = self.optuna.distributions.FloatDistribution(p.low, p.high, log=p.log)
            self.study.sampler.sample_independent(self.study, here, p.name, values)
        return p.rounded(trial.suggest_float(p.name, p.low, p.high, log=p.log))

    # ---- results

    def should_prune(self, number: int, epoch: int, value: float | None) -> bool:
        """Report the measure after an epoch, if it is finite; should the trial be pruned?

        A resumed trial reports its epochs again, but Optuna judges by the last one that it knows: until that one comes,
        the answer is no.
        """
        trial, known = self.running[number], self.study.get_trials(deepcopy=False)[number].intermediate_values
        if value is not None and epoch not in known:
            trial.report(value, epoch)
        is_repeated = epoch < max(known, default=0)
        judged = not is_repeated and not _is_erm(trial) and epoch < self.search.recipe.epochs
        return judged and bool(trial.should_prune())

    def end(self, number: int, state: State, last: Mapping[str, Any] | None, why: str = "") -> None:
        """Store how a trial ended, with the metrics of its last epoch if it had one."""
        trial = self.running.pop(number)
        trial.set_user_attr("last", {key: last[key] for key in KEPT_METRICS} if last else {})
        if why:
            trial.set_user_attr("why", why)
        value = last[f"validation_{self.search.measure}"] if last and state == "finished" else None
        names = {state: name for name, state in STATES.items()}
        self.study.tell(number, value, state=self.optuna.trial.TrialState[names[state]])

    def all_trials(self) -> list[Trial]:
        return [self._as_trial(trial) for trial in self._frozen_trials()]

    def _as_trial(self, trial: Any) -> Trial:
        last = trial.user_attrs.get("last", {})
        return Trial(
            number=trial.number,
            settings={
                p.name: p.rounded(trial.params[p.name]) for p in self.search.hyper_parameters if p.name in trial.params
            },
            state=STATES[trial.state.name],
            value=last.get(f"validation_{self.search.measure}"),
            error=last.get("validation_error"),
            nll=last.get("validation_nll"),
            epochs=last.get("epoch", trial.last_step or 0),
            seconds=last.get("seconds"),
            seed=self.search.seed,
            why=trial.user_attrs.get("why", ""),
            is_erm=_is_erm(trial),
        )


def _is_erm(trial: Any) -> bool:
    return bool(trial.user_attrs.get(ERM, False))
