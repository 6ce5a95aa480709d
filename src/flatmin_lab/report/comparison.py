"""Groups of comparable runs: runs that differ only in method and seed share a table, a row per method.

Every method's mean is compared with ERM's (that of averaged weights with ERM's average, if there is one) by Welch's
test, column by column, with Holm's correction over the methods of the column; for runs of the paper's tables as in
their family (paper/families.py). One of the two is called better only if the difference is significant.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from flatmin_lab.methods import METHODS
from flatmin_lab.models import is_built_in
from flatmin_lab.recipes.paper_numbers import Value
from flatmin_lab.recipes.paper_numbers import reported as reported_by_paper
from flatmin_lab.recipes.protocols import PAPER_LENGTH
from flatmin_lab.recipes.recipe import LATER_FIELDS
from flatmin_lab.recipes.user_files import FIELDS
from flatmin_lab.report import suggested_commands
from flatmin_lab.report.columns import BEST_EPOCH_MEASURES, COLUMNS, Column, at_best_epoch, is_smoothed
from flatmin_lab.report.figures.style import NAMES
from flatmin_lab.report.html import percent
from flatmin_lab.report.labels import SIGNS, TITLES
from flatmin_lab.report.loader import Run
from flatmin_lab.report.paper.families import Families, is_pair_planned, p_of_pair, split_name
from flatmin_lab.report.schema import is_number
from flatmin_lab.report.stats import LEVEL, p_values_of

SETTING_KEYS = (
    "data", "model", "model_settings", "size", "augment", "label_noise", "validation", "epochs", "batch_size", "lr",
    "momentum", "nesterov", "weight_decay", "schedule", "milestones", "gamma", "warmup", "clip_norm", "precision",
    "normalise",
    "data_sha256",
)  # fmt: skip
DROPOUT_AT = "dropout_at"  # a built-in network's setting that says nothing where there is no dropout
NOT_IN_TITLE = (
    "validation",
    "data_sha256",
    "files",
)  # the split stands for the first; the others tell apart what nothing else does


@dataclass(frozen=True)
class Cell:
    """The values of a row's runs in a column, and how they compare with ERM's."""

    values: list[float]
    missing: list[str]  # commands that would measure them
    measured_differently: bool = False  # some were measured, but under other conditions
    p: float | None = None  # against ERM, corrected
    better: bool | None = None  # than ERM; None if not significant
    paper: Value | None = None
    best_epoch: list[float] = field(default_factory=list)  # ours, which the paper's is comparable with
    planned: bool = True  # whether it was to be tested
    of_last_weights: bool = False  # in a row of averaged weights


@dataclass(frozen=True)
class Row:
    method: str
    name: str
    runs: list[Run]
    cells: dict[str, Cell] = field(default_factory=dict)
    base: int = 0  # the place of ERM's row, which it is compared with

    @property
    def is_averaged(self) -> bool:
        """Whether its error, NLL and ECE are those of averaged weights."""
        return bool(_average(self.runs[0]))


@dataclass(frozen=True)
class Group:
    """Runs of one setting."""

    setting: Mapping[str, Any]
    rows: list[Row]
    duplicate_runs: list[Run]
    unmeasured: list[str]  # commands that measure what its runs lack
    untrained: list[str]  # commands that train the paper's methods it lacks

    @property
    def title(self) -> str:
        data, model = self.setting["data"], self.setting["model"]
        network, where = TITLES.get(model), TITLES.get(data, data.rstrip("/").rpartition("/")[2])
        if network is None:
            return f"{model.rpartition('/')[2]} on {where}"  # a name, perhaps of a file, as it is spelled
        return f"{network[0].upper()}{network[1:]} on {where}"

    @property
    def method_settings(self) -> list[str]:
        """The settings of each method, except those in which its rows differ: the rows name these."""
        return settings_of([(row.method, run.result["settings"]) for row in self.rows for run in row.runs])

    @property
    def protocol(self) -> str:
        """The protocol, without what the rows name; empty if every run has its own settings."""
        said = {str(replace(run.protocol, settings=())) for row in self.rows for run in row.runs}
        return "" if said == {"own"} else "; ".join(sorted(said))

    @property
    def split(self) -> str:
        return self.rows[0].runs[0].split

    @property
    def beside_paper(self) -> bool:
        """Whether the paper has a number for any cell."""
        return any(cell.paper for row in self.rows for cell in row.cells.values())

    @property
    def is_tested(self) -> bool:
        """Whether any cell has a p-value."""
        return any(cell.p is not None for row in self.rows for cell in row.cells.values())

    @property
    def family_name(self) -> str:
        return split_name(_recipe_of(self.rows[0]))[0]

    def rows_with(self, columns: Sequence[Column]) -> list[Row]:
        """The rows with a value in any of the columns, or a command that would measure one."""
        return [row for row in self.rows if any(_is_known(row.cells[column.name], column) for column in columns)]

    def row(self, method: str) -> Row | None:
        return next((row for row in self.rows if row.method == method), None)


def _is_known(cell: Cell, column: Column) -> bool:
    return bool(cell.values or cell.missing) or not column.command


def groups_of(runs: Sequence[Run], families: Families | None = None) -> list[Group]:
    """Groups in the order of their first runs; methods in the paper's order, ERM first and AMP second."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        setting: dict[str, Any] = {"split": run.split, **{key: run.result.get(key) for key in SETTING_KEYS}}
        setting |= {key: run.result[key] for key in LATER_FIELDS if key in run.result}
        setting |= {key: _file_name(setting[key]) for key in _checksums_of_files(setting) if key in setting}
        if _dropout_place(run):  # only the method dropout has any, so it is a setting of its row
            setting["model_settings"] = {k: v for k, v in setting["model_settings"].items() if k != DROPOUT_AT}
        settings.setdefault(json.dumps(setting, sort_keys=True), []).append(run)
    known = families or {}
    return [_group(json.loads(key), own, known) for key, own in settings.items()]


