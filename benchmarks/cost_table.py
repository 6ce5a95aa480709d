"""The tables in docs/speed.md of what a step costs, from a file that `flatmin bench` wrote.

    python benchmarks/cost_table.py [--json benchmarks/results/engine-h200.json] [--page docs/speed.md] [--check]

It replaces what is between the two markers in the page; with --check nothing is written, and the exit code is 1 if the
page is out of date.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import page_parts

JSON = Path(__file__).parent / "results/engine-h200.json"
PART = "cost table"
MODEL, BATCH = "preactresnet18", 50  # the paper's
NAMES = {"preactresnet18": "PreActResNet18", "vgg16": "VGG16", "wideresnet28_10": "WideResNet28-10"}
FORMS = {"eager": "plain PyTorch", "graph": "one CUDA graph", "compiled": "one CUDA graph, compiled"}

Found = Mapping[str, Any]


def rendered(result: Found) -> str:
    """Both tables, and the conditions of the measurement."""
    tables: Sequence[Found] = [table for table in result["tables"] if any("ms" in row for row in table["rows"])]
    if not tables:
        raise ValueError("nothing was timed")
    main = next((t for t in tables if (t["model"], t["batch_size"]) == (MODEL, BATCH)), tables[0])
    parts = [_forms(main), _sam(main), _everywhere(tables), _measured(result)]
    return "\n\n".join(part for part in parts if part)


def ratio(result: Found, form: str) -> str:
    """AMP's step over ERM's for the paper's network and batch size, both in that form."""
    main = next(t for t in result["tables"] if (t["model"], t["batch_size"]) == (MODEL, BATCH))
    return _ratio(*(_row(main, method, form, 1) for method in ("amp", "erm")))


def _forms(table: Found) -> str:
    """A row for every form: ERM, AMP, their ratio, and peak memory."""
    head = [
        f"{_name(table)}, batches of {table['batch_size']}",
        *["ERM, ms", "AMP, ms", "ratio", "ERM, MiB", "AMP, MiB"],
    ]
    kinds = dict.fromkeys((row["form"], row["models"]) for row in table["rows"] if row["method"] != "sam")
    rows = []
    for form, count in kinds:
        erm, amp = (_row(table, method, form, count) for method in ("erm", "amp"))
        label = f"{count} models at once, each" if count > 1 else FORMS[form]
        rows.append([label, _ms(erm), _ms(amp), _ratio(amp, erm), _mib(erm), _mib(amp)])
    floors = [table["floor"].get(method) for method in ("erm", "amp")]
    rows.append(["the floor", *(f"{floor['floor_ms']:.2f}" if floor else "" for floor in floors), "", "", ""])
    return page_parts.markdown(head, rows)


def _sam(table: Found) -> str:
    sam, amp, plain = (_row(table, *who, 1) for who in (("sam", "eager"), ("amp", "compiled"), ("amp", "eager")))
    if sam is None or "ms" not in sam:
        return ""
    beside = f", and AMP's {_ms(plain)}" if _ratio(sam, plain) else ""
    ratio = f"; AMP's compiled step is {_ratio(sam, amp)} times as fast as SAM's" if _ratio(sam, amp) else ""
    return f"A step of pytorch_optimizer's SAM takes {_ms(sam)} ms in plain PyTorch{beside}{ratio}."


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
        "ratio to ERM",
        "floor, ms",
        "ERM, plain PyTorch, ms",
        "ratio to that",
    ]
    return page_parts.markdown(head, rows) if rows else ""


def _measured(result: Found) -> str:
    rows = [row for table in result["tables"] for row in table["rows"] if "ms" in row]
    blocks = sorted({row["blocks"] for row in rows})
    lengths = sorted({row["n"] // row["blocks"] for row in rows})
    # a table may have been measured anew, later than the rest
    runs = [result, *(table["measured"] for table in result["tables"] if "measured" in table)]
    later = [f"{_name(t)} at {t['batch_size']}: {t['measured']['commit']}" for t in result["tables"] if "measured" in t]
    commit = f", commit {result['commit']}" if result["commit"] else ""
    commit += f" ({', '.join(later)})" if later else ""
    flops = " and ".join(dict.fromkeys(f"{run['flops_per_s'] / 1e12:.3g}" for run in runs))
    bandwidth = " and ".join(dict.fromkeys(f"{run['bytes_per_s'] / 1e12:.3g}" for run in runs))
    return (
        f"{result['hardware']}, torch {result['torch']}{commit}; {result['precision']}, channels-last, data and "
        f"augmentation in the step; medians over {_range(blocks)} blocks of {_range(lengths)} steps each, in turn, "
        f"{_spread(rows)}. Plain PyTorch mostly waits for Python here, so its times depend on the CPU. The floor "
        f"is the arithmetic at {flops} TFLOP/s plus the bytes of the weights at {bandwidth} TB/s, both measured. "
        "Memory is the peak during a model's steps."
    )


def _spread(rows: Sequence[Found]) -> str:
    """How far the quartiles are apart at most: of graphs, which vary little, and of plain PyTorch."""
    apart: dict[bool, list[float]] = {False: [], True: []}
    for row in rows:
        low, high = row["ms_quartiles"]
        apart[row["form"] == "eager"].append(100 * (high - low) / row["ms"])
    graphs, plain = (f"{max(found):.1f} %" if found else "" for found in apart.values())
    if not graphs or not plain:
        return f"quartiles at most {graphs or plain} apart"
    return f"quartiles at most {graphs} apart, those of plain PyTorch {plain}"


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


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


def _mib(row: Found | None) -> str:
    """Of one model."""
    peak = None if row is None else row.get("peak_mib")
    return "" if row is None or peak is None else f"{peak / row['models']:.0f}"


def read(path: Path) -> str:
    """The tables of a file that `flatmin bench` wrote."""
    try:
        return rendered(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # not there, no JSON, another's
        what = f"no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path} is not a file of flatmin bench ({what}); write one with flatmin bench --json"
        ) from error


if __name__ == "__main__":
    page_parts.command(__doc__, "json", JSON, {PART: read})
