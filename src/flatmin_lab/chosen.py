"""Which trainings are meant: those of some tables and figures, or those that were planned, or a part of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from flatmin_lab import afterwards
from flatmin_lab.data.made import SUFFIX
from flatmin_lab.ledger import Ledger, State
from flatmin_lab.recipe import Job, Recipe
from flatmin_lab.recipes import EXHIBITS, Exhibit, Protocol, by_name

PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Exhibits and their trainings; `parts` is what is to be measured of them."""

    exhibits: Sequence[Exhibit]
    jobs: Sequence[Job]
    parts: tuple[str, ...]
    states: dict[tuple[str, int], State] = field(default_factory=dict)

    @property
    def trained(self) -> list[Exhibit]:
        """The exhibits that trainings belong to; others are measured in some steps."""
        return [exhibit for exhibit in self.exhibits if exhibit.trials]

    def state(self, job: Job) -> State:
        return self.states[key(job)]

    def due(self, *, retry: bool, limit: int | None) -> list[Job]:
        """Those that are not done, in their order; of what failed before only with `retry`."""
        wanted: set[State] = {"missing", "begun", "unmeasured"}
        wanted |= {"failed"} if retry else set()
        return [job for job in self.jobs if self.state(job) in wanted][:limit]

    def places(self) -> set[tuple[str, str]]:
        """Data sets and networks."""
        return {(plain(job.recipe), job.recipe.model) for job in self.jobs}


def exhibits_named(names: Iterable[str], protocol: str) -> list[Exhibit]:
    found = []
    for name in names:
        if name not in EXHIBITS:
            raise ValueError(f"unknown table or figure {name!r}; choose from {', '.join(EXHIBITS)}")
        if protocol not in PROTOCOLS:
            raise ValueError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
        found.append(EXHIBITS[name](protocol))
    return found


def choose(
    exhibits: Sequence[Exhibit],
    ledger: Ledger,
    *,
    planned: bool,
    seeds: str | None,
    methods: str | None,
    data: str | None,
    models: str | None,
    measure: str | None,
) -> Chosen:
    """Each training once, with what is known of it."""
    if planned and exhibits:
        raise ValueError("--planned carries out what is in planned.json; leave out the tables and figures, or it")
    if not planned and not exhibits:
        raise ValueError(
            f"name a table or a figure: {', '.join(EXHIBITS)}; see them with --list, or carry out a plan with --planned"
        )
    asked = _words(measure, set(afterwards.PARTS), "--measure") if measure else set()
    own = {part for exhibit in exhibits for part in exhibit.parts}
    parts = tuple(part for part in afterwards.PARTS if part in asked | own)
    all_of_them = _planned(ledger) if planned else _of(exhibits, _seeds(seeds))
    recipes = [job.recipe for job in all_of_them]
    wanted = (
        _words(methods, {recipe.method for recipe in recipes}, "--methods"),
        _words(data, {plain(recipe) for recipe in recipes}, "--data"),
        _words(models, {recipe.model for recipe in recipes}, "--models"),
    )
    seeds_wanted = set(_seeds(seeds) or ()) or {job.seed for job in all_of_them}
    jobs = {
        key(job): job
        for job in all_of_them
        if all(name in own for name, own in zip(_names(job.recipe), wanted, strict=True)) and job.seed in seeds_wanted
    }
    if all_of_them and not jobs:
        raise ValueError("no training of these has that method, data, network and seed; name others, or leave them out")
    shown = exhibits or [EXHIBITS["table1"](protocol) for protocol in PROTOCOLS if _has(jobs.values(), protocol)]
    states = {name: ledger.state(job, parts) for name, job in jobs.items()}
    return Chosen(exhibits=shown, jobs=list(jobs.values()), parts=parts, states=states)


def key(job: Job) -> tuple[str, int]:
    return job.recipe.name, job.seed


def plain(recipe: Recipe) -> str:
    """The data set, or the one that it stands for."""
    return recipe.data.removesuffix(SUFFIX)


def _names(recipe: Recipe) -> tuple[str, str, str]:
    return recipe.method, plain(recipe), recipe.model


def _of(exhibits: Sequence[Exhibit], seeds: tuple[int, ...] | None) -> list[Job]:
    return [job for exhibit in exhibits for job in exhibit.jobs(seeds)]


def _planned(ledger: Ledger) -> list[Job]:
    """In the order of their planning."""
    found = []
    for run in ledger.planned():
        if run["name"] not in by_name():
            raise ValueError(f"planned.json names {run['name']!r}, and there is no such recipe; correct it there")
        found.append(Job(by_name()[run["name"]], run["seed"]))
    if not found:
        raise ValueError(f"{ledger.results} has no plan; write one down with --plan")
    return found


def _has(jobs: Iterable[Job], protocol: Protocol) -> bool:
    return any(job.recipe.name.startswith(f"{protocol}/") for job in jobs)


def _words(text: str | None, known: set[str], flag: str) -> set[str]:
    """Those that were named, or all."""
    if text is None:
        return known
    named = {word.strip() for word in text.split(",")}
    if unknown := sorted(named - known):
        raise ValueError(f"{flag} takes {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return named


def _seeds(text: str | None) -> tuple[int, ...] | None:
    """0,1 or 0-9."""
    if text is None:
        return None
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--seeds takes whole numbers, as in 0,1 or 0-9, got {text!r}")
        found += range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError(f"--seeds must name one at least, got {text!r}")
    return tuple(dict.fromkeys(found))
