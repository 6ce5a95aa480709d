"""Tables of results, from the result files that `flatmin reproduce` wrote.

    python benchmarks/results_table.py [--results results] [--page PAGE] [--check]

For docs/findings.md one for each data set with runs of the paper's length, with a row for each method and protocol; for
the README two small ones, with what AMP gains and costs, and with the best two of the cheaper modes; for
docs/frontier.md one for each data set with what all cheaper modes keep of that gain; for docs/automatic_radius.md one
with fixed radii beside the one that adjusts itself; and for docs/findings.md two about digits, with modes that take
equally long, and with methods tuned on wrong labels. The rest is on the report's page. It replaces what is between two
markers in the page; with --check nothing is written, and the exit code is 1 if a page is out of date.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import cost_table
import page_parts
import wrong_labels
from flatmin_lab.data.sources.synthetic import original_name
from flatmin_lab.methods import mean_passes
from flatmin_lab.recipes.defaults import SMALL_DATA
from flatmin_lab.recipes.experiments import EXPERIMENTS
from flatmin_lab.recipes.experiments.experiment import RESNET, SETS, cell
from flatmin_lab.recipes.paper_numbers import METHODS, reported
from flatmin_lab.recipes.protocols import PAPER_LENGTH
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.report.columns import Column, as_in_paper, at_best_epoch, column_named
from flatmin_lab.report.figures.style import NAMES
from flatmin_lab.report.html import as_printed, format_p, mean_and_std, short_fact, whole
from flatmin_lab.report.labels import TITLES
from flatmin_lab.report.loader import Run, load_results
from flatmin_lab.report.paper.deviations import TF32, of_the_data
from flatmin_lab.report.paper.evidence import ProtocolEvidence, evidence
from flatmin_lab.report.paper.frontier import Frontier, Kept, Mode
from flatmin_lab.report.paper.regret import Regret, mean_regrets
from flatmin_lab.report.paper.tables import Row, cell_of, read_all
from flatmin_lab.report.stats import holm, welch
from flatmin_lab.runs.result_store import ResultStore

RESULTS = Path(__file__).parent.parent / "results"
COLUMNS = ("error", "nll", "ece")
CHEAP = {  # modes, as the README calls them
    "ERM": "ERM",
    "ERM (75 epochs)": "ERM, a quarter more epochs",
    "AMP (ε 0.2, start 0.9, drops at 0.5 and 0.97)": "AMP in the last tenth",
    "AMP (ε auto, start 0.9, drops at 0.5 and 0.97)": "AMP in the last tenth, ε auto",
    "AMP (ε 0.2, start 0.75, drops at 0.5 and 0.9)": "AMP in the last quarter",
    "AMP (ε auto, start 0.75, drops at 0.5 and 0.9)": "AMP in the last quarter, ε auto",
    "AMP": "AMP in all steps",
    "AMP (ε auto)": "AMP in all steps, ε auto",
}


def rendered(results: Path) -> str:
    """A table for every data set that PreActResNet18 was trained on for as long as the paper's."""
    runs = read_all(ResultStore(results, results))
    parts, shown = [], []
    for data in SETS:
        recipes = [cell(protocol, data, RESNET, method) for method in METHODS for protocol in PAPER_LENGTH]
        rows = [(recipe, runs[recipe.name]) for recipe in recipes if recipe.name in runs]
        shown += [run for _, own in rows for run in own]
        parts += [_table(data, rows)] if rows else []
    if not parts:
        raise ValueError(f"there is no result in {results}; make some with flatmin reproduce")
    return "\n\n".join([*parts, _measured(shown)])


def gain(results: Path) -> str:
    """ERM and AMP on each data set, by the protocol with the most runs of both, and how long a step takes."""
    runs, columns = read_all(ResultStore(results, results)), [column_named(name) for name in COLUMNS]
    measured = json.loads(cost_table.JSON.read_text())
    rows, shown = [], []
    followed: dict[str, list[str]] = {}  # data sets by protocol
    for data in SETS:
        both = {
            protocol: [runs.get(cell(protocol, data, RESNET, method).name, []) for method in ("erm", "amp")]
            for protocol in PAPER_LENGTH
        }
        protocol, pairs = max(both.items(), key=lambda item: min(map(len, item[1])))  # of equal ones the first
        if not all(pairs):
            continue
        followed.setdefault(protocol, []).append(TITLES[data])
        times = ("1", cost_table.ratio(measured, "compiled"))
        for method, own, time in zip(("ERM", "AMP"), pairs, times, strict=True):
            last = [[value for run in own if (value := as_in_paper(run, one)) is not None] for one in columns]
            cells = [_shown(values, one) for values, one in zip(last, columns, strict=True)]
            rows.append([f"{TITLES[data]}, {method}", *cells, time, str(len(own))])
            shown += own
    if not rows:
        raise ValueError(f"there is no result in {results}; make some with flatmin reproduce")
    table = page_parts.markdown(["", *(column.label for column in columns), "time", "n"], rows)
    hardware = ", ".join(sorted({str(run.result["hardware"]) for run in shown}))
    of_data = [f"{' and '.join(sets)} under the protocol `{protocol}`" for protocol, sets in followed.items()]
    under = f"under the protocol `{next(iter(followed))}`" if len(followed) == 1 else ", ".join(of_data)
    return (
        f"{table}\n\n{TITLES[RESNET]}, 200 epochs, {hardware}, {_precision(shown)}; {under} ([what "
        "differs](docs/reproducing.md#the-protocols)). Test numbers at the last epoch: mean ± standard deviation over "
        "n seeds, or each value if n is below 3. Time is per step, relative to ERM, as a compiled CUDA graph (in plain "
        f"PyTorch: {cost_table.ratio(measured, 'eager')})."
    )