def _dropout_place(run: Run) -> dict[str, Any]:
    """Where a built-in network has its dropout; empty if that is not set."""
    own = run.result.get("model_settings")
    if not isinstance(own, dict) or DROPOUT_AT not in own or not is_built_in(run.result["model"]):
        return {}
    return {DROPOUT_AT: own[DROPOUT_AT]}


def _row_order(kind: tuple[str, str], order: Sequence[str]) -> tuple[int, bool, str]:
    """Where a row goes: averaged weights after those that they are of."""
    method, settings = kind
    return order.index(method), "EMA" in json.loads(settings), settings


def _average(run: Run) -> dict[str, Any]:
    """The decay of the averaged weights, whose numbers its row has; empty if there are none."""
    return {"EMA": run.result["ema"]} if run.result.get("ema") else {}


def titles_of(groups: Sequence[Group]) -> list[str]:
    """Titles, which name wrong labels; groups of the same data and network are told apart by how they differ."""
    found = []
    for group in groups:
        others = [other.setting for other in groups if other.title == group.title]
        keys = ("epochs", "split", *SETTING_KEYS, *LATER_FIELDS)
        apart = {key for key in keys if any(o.get(key) != group.setting.get(key) for o in others)} | {"label_noise"}
        named = [key for key in dict.fromkeys(keys) if key in apart and key not in NOT_IN_TITLE]
        shown = [_apart(key, group.setting.get(key)) for key in named]
        found.append(", ".join([group.title, *filter(None, shown)]))
    return [
        ", ".join(
            [title, *_contents(group, [other for other, same in zip(groups, found, strict=True) if same == title])]
        )
        for group, title in zip(groups, found, strict=True)
    ]


def _contents(group: Group, alike: Sequence[Group]) -> list[str]:
    """What tells groups of one title apart: the content of the data, or of a file of the user's, has changed."""
    kept = [_checksums(other.setting) for other in alike]
    return [
        f"{what} with SHA-256 {checksum[:7]}…"
        for what, checksum in _checksums(group.setting).items()
        if any(other.get(what) != checksum for other in kept)
    ]


def _checksums(setting: Mapping[str, Any]) -> dict[str, str]:
    files = {f"file of the {field}": value for field, value in _checksums_of_files(setting).items()}
    return {what: value for what, value in {"data": setting.get("data_sha256"), **files}.items() if value is not None}


