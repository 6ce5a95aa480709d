"""Which runs `flatmin reproduce` executes: those of some tables and figures, the planned ones, or a subset."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.evaluation import post_training
from flatmin_lab.execution.runner import Run
from flatmin_lab.models import canonical
from flatmin_lab.recipes.experiments import EXPERIMENTS, Experiment, by_name
from flatmin_lab.recipes.protocols import NAMES as PROTOCOLS
from flatmin_lab.recipes.protocols import Protocol
from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.result_store import DamagedResultError, ResultStore, State


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Experiments, and their runs with what is to be measured for each."""

    experiments: Sequence[Experiment]
    runs: Sequence[Run]
    states: dict[tuple[str, int], State] = field(default_factory=dict)
    damaged: dict[tuple[str, int], str] = field(default_factory=dict)  # why the results of these runs cannot be read

    @property
    def trained(self) -> list[Experiment]:
        """The experiments that have runs; the others only time some steps."""
        return [experiment for experiment in self.experiments if experiment.trials]

    @property
    def measured(self) -> list[Experiment]:
        return [experiment for experiment in self.experiments if not experiment.trials]

    def state(self, job: Job) -> State | None:
        """None where its result cannot be read."""
        return self.states.get(job.key)

    def due(self, *, retry: bool, limit: int | None) -> list[Run]:
        """The runs that are not done, in order; those that failed before only with `retry`."""
        wanted: set[State] = {"missing", "begun", "unmeasured"}
        wanted |= {"failed"} if retry else set()
        return [run for run in self.runs if self.state(run.job) in wanted][:limit]

    def places(self) -> set[tuple[str, str]]:
        """The data sets and networks of the runs."""
        return {(original_name(run.job.recipe.data), run.job.recipe.model) for run in self.runs}


def experiments_named(names: Iterable[str], protocol: str) -> list[Experiment]:
    found = []
    for name in names:
        if name.lower() not in EXPERIMENTS:
            raise ValueError(f"unknown table or figure {name!r}; choose from {', '.join(EXPERIMENTS)}")
        found.append(EXPERIMENTS[name.lower()](_protocol(protocol)))
    return found


def _protocol(name: str) -> Protocol:
    for known in PROTOCOLS:
        if name == known:
            return known
    raise ValueError(f"unknown protocol {name!r}; choose from {', '.join(PROTOCOLS)}")


def select_runs(
    experiments: Sequence[Experiment],
    store: ResultStore,
    *,
    planned: bool,
    plan: bool,
    protocol: str | None,
    seeds: str | None,
    methods: str | None,
    data: str | None,
    models: str | None,
    measure: str | None,
) -> Selection:
    """The selected runs, each once, with their states."""
    if planned and plan:
        raise ValueError("--plan records runs and --planned executes the recorded ones; leave out one of them")
    if not planned and not experiments:
        raise ValueError(
            f"name a table or a figure: {', '.join(EXPERIMENTS)}; see them with --list, or execute a plan with "
            "--planned"
        )
    known = _planned(store, experiments, protocol) if planned else _of(experiments, _seeds(seeds))
    if not known and any((seeds, methods, data, models, measure)):
        raise ValueError("this trains nothing: leave out --seeds, --methods, --data, --models and --measure")
    recipes = [run.job.recipe for run in known]
    wanted = (
        _words(methods, {recipe.method for recipe in recipes}, "--methods"),
        _words(data, {original_name(recipe.data) for recipe in recipes}, "--data"),
        _words(models, {recipe.model for recipe in recipes}, "--models"),
        set(map(str, _seeds(seeds) or {run.job.seed for run in known})),
    )
    runs = [run for run in known if all(name in own for name, own in zip(_names(run.job), wanted, strict=True))]
    if known and not runs:
        raise ValueError("none of these runs has that method, data, network and seed; name others, or leave them out")
    runs = _measured(runs, _words(measure, set(post_training.PARTS), "--measure") if measure else set())
    shown = experiments or [EXPERIMENTS["table1"](protocol) for protocol in PROTOCOLS if _has(runs, protocol)]
    states, damaged = states_of(runs, store)
    return Selection(experiments=shown, runs=runs, states=states, damaged=damaged)


def sharing(runs: Iterable[Run], store: ResultStore) -> tuple[Job, ...]:
    """The runs that need beginnings, now or in a later command: a part of the plan keeps those of the others."""
    planned = [Job(by_name()[run["name"]], run["seed"]) for run in _not_withdrawn(store) if run["name"] in by_name()]
    return tuple({job.key: job for job in (*(run.job for run in runs), *planned)}.values())


