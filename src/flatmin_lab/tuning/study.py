"""A tuning as an Optuna study on the disk: what was drawn, what came of it, and what is drawn next.

TPE draws. What it draws for a trial follows from the seed, the trial's number and what has ended before, and from no
state of this process: a study that is gone on with draws what it would have drawn. The first trial is what would have
been trained without tuning.

A trial is pruned where, past half of its epochs, its best measure is worse than the median of the finished trials after
the same epoch; not before five have finished. Up to half of the epochs the learning rate is high, and tells little.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flatmin_lab.data.dataset import Dataset
from flatmin_lab.recipes.recipe import Recipe, differences
from flatmin_lab.system.optional_deps import need
from flatmin_lab.system.rng import generator
from flatmin_lab.tuning.result import State, Trial
from flatmin_lab.tuning.search_space import Search

DATABASE = "study.db"
FIRST = 5  # trials that finish before one is pruned
KEPT = ("epoch", "seconds", "validation_error", "validation_nll")  # of a trial's last epoch
STATES: dict[str, State] = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


class Draw(NamedTuple):
    """What a trial is trained with, by the knobs' names."""

    number: int
    settings: dict[str, float]


@contextmanager
def opened(search: Search, data: Dataset, *, folder: Path, storage: str | None) -> Iterator["Study"]:
    """The study in the folder's own storage, or the one with its name in another; made if there is none.

    One of another tuning is an error.
    """
    optuna: Any = need("optuna", "flatmin tune")
    broken = need("sqlalchemy.exc", "flatmin tune").SQLAlchemyError
    try:
        there = optuna.storages.RDBStorage(storage or _beside(folder))
    except (broken, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the study cannot be opened ({reason}); --storage takes a database's address, as in sqlite:///study.db"
        ) from error
    try:
        known = [folder.absolute().name] if storage else optuna.get_all_study_names(there)
        name = next(iter(known), named(search.recipe, data))
        yield Study(optuna, search, search.identity(data.checksum), name, there)
    finally:
        there.remove_session()
        there.engine.dispose()


def named(recipe: Recipe, data: Dataset) -> str:
    """What a tuning is called where nothing is said."""
    return f"{data.name}-{recipe.model}-{recipe.method}-{recipe.epochs}-epochs"


def _beside(folder: Path) -> str:
    """The address of the folder's own storage, whatever signs are in its name."""
    address = need("sqlalchemy", "flatmin tune").URL.create("sqlite", database=str(folder.absolute() / DATABASE))
    return str(address.render_as_string(hide_password=False))


class Study:
    """Made by `opened`."""

    def __init__(self, optuna: Any, search: Search, identity: Mapping[str, Any], name: str, storage: Any) -> None:
        self.optuna, self.search = optuna, search
        past_half = search.recipe.epochs // 2 + 1
        pruner = optuna.pruners.MedianPruner(n_startup_trials=FIRST, n_warmup_steps=past_half)
        self.study = optuna.create_study(
            study_name=name,
            storage=storage,
            direction="minimize",
            pruner=pruner if search.pruning else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._check(identity)
        self.trials: dict[int, Any] = {}  # those that run

    def _check(self, identity: Mapping[str, Any]) -> None:
        known = self.study.user_attrs.get("tuning", {})
        if not known and not self._frozen():
            self.study.set_user_attr("tuning", identity)
            return
        here, there = ({**one.pop("recipe", {}), **one} for one in (dict(identity), dict(known)))
        if apart := differences(there, here):
            raise ValueError(
                f"the study {self.study.study_name} is of another tuning: {'; '.join(apart)}. "
                "Ask for what it has to go on with it, or choose another folder with --out"
            )

    def _frozen(self) -> list[Any]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name in STATES]

    # ---- what is trained

    def begun(self) -> list[Draw]:
        """Trials that were being trained when a process ended."""
        found = [trial for trial in self._frozen() if trial.state.name == "RUNNING"]
        return [self._drawn(self.optuna.trial.Trial(self.study, trial._trial_id)) for trial in found]

    def draw(self, wanted: int) -> Draw | None:
        """The next trial, if there are fewer than that."""
        there = self.study.get_trials(deepcopy=False)
        if not there:
            self.study.enqueue_trial(self.search.usual())
        return self._drawn(self.study.ask()) if len(self._frozen()) < wanted else None

    def _drawn(self, trial: Any) -> Draw:
        """What it has been given already stays; killed in between, it may lack some."""
        seed = torch.randint(2**31, (), generator=generator("trial", self.search.seed, trial.number))
        self.study.sampler = self.optuna.samplers.TPESampler(seed=int(seed))
        self.trials[trial.number] = trial
        return Draw(
            trial.number,
            {
                knob.name: knob.rounded(trial.suggest_float(knob.name, knob.low, knob.high, log=knob.log))
                for knob in self.search.knobs
            },
        )

    # ---- what came of it

    def is_bad(self, number: int, epoch: int, value: float | None) -> bool:
        """Write down the measure after an epoch; is the trial to be pruned? One that is not finite tells nothing."""
        trial = self.trials[number]
        if value is not None and epoch not in self.study.get_trials(deepcopy=False)[number].intermediate_values:
            trial.report(value, epoch)
        return epoch < self.search.recipe.epochs and bool(trial.should_prune())

    def end(self, number: int, state: State, last: Mapping[str, Any] | None, why: str = "") -> None:
        """How a trial ended, with the numbers of its last epoch if it had one."""
        trial = self.trials.pop(number)
        trial.set_user_attr("last", {key: last[key] for key in KEPT} if last else {})
        if why:
            trial.set_user_attr("why", why)
        value = last[f"validation_{self.search.measure}"] if last and state == "finished" else None
        names = {state: name for name, state in STATES.items()}
        self.study.tell(number, value, state=self.optuna.trial.TrialState[names[state]])

    def all(self) -> list[Trial]:
        return [self._seen(trial) for trial in self._frozen()]

    def _seen(self, trial: Any) -> Trial:
        last = trial.user_attrs.get("last", {})
        return Trial(
            number=trial.number,
            settings={k.name: k.rounded(trial.params[k.name]) for k in self.search.knobs if k.name in trial.params},
            state=STATES[trial.state.name],
            value=last.get(f"validation_{self.search.measure}"),
            error=last.get("validation_error"),
            nll=last.get("validation_nll"),
            epochs=last.get("epoch", trial.last_step or 0),
            seconds=last.get("seconds"),
            seed=self.search.seed,
            why=trial.user_attrs.get("why", ""),
        )