def frontier(results: Path) -> str:
    """For each protocol and data set with cheaper modes: what they cost, and what they keep of AMP's gain."""
    found = _frontiers(results)
    parts = [f"{TITLES[one.data]}, protocol `{protocol}`:\n\n{_modes(one)}" for protocol, one in found]
    runs = [run for _, one in found for run in one.runs]
    return "\n\n".join([*parts, f"{_all_of(runs, 'hardware')}, {_precision(runs)}, commit {_all_of(runs, 'commit')}."])


def cheap(results: Path) -> str:
    """At 60 epochs, the data sets beside each other: the best cheaper modes, beside ERM and AMP."""
    found = [one for protocol, one in _frontiers(results) if protocol == "short"]
    head = ["60 epochs", "time"]
    for one in found:
        first, *others = one.columns
        head += [f"{TITLES[one.data]}: {first}", *others]
    by_name = [{mode.row.name: mode for mode in one.modes} for one in found]
    rows, counts = [], Counter[int]()
    for name, called in CHEAP.items():
        modes = [known.get(name) for known in by_name]
        there = [mode for mode in modes if mode is not None]
        if there:
            counts.update(mode.row.count for mode in there)
            rows.append([called, _time(there[0]), *(text for mode in modes for text in _numbers(mode))])
    usual = counts.most_common(1)[0][0]
    return (
        f"{page_parts.markdown(head, rows)}\n\nMean ± standard deviation over {usual} seeds, or each value where there "
        "are fewer. Time is per step, relative to ERM."
    )


def _numbers(mode: Mode | None) -> list[str]:
    if mode is None:
        return [""] * len(COLUMNS)
    values = zip(mode.row.cells, COLUMNS, strict=True)
    return [_narrow(_shown(each.compared, column_named(name))) for each, name in values]


def _narrow(shown: str) -> str:
    """Mean and standard deviation, or values, below each other."""
    return shown.replace(" ± ", "<br>± ").replace(", ", "<br>")


def radii(results: Path) -> str:
    """For each data set and length: ERM, the automatic radius, what it loses of the best's gain, and fixed radii."""
    found = [one for protocol in _protocols(results) for one in protocol.regrets]
    found = [one for one in found if not one.auto.recipe.settings.get("start")]
    if not found:
        raise ValueError(f"there is no automatic radius beside fixed ones in {results}; see flatmin reproduce auto")
    sizes = sorted({_radius(row) for one in found for row in one.fixed})
    # what the page is about comes first: on a narrow screen the last columns are out of sight
    head = ["", "ERM", "auto", "regret, %", *(f"ε = {size:g}" for size in sizes)]
    rows = [_radius_row(one, number, sizes) for one in found for number in range(len(COLUMNS))]
    runs = [run for one in found for row in (one.erm, one.auto, *one.fixed) for run in row.runs]
    source = f"{_all_of(runs, 'hardware')}; commit {_all_of(runs, 'commit')}."
    return "\n\n".join([page_parts.markdown(head, rows), *_means(found), source])


def _means(found: Sequence[Regret]) -> list[str]:
    """The mean regret of each measure, over the problems in which there is a gain to lose."""
    return [
        "Mean regret, over the problems with a clear gain: "
        + "; ".join(
            f"{column.removesuffix(', %')} {_share(one.share, one.low, one.high)} % ({one.sets} problems)"
            for column, one in zip(mean.columns, mean.shares, strict=True)
            if one
        )
        + "."
        for mean in mean_regrets(found)
    ]


