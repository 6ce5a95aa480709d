"""The rows of a benchmark table: a contender's name, its times, its memory, and ratios between rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatmin_lab.bench.timing import Runner, summary

Row = dict[str, Any]


def row_name(method: str, form: str, count: int = 1) -> str:
    return f"{method} {form}" if count == 1 else f"{method} {count} {form}"


def timing_columns(runner: Runner) -> Row:
    if runner.failed is not None:
        return {"failed": runner.failed}
    return {**summary(runner.times), "n": len(runner.times) * runner.steps, "blocks": len(runner.times)}


def is_above_noise(difference: Mapping[str, Any]) -> bool:
    """Is a difference of two times, taken block by block, more than noise? If three quarters of the blocks have it.

    >>> [is_above_noise({"ms": 0.2, "ms_quartiles": quartiles}) for quartiles in ([0.1, 0.3], [-0.1, 0.9])]
    [True, False]
    """
    return bool(difference["ms_quartiles"][0] > 0)


def memory_over_erm(row: Row, rows: Iterable[Row], copy: float) -> float | None:
    """A model's memory beyond ERM's in the same form, in float32 copies of the parameters (`copy` MiB each)."""
    same = [other for other in rows if (other["form"], other["models"]) == (row["form"], row["models"])]
    plain = next((other.get("peak_mib") for other in same if other["method"] == "erm"), None)
    if row["method"] == "erm" or plain is None or row.get("peak_mib") is None:
        return None
    return float((row["peak_mib"] - plain) / (row["models"] * copy))


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """AMP and its modes over ERM in each form, and compiled AMP over the eager steps of the others."""
    ms = {(row["method"], row["form"], row["models"]): row["ms"] for row in rows if "ms" in row}
    found = {
        row_name(f"{method} / erm,", form, count): own / ms["erm", form, count]
        for (method, form, count), own in ms.items()
        if method not in ("erm", "sam") and ("erm", form, count) in ms
    }
    best = ms.get(("amp", "compiled", 1))
    for method in ("erm", "sam"):
        if best is not None and (method, "eager", 1) in ms:
            found[f"amp compiled / {method} eager"] = best / ms[method, "eager", 1]
    return found
