"""The report: one page about finished runs and tunings, made only from their files, in a second and without a GPU."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from markupsafe import Markup

import flatmin
from flatmin_lab.data.sources import spiral
from flatmin_lab.methods import NOT_IN_PAPER, resolve_settings
from flatmin_lab.recipes import paper_numbers
from flatmin_lab.recipes.experiments import by_name
from flatmin_lab.report import figures
from flatmin_lab.report.columns import COLUMNS, Column, column_named
from flatmin_lab.report.comparison import Group, Row, groups_of, titles_of
from flatmin_lab.report.figures import decision_boundary
from flatmin_lab.report.figures.style import DrawnFigure, legend_sample, svg
from flatmin_lab.report.html import data_link, format_p, pool_bins, render, short_fact, whole
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import LoadedResults, Run
from flatmin_lab.report.pages import confidence, landscape, spectrum, summary_text, tuning
from flatmin_lab.report.paper.claims import families_with
from flatmin_lab.report.paper.evidence import Evidence, evidence
from flatmin_lab.report.paper.families import Families, Family, NamedFamily
from flatmin_lab.report.paper.key_results import key_results
from flatmin_lab.report.paper.tables import Row as TableRow
from flatmin_lab.report.schema import is_number
from flatmin_lab.report.stats import LEVEL
from flatmin_lab.tuning.result import Tuning


class PageFigure(NamedTuple):
    """A figure in the page, and a link that saves its numbers."""

    drawing: Markup
    link: str
    file: str


class Section(NamedTuple):
    """Everything that the page shows of a group."""

    group: Group
    title: str
    words: list[str]
    first: list[Column]  # of the first table: error, calibration, cost
    second: list[Column]  # robustness, flatness
    conditions: list[str]
    curves: list[PageFigure]
    legend: list[tuple[Markup, str]]
    reliability: list[PageFigure]
    bars: list[PageFigure]
    sweep: PageFigure | None
    boundaries: PageFigure | None
    risk: PageFigure | None  # over coverage
    outside: list[tuple[confidence.OutsideTable, PageFigure | None]]
    landscapes: landscape.LandscapeSection | None
    spectrum: tuple[spectrum.SpectrumSection, PageFigure] | None
    commands: list[str]  # that measure what is missing
    family: NamedFamily | None  # of its comparisons


def report_page(found: LoadedResults) -> str:
    unusable = list(found.unusable)
    shown_evidence = evidence(found, unusable)
    protocols = shown_evidence.protocols if shown_evidence else []
    named = {name: one for protocol in protocols for name, one in protocol.families.items()}
    groups = groups_of(found.runs, _families(found) if shown_evidence else {})
    sections = [_section(group, title, named) for group, title in zip(groups, titles_of(groups), strict=True)]
    made = [
        f"{before}{value}"
        for key, before in (("hardware", ""), ("torch", "torch "), ("commit", "commit "))
        for value in sorted({short_fact(key, str(facts[key])) for facts in _all_facts(found) if facts.get(key)})
    ]
    return render(
        "report.html.jinja",
        sections=sections,
        evidence=shown_evidence,
        key_results=key_results(shown_evidence) if shown_evidence else [],
        frontier_figures=_frontier_figures(shown_evidence),
        length_figures=_length_figures(shown_evidence),
        unusable=unusable,
        tunings=[_tuning_with_figure(*one) for one in found.tunings],
        runs=len(found.runs),
        level=LEVEL,
        made=made,
        flatmin=flatmin.__version__,
        colours=landscape.height_colours(),
        script=landscape.surface_script(),
        format_p=format_p,
        titles=TITLES,
        paper_cost=paper_numbers,
    )


def _families(found: LoadedResults) -> Families:
    """The families of the paper's tables; none if there are only the user's own runs."""
    names = {str(run.result.get("recipe") or "") for run in found.runs}
    known = families_with({name: Family(*family) for name, family in found.families.items()})
    return known if names & by_name().keys() else {}


def _frontier_figures(found: Evidence | None) -> dict[tuple[str, str], PageFigure]:
    """By protocol and data set."""
    drawn = {}
    for protocol in found.protocols if found else ():
        for one in protocol.frontiers:
            points = [
                figures.FrontierPoint(
                    mode.row.name,
                    mode.row.recipe.method,
                    mode.measured[0] if one.is_measured else None,
                    mode.cost,
                    mode.kept,
                )
                for mode in one.modes
            ]
            title = f"{TITLES[one.data]}, {TITLES[one.model]}"
            file = f"frontier-{protocol.name}-{one.data}"
            drawn[protocol.name, one.data] = page_figure(figures.frontier(title, points, one.columns), file)
    return drawn


def _length_figures(found: Evidence | None) -> dict[str, list[PageFigure]]:
    """By protocol, one for each data set and share of wrong labels: the error over the time of training."""
    drawn: dict[str, list[PageFigure]] = {}
    for protocol in found.protocols if found else ():
        rows = [row for table in protocol.tables if table.experiment.name == "length" for row in table.trained]
        for data, noise in dict.fromkeys((row.data, row.place.label_noise) for row in rows):
            own = [row for row in rows if (row.data, row.place.label_noise) == (data, noise)]
            if points := [point for row in own if (point := _timed_point(row))]:
                title = f"{TITLES[data]}, {whole(100 * noise)} % wrong labels" if noise else TITLES[data]
                file = f"length-{protocol.name}-{data}{f'-noise-{noise}' if noise else ''}"
                drawn.setdefault(protocol.name, []).append(page_figure(figures.over_time(title, points), file))
    return drawn


def _timed_point(row: TableRow) -> figures.TimedPoint | None:
    """The runs whose time counts; None if there are none."""
    seconds, error = column_named("training_time"), column_named("error")
    timed = [run for run in row.runs if seconds.value(run) is not None]
    if not timed:
        return None
    times, errors = ([value for run in timed if (value := one.value(run)) is not None] for one in (seconds, error))
    return figures.TimedPoint(row.recipe.method, row.mode, row.recipe.epochs, mean(times) / 60, errors)


def _all_facts(found: LoadedResults) -> list[Mapping[str, Any]]:
    """The hardware, versions and commits behind the numbers."""
    return [*(run.result for run in found.runs), *(one.facts for _, one in found.tunings)]


def _tuning_with_figure(path: Path, found: Tuning) -> tuple[tuning.TuningSection, PageFigure | None]:
    section = tuning.tuning_section(path, found)
    return section, page_figure(section.figure, f"{_slug(section.title)}-tuning") if section.figure else None


def page_figure(drawn: DrawnFigure, file: str) -> PageFigure:
    return PageFigure(Markup(svg(drawn)), data_link(drawn.data), f"{file}.json")


def _section(group: Group, title: str, families: Mapping[str, NamedFamily]) -> Section:
    rows = _one_a_method(group)
    shown_columns = [column for column in COLUMNS if _is_shown(column, group)]
    name = f"{_slug(group.setting['data'])}-{_slug(group.setting['model'])}"
    return Section(
        group,
        title,
        summary_text.summary(group),
        [column for column in shown_columns if not column.command],
        [column for column in shown_columns if column.command],
        _conditions(group),
        [page_figure(drawn, f"{name}-{place}") for place, drawn in enumerate(_curves(rows, group.split))],
        [(Markup(legend_sample(row.method)), row.name) for row in rows],
        [page_figure(drawn, f"{name}-reliability-{row.method}") for row in rows if (drawn := _reliability(row))],
        [page_figure(drawn, f"{name}-{file}") for file, drawn in _bars(group).items()],
        _sweep(group, name),
        _boundaries(rows, group, name),
        page_figure(risks, f"{name}-risk-coverage")
        if (risks := confidence.risk_figure(_one_a_method(group, _has("selective"))))
        else None,
        [
            (table, page_figure(table.roc, f"{name}-roc-{_slug(table.name)}") if table.roc else None)
            for table in confidence.outside_tables(group.rows, _one_a_method(group, _has("outside")))
        ],
        landscape.landscape_section([(row.name, row.method, _with_landscapes(row)) for row in rows]),
        _spectrum(_one_a_method(group, _has("spectrum")), name),
        _commands(group, rows),
        families.get(group.family_name),
    )


def _is_shown(column: Column, group: Group) -> bool:
    """Show a column if it has values, if a command would measure it, or if every run has it."""
    cells = [row.cells[column.name] for row in group.rows]
    if any(cell.values for cell in cells):
        return True
    return not column.optional and (not column.command or any(cell.missing for cell in cells))


def _commands(group: Group, rows: Sequence[Row]) -> list[str]:
    """The commands that measure what the runs lack, and landscapes if there are none."""
    folders = [str(row.runs[0].path) for row in rows if row.runs[0].path.is_dir()]
    if not folders or any(run.landscape for row in rows for run in row.runs):
        return group.unmeasured
    return [*group.unmeasured, shlex.join(["flatmin", "landscape", *folders])]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.rstrip("/").rpartition("/")[2]) or "runs"


def _one_a_method(group: Group, is_measured: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """One row per method, as figures have one line each: the setting with the most runs, then the lowest error.

    Of the rows that have what is drawn; one with averaged weights only if there is no other, for figures are of the
    last ones.
    """
    rows = [row for row in group.rows if is_measured(row)]
    methods = dict.fromkeys(row.method for row in rows)
    return [
        min(
            (row for row in rows if row.method == method),
            key=lambda row: (row.is_averaged, -len(row.runs), summary_text.error_of(row)),
        )
        for method in methods
    ]


def _has(part: str) -> Callable[[Row], bool]:
    """Whether a row has that part of an evaluation."""
    return lambda row: any(run.evaluation.get(part) for run in row.runs)


def _has_values(column: str) -> Callable[[Row], bool]:
    return lambda row: bool(row.cells[column].values)


def _conditions(group: Group) -> list[str]:
    """Under what conditions the columns of the second table were measured, in words."""
    found = []
    evaluations = [run.evaluation for row in group.rows for run in row.runs]
    if any(run.result.get("ema") for row in group.rows for run in row.runs):
        found.append(
            "EMA: numbers of the averaged weights, except where it says that they are of the last ones. Averaged "
            "weights are compared with ERM's average, if there is one."
        )
    attack = next((e["attack"] for e in evaluations if "radius" in e.get("attack", {})), None)
    if attack:
        radius, step = (f"{255 * attack[key]:.3g}/255" for key in ("radius", "step_size"))
        norm = {"linf": "L∞", "l2": "L2"}.get(attack.get("norm"), attack.get("norm"))
        found.append(
            f"Attacks: white box, {norm}, radius {radius}; PGD: {attack['steps']} steps of {step}, no random start; "
            f"{attack['pictures']:,} {group.split} examples."
        )
    if any("attack_normalised" in e for e in evaluations):
        found.append("Small radius: radius and step are in units of the normalised inputs, not of the pixel range.")
    flat = next((e["flatness"] for e in evaluations if "epsilon" in e.get("flatness", {})), None)
    if flat:
        found.append(
            f"Flatness is that of the training loss on {flat['pictures']:,} examples, without augmentation and "
            f"with BatchNorm fixed. "
            f"The worst loss is a lower bound, found by ascent in the ball of radius {flat['epsilon']:g} around θ."
        )
    adaptive = next((e["flatness"] for e in evaluations if "adaptive_epsilon" in e.get("flatness", {})), None)
    if adaptive:
        radius = f"{adaptive['adaptive_epsilon']:g}"
        found.append(
            f"Adaptive: in the ball ‖Δ ⊘ |θ|‖ ≤ {radius}, where each weight moves in proportion to its size; rescaled "
            "layers do not change it."
        )
    return found


def _curves(rows: Sequence[Row], split: str) -> list[DrawnFigure]:
    """Means, epoch by epoch, over a row's runs that have curves."""
    measures: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "training loss": lambda line: line.get("train_loss"),
        f"{split} NLL": lambda line: line.get(f"{split}_nll"),
        f"{split} error, %": lambda line: _scaled(line.get(f"{split}_error")),
        "radius ε": lambda line: line.get("epsilon"),  # where it was matched to held-out data
    }
    known = {row.method: [run for run in row.runs if run.lines] for row in rows}
    drawn = []
    for title, value in measures.items():
        lines = {method: _over_epochs(own, value) for method, own in known.items()}
        lines = {method: values for method, values in lines.items() if values}
        if lines:
            drawn.append(figures.curves(title, lines, count={method: len(known[method]) for method in lines}))
    return drawn