def _checksums_of_files(setting: Mapping[str, Any]) -> dict[str, str]:
    """Those of the user's own files, by the field that names one."""
    files = known if isinstance(known := setting.get("files"), dict) else {}
    return {field: value for field, value in files.items() if field in FIELDS and isinstance(value, str)}


def _file_name(value: Any) -> Any:
    """Without its folder: a file may have moved, or lie elsewhere on another machine, and its content tells."""
    return value.rpartition("/")[2] if isinstance(value, str) else value


def _apart(key: str, value: Any) -> str:
    if value is None or value == {}:
        return ""
    if key == "epochs":
        return f"{value} epochs"
    if key == "exempt_norms":
        return "norms exempt from decay"
    if key == "split":
        return "on a held-out tenth" if value == "validation" else ""
    if key == "label_noise":
        return f"{percent(value)} of the labels wrong" if value else ""
    if key in FIELDS:
        value = str(value).rpartition("/")[2]
    return TITLES[value] if isinstance(value, str) and value in TITLES else f"{key.replace('_', ' ')} {_setting(value)}"


def _group(setting: dict[str, Any], runs: Sequence[Run], families: Families) -> Group:
    runs, usual = suggested_commands.mark_differing(runs)
    kinds: dict[tuple[str, str], dict[int, Run]] = {}
    duplicates = []
    for run in runs:
        own = {**run.result["settings"], **(_dropout_place(run) if run.method == "dropout" else {}), **_average(run)}
        kind = kinds.setdefault((run.method, json.dumps(own, sort_keys=True)), {})
        if run.result["seed"] in kind:
            duplicates.append(run)  # the same run again is no further evidence
        kind.setdefault(run.result["seed"], run.averaged())
    order = ["erm", "amp", *METHODS]
    rows = []
    for (method, settings), seeded in sorted(kinds.items(), key=lambda item: _row_order(item[0], order)):
        others = [json.loads(other) for name, other in kinds if name == method]
        in_order = [seeded[seed] for seed in sorted(seeded)]
        rows.append(Row(method, _name(method, json.loads(settings), others), in_order))
    seeds = sorted({run.result["seed"] for row in rows for run in row.runs})
    in_folders = runs[0].path.is_dir()  # result files come from `flatmin reproduce`, which knows what is missing
    trained = {row.method for row in rows}
    decays = {run.result.get("ema") for run in runs}
    like_these = {**setting, "ema": decays.pop()} if len(decays) == 1 else setting  # else averages face plain weights
    untrained = suggested_commands.train_commands(like_these, trained, seeds, runs[0].path.parent) if in_folders else []
    unmeasured = [command for row in rows for run in row.runs for command in _lacking(run, usual)]
    return Group(setting, _with_cells(rows, setting, usual, families), duplicates, unmeasured, untrained)


def _recipe_of(row: Row) -> str:
    return str(row.runs[0].result.get("recipe") or "")


def _base(rows: Sequence[Row], place: int) -> int:
    """The place of ERM's row to compare with: averaged weights face ERM's average, if there is one; else the first."""
    decay = _average(rows[place].runs[0])
    alike = (n for n, row in enumerate(rows) if row.method == "erm" and _average(row.runs[0]) == decay)
    return next((n for n in alike if n != place), 0)


def _p_values(rows: list[Row], values: list[list[float]], measure: str, families: Families) -> dict[int, float]:
    """The p-values of all other rows against ERM's; in a family, of the planned comparisons."""
    base = _recipe_of(rows[0])
    if split_name(base)[0] not in families:
        return p_values_of({n: (values[n], values[row.base]) for n, row in enumerate(rows) if n})
    found = {
        place: p_of_pair(families, measure, (_recipe_of(row), base), values[place], values[0])
        for place, row in enumerate(rows)
        if place
    }
    return {place: p for place, p in found.items() if p is not None}


def _lacking(run: Run, usual: Mapping[str, suggested_commands.Condition]) -> list[str]:
    wanted = (column for column in COLUMNS if column.command and not column.optional)
    parts = dict.fromkeys(column.part for column in wanted if column.value(run) is None)
    return suggested_commands.evaluate_commands(run, list(parts), usual) if parts else []