def lengths(results: Path) -> str:
    """Digits, by share of wrong labels: for each budget of passes the modes that use it up, tested against ERM."""
    runs, columns = read_all(ResultStore(results, results)), [column_named(name) for name in ("error", "nll")]
    known = [one for one in EXPERIMENTS["length"]("short").recipes if one.data == "digits" and one.name in runs]
    if not known:
        raise ValueError(f"there is no run of digits of several lengths in {results}; see flatmin reproduce length")
    parts = []
    for noise in sorted({recipe.label_noise for recipe in known}):
        budgets: dict[float, list[Recipe]] = {}
        for recipe in (one for one in known if one.label_noise == noise):
            budgets.setdefault(recipe.epochs * mean_passes(recipe.method, recipe.settings), []).append(recipe)
        cells = {
            recipe.name: [cell_of(recipe, runs[recipe.name], column).compared for column in columns]
            for own in budgets.values()
            for recipe in own
        }
        tests = [_against_erm(budgets, cells, number) for number in range(len(columns))]
        head = [f"digits, {whole(100 * noise)} % wrong labels" if noise else "digits", "epochs", "passes", "n"]
        head += ["CPU time, s", *(text for column in columns for text in (column.label, "p"))]
        rows = [
            [
                _mode_of_length(recipe),
                str(recipe.epochs),
                f"{budget:g}",
                str(len(runs[recipe.name])),
                _shown(_times(runs[recipe.name]), column_named("training_time")),
                *(
                    text
                    for number, column in enumerate(columns)
                    for text in (
                        _shown(cells[recipe.name][number], column),
                        format_p(tests[number][recipe.name]).removeprefix("=\u00a0")
                        if recipe.name in tests[number]
                        else "",
                    )
                ),
            ]
            for budget, own in sorted(budgets.items())
            for recipe in own
        ]
        parts.append(page_parts.markdown(head, rows))
    every = [run for recipe in known for run in runs[recipe.name]]
    source = (
        f"{_all_of(every, 'hardware')}, one core; torch {_all_of(every, 'torch')}; commit {_all_of(every, 'commit')}."
    )
    return "\n\n".join([*parts, source])


def wrong_labels_table(results: Path) -> str:
    """The methods with settings of their own on wrong labels: the runs are in benchmarks/results."""
    file = results.parent / "benchmarks/results" / wrong_labels.FILE.name
    if not file.exists():
        raise ValueError(f"there is no {file}; see benchmarks/wrong_labels.py")
    return wrong_labels.tested(wrong_labels.read(file))


def _against_erm(
    budgets: Mapping[float, Sequence[Recipe]], cells: Mapping[str, Sequence[Sequence[float]]], number: int
) -> dict[str, float]:
    """By name, Welch's p against ERM with as many passes, with Holm's correction over the table."""
    found = {}
    for own in budgets.values():
        erm = next(recipe for recipe in own if recipe.method == "erm")
        for recipe in (one for one in own if one is not erm):
            test = welch(cells[recipe.name][number], cells[erm.name][number])
            if test is not None:
                found[recipe.name] = test.p
    return holm(found)


def _mode_of_length(recipe: Recipe) -> str:
    if recipe.method == "erm":
        return "ERM"
    return "AMP in the last quarter, ε auto" if recipe.settings.get("start") else "AMP in all steps, ε auto"


def _times(runs: Sequence[Run]) -> list[float]:
    return [value for run in runs if (value := column_named("training_time").value(run)) is not None]


def _radius(row: Row) -> float:
    return float(row.recipe.settings["epsilon"])


def _radius_row(one: Regret, number: int, sizes: Sequence[float]) -> list[str]:
    by_size = {_radius(row): row for row in one.fixed}
    shown = [one.erm, one.auto, *(by_size.get(size) for size in sizes)]
    samples = [row.cells[number].compared if row else [] for row in shown]
    least = min(fmean(values) for values in samples if values)
    cells = [_sample(values, column_named(COLUMNS[number]), least) for values in samples]
    lost = one.lost[number]
    regret = _share(*lost[:3]).replace(" (", "<br>(").replace(" ", "\u00a0") if lost else ""
    return [f"{_problem(one.auto)}: {one.columns[number]}", *cells[:2], regret, *cells[2:]]


def _problem(row: Row) -> str:
    """The data, and of network, length and labels what the text around the table does not say."""
    place, usual = row.place, SMALL_DATA.get(row.data, {}).get("model", RESNET)
    network = f", {TITLES[place.model]}" if place.model != usual else ""
    length = f", {row.recipe.epochs} epochs" if row.data in SETS else ""
    wrong = f", {whole(100 * place.label_noise)} % wrong labels" if place.label_noise else ""
    return f"{TITLES[row.data]}{network}{length}{wrong}"


