"""The README's tables of what a step costs, from a file that `flatmin bench` wrote.

    python benchmarks/cost_table.py [--json benchmarks/results/engine-h200.json] [--readme README.md] [--check]

What stands between the two markers in the README is written anew; with --check nothing is written, and the exit code
is 1 where it is out of date.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JSON, README = ROOT / "benchmarks/results/engine-h200.json", ROOT / "README.md"
BEGIN, END = "<!-- cost table -->", "<!-- end of cost table -->"
MODEL, BATCH = "preactresnet18", 50  # the paper's
NAMES = {"preactresnet18": "PreActResNet18", "vgg16": "VGG16", "wideresnet28_10": "WideResNet28-10"}
FORMS = {"eager": "plain PyTorch", "graph": "one CUDA graph", "compiled": "one CUDA graph, compiled"}

Found = Mapping[str, Any]


def rendered(result: Found) -> str:
    """Both tables, and what they were measured with."""
    tables: Sequence[Found] = [table for table in result["tables"] if any("ms" in row for row in table["rows"])]
    if not tables:
        raise ValueError("nothing was timed")
    main = next((t for t in tables if (t["model"], t["batch_size"]) == (MODEL, BATCH)), tables[0])
    parts = [_forms(main), _sam(main), _everywhere(tables), _measured(result)]
    return "\n\n".join(part for part in parts if part)


def _forms(table: Found) -> str:
    """A row for every form: ERM, AMP, their ratio, and AMP's memory beyond ERM's."""
    head = [f"{_name(table)}, batches of {table['batch_size']}", "ERM, ms", "AMP, ms", "ratio", "memory beyond ERM"]
    kinds = dict.fromkeys((row["form"], row["models"]) for row in table["rows"] if row["method"] != "sam")
    rows = []
    for form, count in kinds:
        erm, amp = (_row(table, method, form, count) for method in ("erm", "amp"))
        label = f"{count} models at once" if count > 1 else FORMS[form]
        rows.append([label, _ms(erm), _ms(amp), _ratio(amp, erm), _copies(amp)])
    floors = [table["floor"].get(method) for method in ("erm", "amp")]
    rows.append(["the floor", *(f"{floor['floor_ms']:.2f}" if floor else "" for floor in floors), "", ""])
    return _markdown(head, rows)


def _sam(table: Found) -> str:
    sam, amp = _row(table, "sam", "eager", 1), _row(table, "amp", "compiled", 1)
    if sam is None or "ms" not in sam:
        return ""
    beside = f", {_ratio(sam, amp)} times AMP's compiled one" if _ratio(sam, amp) else ""
    return f"A step of pytorch_optimizer's SAM, plain PyTorch too, takes {_ms(sam)} ms{beside}."


def _everywhere(tables: Sequence[Found]) -> str:
    """AMP's compiled step for all models and batch sizes."""
    rows = []
    for table in tables:
        erm, amp = (_row(table, method, "compiled", 1) for method in ("erm", "amp"))
        if amp is not None and "ms" in amp:
            floor, plain = table["floor"]["amp"]["floor_ms"], _row(table, "erm", "eager", 1)
            times = [_ms(amp), _ratio(amp, erm), f"{floor:.2f}", _ms(plain), _ratio(amp, plain)]
            rows.append([_name(table), str(table["batch_size"]), *times])
    head = [
        "AMP, one CUDA graph, compiled",
        "batch",
        "ms",
        "over ERM",
        "floor, ms",
        "ERM, plain PyTorch, ms",
        "over it",
    ]
    return _markdown(head, rows) if rows else ""


def _measured(result: Found) -> str:
    rows = [row for table in result["tables"] for row in table["rows"] if "ms" in row]
    counts = sorted({row["n"] for row in rows})
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    spreads = {True: 0.0, False: 0.0}
    for row in rows:
        low, high = row["ms_quartiles"]
        spreads[row["form"] == "eager"] = max(spreads[row["form"] == "eager"], 100 * (high - low) / row["ms"])
    commit = f", commit {result['commit']}" if result["commit"] else ""
    return (
        f"{result['hardware']}, torch {result['torch']}{commit}; {result['precision']}, channels-last, data and "
        f"augmentation in the step; medians of n = {n} steps in turns, quartiles at most {spreads[False]:.1f} % apart, "
        f"those of plain PyTorch {spreads[True]:.0f} %. "
        f"The floor: arithmetic at {result['flops_per_s'] / 1e12:.0f} TFLOP/s and the weights' bytes at "
        f"{result['bytes_per_s'] / 1e12:.2f} TB/s, both measured; memory in float32 copies of the parameters."
    )


# ---- cells


def _row(table: Found, method: str, form: str, count: int) -> Found | None:
    wanted = (method, form, count)
    return next((row for row in table["rows"] if (row["method"], row["form"], row["models"]) == wanted), None)


def _name(table: Found) -> str:
    model = str(table["model"])
    return NAMES.get(model, model)


def _ms(row: Found | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']:.2f}" if "ms" in row else "failed"


def _ratio(one: Found | None, other: Found | None) -> str:
    return f"{one['ms'] / other['ms']:.2f}" if one and other and "ms" in one and "ms" in other else ""


def _copies(row: Found | None) -> str:
    value = None if row is None else row.get("over_erm_copies")
    return "" if value is None else f"{round(value, 2) + 0.0:.2f} copies"  # + 0.0: no minus before a zero


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# ---- the README


def read(path: Path) -> str:
    """The tables of a file that `flatmin bench` wrote."""
    try:
        return rendered(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # not there, no JSON, another's
        what = f"no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path} is not a file of flatmin bench ({what}); write one with flatmin bench --json"
        ) from error


def put_into(text: str, tables: str) -> str:
    """The text with the tables between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the page must have {BEGIN} and after it {END}, once each; add the two lines")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=JSON)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    try:
        tables = read(given.json)
        before = given.readme.read_text()
        after = put_into(before, tables)
    except (ValueError, OSError) as error:
        parser.error(f"{error}")
    if given.check:
        if before != after:
            sys.exit(f"{given.readme} is out of date; run python benchmarks/cost_table.py")
    elif before != after:
        given.readme.write_text(after)


if __name__ == "__main__":
    main()