def _scaled(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _over_epochs(runs: Sequence[Run], value: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    found = []
    for lines in zip(*(run.lines for run in runs), strict=False):
        here = [value(line) for line in lines]
        known = [number for number in here if number is not None]
        if len(known) < len(here):
            break  # a run has no number for this epoch
        found.append(mean(known))
    return found


def _reliability(row: Row) -> DrawnFigure | None:
    """The reliability diagram of all runs of a row together."""
    parts = [run.result["reliability"] for run in row.runs if run.result["reliability"]]
    if not parts:
        return None
    title = f"{row.name},\nlast weights, n" if row.is_averaged else f"{row.name}, n"
    return figures.reliability_diagram(f"{title} = {len(parts)}", pool_bins(parts), method=row.method)


def _bars(group: Group) -> dict[str, DrawnFigure]:
    titles = {
        "ece": "ECE",
        "fgsm_normalised": "FGSM, small radius",
        "pgd_normalised": "PGD, small radius",
        "fgsm_error": "error under FGSM",
        "pgd_error": "error under PGD",
    }
    drawn = {}
    for name, title in titles.items():
        rows = _one_a_method(group, _has_values(name))
        values = {row.method: row.cells[name].values for row in rows}
        theirs = {row.method: cell.mean for row in rows if (cell := row.cells[name].paper)}
        ours = {row.method: mean(known) for row in rows if (known := row.cells[name].best_epoch)}
        if values:
            drawn[name] = figures.bars(title, values, paper=theirs, best_epoch=ours)
    return drawn


def _sweep(group: Group, name: str) -> PageFigure | None:
    """The figure over ε, if AMP was trained with at least three radii; without those that a schedule moves.

    Its runs differ in nothing else: of several kinds (another ζ, another ball, averaged weights), the one with the most
    radii is drawn.
    """
    kinds: dict[str, list[Row]] = {}
    for row in group.rows:
        own = _settings_of(row)
        if row.method == "amp" and not NOT_IN_PAPER.keys() & own.keys() and is_number(own.get("epsilon")):  # not "auto"
            rest = {**resolve_settings("amp", own), "epsilon": None, "ema": row.runs[0].result.get("ema")}
            kinds.setdefault(json.dumps(rest, sort_keys=True), []).append(row)
    amps = max(kinds.values(), key=len, default=[])
    radii = [_settings_of(row)["epsilon"] for row in amps]
    if len(radii) < 3:
        return None
    erm = group.row("erm")
    sources: dict[str, Callable[[Run], float | None]] = {
        "training": lambda run: run.result.get("clean_train_nll", run.result.get("train_loss")),
        group.split: lambda run: run.result.get(f"{group.split}_nll"),
    }
    losses: dict[str, dict[float, list[float]]] = {}
    level: dict[str, list[float]] = {}
    for split, value in sources.items():
        losses[split] = {}
        for row, radius in zip(amps, radii, strict=True):
            losses[split][float(radius)] = [v for run in row.runs if (v := value(run)) is not None]
        losses[split] = {radius: own for radius, own in losses[split].items() if own}
        level[split] = [v for run in (erm.runs if erm else []) if (v := value(run)) is not None]
    if not all(losses.values()):
        return None
    return page_figure(figures.epsilon_sweep(losses, level), f"{name}-epsilon")


def _settings_of(row: Row) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = row.runs[0].result["settings"]
    return settings


def _boundaries(rows: Sequence[Row], group: Group, name: str) -> PageFigure | None:
    """The decision boundary of each method's first run that has one, over the spiral's training points."""
    if group.setting["data"] != "spiral":
        return None
    panels = {}
    for row in rows:
        run = next((run for run in row.runs if run.boundary), None)
        if run is not None and run.boundary is not None:
            title = f"{row.name}: {100 * run.result[f'{run.split}_error']:.1f} % {run.split} error"
            side, shares = (torch.tensor(run.boundary[key]) for key in ("side", "shares"))
            panels[title] = decision_boundary.Panel(side, shares, spiral.training_points())
    return page_figure(decision_boundary.draw_boundaries(panels), f"{name}-boundaries") if panels else None


def _spectrum(rows: Sequence[Row], name: str) -> tuple[spectrum.SpectrumSection, PageFigure] | None:
    measured = [[run.evaluation["spectrum"] for run in row.runs if "spectrum" in run.evaluation] for row in rows]
    section = spectrum.spectrum_section(
        [(row.method, row.name, own) for row, own in zip(rows, measured, strict=True) if own]
    )
    return None if section is None else (section, page_figure(section.figure, f"{name}-spectrum"))


def _with_landscapes(row: Row) -> list[Mapping[str, Any]]:
    return [{**run.landscape, "training_seed": run.result["seed"]} for run in row.runs if run.landscape]