def _sample(values: Sequence[float], column: Column, least: float) -> str:
    """As `_narrow`, in bold if it is the lowest."""
    shown = _narrow(_shown(values, column))
    return f"**{shown}**" if values and fmean(values) == least else shown


@cache
def _protocols(results: Path) -> Sequence[ProtocolEvidence]:
    shown = evidence(load_results([results]), [])
    return shown.protocols if shown else ()


def _frontiers(results: Path) -> list[tuple[str, Frontier]]:
    """By protocol."""
    found = [(protocol.name, one) for protocol in _protocols(results) for one in protocol.frontiers]
    if not found:
        raise ValueError(f"there is no cheaper mode beside ERM and AMP in {results}; see flatmin reproduce frontier")
    return found


def _time(mode: Mode) -> str:
    return f"{mode.cost:.2f} passes" if mode.measured[0] is None else f"{mode.measured[0]:.2f}"


def _modes(found: Frontier) -> str:
    head = ["mode", "time", "n", *(f"{column}<br>and kept" for column in found.columns)]
    rows = []
    for mode in found.modes:
        row = [mode.row.name, _time(mode), str(mode.row.count)]
        for values, kept, name in zip(mode.row.cells, mode.kept, COLUMNS, strict=True):
            row.append(f"{_shown(values.compared, column_named(name))}<br>{_kept(kept)}")
        rows.append(row)
    return page_parts.markdown(head, rows)


def _kept(kept: Kept | None) -> str:
    return "" if kept is None else _share(*kept, unit=" %").replace(" ", "\u00a0")


def _share(share: float, low: float | None, high: float | None, *, unit: str = "") -> str:
    """In per cent, with its interval if it has one."""
    shown = f"{whole(100 * share)}{unit}"
    return shown if low is None or high is None else f"{shown} ({whole(100 * low)} to {whole(100 * high)})"


def _table(data: str, rows: Sequence[tuple[Recipe, Sequence[Run]]]) -> str:
    columns = [column_named(name) for name in COLUMNS]
    head = [f"{TITLES[data]}, {TITLES[RESNET]}, 200 epochs", "protocol", "n"]
    head += [label for column in columns for label in (column.label, "best epoch", "paper")]
    return page_parts.markdown(head, [_row(recipe, own, columns) for recipe, own in rows])


def _row(recipe: Recipe, runs: Sequence[Run], columns: Sequence[Column]) -> list[str]:
    theirs = reported(original_name(recipe.data), recipe.model, recipe.method)
    found = [NAMES[recipe.method], f"`{recipe.protocol.name}`", str(len(runs))]
    for column in columns:
        best = [value for run in runs if (value := at_best_epoch(run, column)) is not None]
        last = [value for run in runs if (value := as_in_paper(run, column)) is not None]
        paper = theirs.get(column.paper)
        found += [_shown(last, column), _shown(best, column), as_printed(paper, column.digits) if paper else ""]
    return found


def _shown(values: Sequence[float], column: Column) -> str:
    return mean_and_std(values, column.digits) if values else ""


def _precision(runs: Sequence[Run]) -> str:
    """That of most runs; other rows name their own."""
    (usual, _), *others = Counter(run.result["precision"] for run in runs).most_common()
    return f"{usual} unless a row says otherwise" if others else str(usual)


def _all_of(runs: Sequence[Run], key: str) -> str:
    return ", ".join(sorted({short_fact(key, str(run.result[key])) for run in runs if run.result.get(key)}))


def _measured(runs: Sequence[Run]) -> str:
    notes = f" {TF32}" if any(run.result["precision"] == "fp32" for run in runs) else ""
    if any(run.method == "label_smoothing" for run in runs):
        notes += " The NLL of label smoothing is the smoothed loss, as the paper's seems to be."
    return (
        f"Test numbers: mean ± standard deviation over n seeds, or each value if n is below 3, at the last epoch and "
        f"at the one with the lowest test error. The paper's are from the latter (10 runs; ECE: the authors' slides). "
        f"`paper` is the recipe of the published code's first version, `paper-v2` that of the second and of the "
        f"paper's text ([what differs](reproducing.md#the-protocols)). {_all_of(runs, 'hardware')}, torch "
        f"{_all_of(runs, 'torch')}, {_precision(runs)}, commit {_all_of(runs, 'commit')}.{notes} "
        f"{' '.join(of_the_data(runs))}"
    )


MAKERS = {
    "results table": rendered,
    "gain table": gain,
    "frontier table": frontier,
    "cheap table": cheap,
    "regret table": radii,
    "length table": lengths,
    "wrong labels table": wrong_labels_table,
}

if __name__ == "__main__":
    page_parts.command(__doc__, "results", RESULTS, MAKERS)