def _name(method: str, settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The method's name, with the settings in which it differs from other rows of the method."""
    apart = [key for key in settings if key == "EMA" or any(other.get(key) != settings[key] for other in others)]
    return _name_with_settings(method, settings, apart) if apart else NAMES[method]


def settings_of(trained: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """For each method the settings that all its runs share, as in "AMP (ε 0.5, ζ 1, N 1)"."""
    found = []
    for method in dict.fromkeys(name for name, _ in trained):
        own = [settings for name, settings in trained if name == method]
        common = [key for key in own[0] if all(other.get(key) == own[0][key] for other in own)]
        if common:
            found.append(_name_with_settings(method, own[0], common))
    return found


def _name_with_settings(method: str, settings: Mapping[str, Any], keys: Sequence[str]) -> str:
    return f"{NAMES[method]} ({', '.join(f'{SIGNS.get(key, key)} {_setting(settings[key])}' for key in keys)})"


def _setting(value: object) -> str:
    if isinstance(value, list):
        return " and ".join(map(_setting, value))
    return f"{value:g}" if is_number(value) and not isinstance(value, int) else str(value)


def _with_cells(
    rows: list[Row],
    setting: Mapping[str, Any],
    usual: Mapping[str, suggested_commands.Condition],
    families: Families,
) -> list[Row]:
    if split_name(_recipe_of(rows[0]))[0] not in families:  # a family has planned what is compared with what
        rows = [replace(row, base=_base(rows, place)) for place, row in enumerate(rows)]
    cells: dict[int, dict[str, Cell]] = {place: {} for place in range(len(rows))}
    for column in COLUMNS:
        values = [[v for run in row.runs if (v := column.value(run)) is not None] for row in rows]
        compared = column.compared and rows[0].method == "erm"
        adjusted = _p_values(rows, values, column.name, families) if compared else {}
        for place, row in enumerate(rows):
            p = adjusted.get(place)
            better = mean(values[place]) < mean(values[row.base]) if p is not None and p < LEVEL else None
            lacking = [run for run in row.runs if column.value(run) is None and column.command and not column.optional]
            missing = [
                command
                for run in lacking
                if (command := suggested_commands.evaluate_command(run, [column.part], usual))
            ]
            measured_differently = any(
                suggested_commands.MEASURED_DIFFERENTLY in run.evaluation.get(column.part, {}) for run in lacking
            )
            paper, best_epoch = _beside_paper(setting, row, column)
            planned = is_pair_planned(families, column.name, (_recipe_of(row), _recipe_of(rows[0])))
            of_last = row.is_averaged and column.is_of_last_weights
            cells[place][column.name] = Cell(
                values[place], missing, measured_differently, p, better, paper, best_epoch, planned, of_last
            )
    return [replace(row, cells=cells[place]) for place, row in enumerate(rows)]


def _beside_paper(setting: Mapping[str, Any], row: Row, column: Column) -> tuple[Value | None, list[float]]:
    """The paper's value, and ours at the best test epoch, which the paper reports; no value of its where ours has none.

    At which epoch the paper measured attacks is not known: their values have none of ours beside them. The paper has
    no averaged weights.
    """
    paper = None if is_smoothed(column, row.method) else _paper_values(setting, row).get(column.paper)
    if paper is None or column.name not in BEST_EPOCH_MEASURES:
        return paper, []
    known = [] if row.is_averaged else [v for run in row.runs if (v := at_best_epoch(run, column)) is not None]
    return (paper, known) if known else (None, [])


def _paper_values(setting: Mapping[str, Any], row: Row) -> Mapping[str, Value]:
    """The paper's values; none for a validation split, noisy labels, another length, or another protocol."""
    apart = any(run.protocol.exceptions or run.protocol.name not in PAPER_LENGTH for run in row.runs)
    if setting["split"] != "test" or setting["label_noise"] or apart:
        return {}
    return reported_by_paper(setting["data"], setting["model"], row.method, setting["augment"] or "none")