def states_of(
    runs: Iterable[Run], store: ResultStore
) -> tuple[dict[tuple[str, int], State], dict[tuple[str, int], str]]:
    """How far each run is; and of those whose result cannot be read, why."""
    states: dict[tuple[str, int], State] = {}
    damaged: dict[tuple[str, int], str] = {}
    for run in runs:
        try:
            states[run.job.key] = store.state(run.job, run.parts)
        except DamagedResultError as error:
            damaged[run.job.key] = str(error)
    return states, damaged


def _measured(runs: Sequence[Run], asked: set[str]) -> list[Run]:
    """Each run once, with everything that is to be measured for it."""
    parts: dict[tuple[str, int], set[str]] = {}
    for run in runs:
        parts.setdefault(run.job.key, set(asked)).update(run.parts)
    if any("boundary" in parts[run.job.key] and run.job.recipe.data != "spiral" for run in runs):
        raise ValueError(
            "--measure boundary is for points of a plane: name only the experiment spiral, or leave it out"
        )
    for run in runs:
        if "outside" in parts[run.job.key]:
            post_training.outside_names(run.job.recipe.data)
    jobs = {run.job.key: run.job for run in runs}
    return [Run(job, tuple(p for p in post_training.PARTS if p in parts[name])) for name, job in jobs.items()]


def _names(job: Job) -> tuple[str, str, str, str]:
    return job.recipe.method, original_name(job.recipe.data), job.recipe.model, str(job.seed)


def _of(experiments: Sequence[Experiment], seeds: tuple[int, ...] | None) -> list[Run]:
    return [Run(job, experiment.parts) for experiment in experiments for job in experiment.jobs(seeds)]


def _planned(store: ResultStore, experiments: Sequence[Experiment], protocol: str | None) -> list[Run]:
    """The runs of planned.json, in its order, without those that were withdrawn.

    Of experiments only their own runs, and what they measure besides what was planned; or of a protocol all.
    """
    found = []
    for run in _not_withdrawn(store):
        if run["name"] not in by_name():
            raise ValueError(f"planned.json names {run['name']!r}, but there is no such recipe; correct it there")
        if unknown := [part for part in run.get("parts", ()) if part not in post_training.PARTS]:
            raise ValueError(
                f"planned.json wants {unknown[0]!r} of {run['name']} with seed {run['seed']}, but what can be measured "
                f"is {', '.join(post_training.PARTS)}; correct it there"
            )
        found.append(Run(Job(by_name()[run["name"]], run["seed"]), tuple(run.get("parts", ()))))
    if not found:
        raise ValueError(f"{store.results} has no plan; record one with --plan")
    if experiments:
        asked = " and ".join(experiment.name for experiment in experiments)
        own = _parts_of(experiments)
        found = [Run(job, (*parts, *own[job.recipe.name])) for job, parts in found if job.recipe.name in own]
    elif protocol is not None:
        asked, named = "any experiment", _protocol(protocol)
        found = [run for run in found if _has([run], named)]
    else:
        return found
    if not found:
        raise ValueError(
            f"no run of {asked} is planned under {protocol or 'paper'}; choose another --protocol, or record a plan "
            "with --plan"
        )
    return found


def _not_withdrawn(store: ResultStore) -> list[dict[str, Any]]:
    return [run for run in store.planned() if "withdrawn" not in run]


def _parts_of(experiments: Sequence[Experiment]) -> dict[str, tuple[str, ...]]:
    """By the names of the runs that they train, what they measure of them."""
    found: dict[str, tuple[str, ...]] = {}
    for experiment in experiments:
        for recipe in experiment.recipes if experiment.trials else ():
            found[recipe.name] = (*found.get(recipe.name, ()), *experiment.parts)
    return found


def _has(runs: Iterable[Run], protocol: Protocol) -> bool:
    return any(run.job.recipe.name.startswith(f"{protocol}/") for run in runs)


def _words(text: str | None, known: set[str], flag: str) -> set[str]:
    """The names in a list with commas, or all."""
    if text is None:
        return known
    named = {_spelled(word.strip(), known) for word in text.split(",")}
    if unknown := sorted(named - known):
        raise ValueError(f"{flag} takes {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return named


def _spelled(word: str, known: set[str]) -> str:
    """AMP is amp, and PreActResNet-18 preactresnet18."""
    return next((form for form in (word.lower(), canonical(word)) if form in known), word)


def _seeds(text: str | None) -> tuple[int, ...] | None:
    """The seeds of a text such as 0,1 or 0-9."""
    if text is None:
        return None
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--seeds takes whole numbers, as in 0,1 or 0-9, got {text!r}")
        if dash and int(last) < int(first):
            raise ValueError(f"--seeds takes a range from its lowest to its highest, as in 0-9, got {word.strip()}")
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(dict.fromkeys(found))
