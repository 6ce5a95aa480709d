"""The tables of `flatmin bench`: a row for every method in every form."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from flatmin_lab.bench.rows import is_above_noise
from flatmin_lab.cli.display import say

METHODS = {
    "erm": "ERM",
    "amp": "AMP",
    "sam": "SAM",
    "amp-idle": "AMP, idle",
    "amp-quarter": "AMP, quarter",
    "amp-half": "AMP, half size",
}
FORMS = {"eager": "eager", "graph": "CUDA graph", "compiled": "compiled"}
COLUMNS = ("ms", "quartiles", "steps", "floors", "ready", "MiB", "beyond ERM")


def table(result: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Print the table of one model and batch size."""
    console = Console(highlight=False, soft_wrap=True)
    say(console, f"{found['model']}, batches of {found['batch_size']}, {result['precision']}: per step and model")
    shown = Table("", *COLUMNS, box=None, pad_edge=False)
    shown.columns[0].no_wrap = True
    for row in found["rows"]:
        shown.add_row(label(row), *_cells(row, found["floor"].get(row["method"])))
    console.print(shown)
    for line in _lines(found):
        say(console, line)
    console.print()


def label(row: Mapping[str, Any]) -> str:
    """The method and the form, in words.

    >>> label({"method": "amp", "form": "at-once", "models": 4})
    'AMP, 4 models at once'
    """
    form = f"{row['models']} models at once" if row["models"] > 1 else FORMS[row["form"]]
    return f"{METHODS[row['method']]}, {form}"


def footer(result: Mapping[str, Any], path: object) -> None:
    console = Console(highlight=False, soft_wrap=True)
    rate = f"{result['flops_per_s'] / 1e12:.3g} TFLOP/s in {result['flops_in']}"
    say(console, f"the floor: {rate} and {result['bytes_per_s'] / 1e9:.4g} GB/s, both measured in this run")
    versions = f"torch {result['torch']}, CUDA {result['cuda']}, cuDNN {result['cudnn']}, Triton {result['triton']}"
    say(console, f"{result['hardware']}, {result['threads']} threads, {versions}, commit {result['commit']}")
    say(console, f"everything is in {path}")


def _cells(row: Mapping[str, Any], floor: Mapping[str, float] | None) -> tuple[str, ...]:
    if "ms" not in row:
        return (f"failed: {row.get('failed', 'not timed')}",)
    low, high = row["ms_quartiles"]
    over = "" if floor is None else f"{row['ms'] / floor['floor_ms']:.1f} ×"
    peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    beyond = "" if row["over_erm_copies"] is None else f"{row['over_erm_copies']:+.2f} copies"
    quartiles = f"{_ms(low)}–{_ms(high)}"
    return (_ms(row["ms"]), quartiles, str(row["n"]), over, f"{row['ready_s']:.1f} s", peak, beyond)


def _lines(found: Mapping[str, Any]) -> list[str]:
    floors = [
        f"{METHODS[method]} {_ms(floor['arithmetic_ms'])} + {_ms(floor['bytes_ms'])} = {_ms(floor['floor_ms'])} ms"
        for method, floor in found["floor"].items()
    ]
    data = [f"{FORMS[part['form']]} {_data(part)}" for part in found["data"]]
    ratios = [f"{name} {value:.2f}" for name, value in found["ratios"].items()]
    parts = {
        "floor, arithmetic + the weights' bytes": floors,
        "data": data,
        "ratios": ratios,
        "left out": [f"{', '.join(names)} ({why})" for why, names in found["left_out"].items()],
    }
    return [f"{name}: {'; '.join(lines)}" for name, lines in parts.items() if lines]


def _data(part: Mapping[str, Any]) -> str:
    """The data's share of a step: the time with data minus the time without, if that is more than the noise.

    >>> _data({"ms": -0.31, "ms_quartiles": [-1.25, 0.42], "share": -0.02})
    'less than the noise (at most 0.42 ms in three quarters of the blocks, none in a quarter)'
    """
    if "failed" in part:
        return f"failed: {part['failed']}"
    if not is_above_noise(part):
        high = max(part["ms_quartiles"][1], 0.0)
        return f"less than the noise (at most {_ms(high)} ms in three quarters of the blocks, none in a quarter)"
    return f"{_ms(part['ms'])} ms, {part['share']:.1%} of the step".replace("%", " %")


def _ms(value: float) -> str:
    """Three digits, or two decimals.

    >>> _ms(0.01234), _ms(3.5987), _ms(187.31)
    ('0.0123', '3.60', '187.31')
    """
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
