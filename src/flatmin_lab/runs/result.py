"""result.json: the result of a finished run, flat, so that many of them make a table.

Error, NLL and ECE (fractions) are the last epoch's: of the test set, or of the held-out tenth where the recipe is for
tuning, and named so. `seconds` are wall-clock, `cpu_seconds` what a run on the CPU computed; for a `resumed` run
they cover all its parts, and for one with `shared` also that beginning, which another run trained: its epochs and its
seconds are named there. `best_test_epoch` is the published code's rule, chosen using the test labels: for comparison
only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flatmin_lab.methods import resolve_settings
from flatmin_lab.recipes.recipe import Recipe

AVERAGE = "average_"  # before the names of measures of the averaged weights
METRIC_SUFFIXES = ("_loss", "_error", "_nll", "_ece", "memorised")


def split_of(numbers: Mapping[str, Any]) -> str:
    """The split that a result, or an epoch's line, was measured on: test, or validation for a tuning run."""
    return "validation" if "validation_error" in numbers else "test"


def build_result(
    recipe: Recipe,
    seed: int,
    data_sha256: str,
    lines: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    *,
    resumed: int = 0,
    shared: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    last = lines[-1]
    settings = recipe.as_json()
    return {
        "recipe": settings.pop("name"),
        "protocol": str(recipe.protocol),
        **settings,
        "settings": resolve_settings(recipe.method, recipe.settings),
        "data_sha256": data_sha256,
        "seed": seed,
        **{name: value for name, value in last.items() if name.endswith(METRIC_SUFFIXES)},
        **_best(lines),
        **{name: last[name] for name in ("seconds", "cpu_seconds") if name in last},
        **({"resumed": resumed} if resumed else {}),
        **({"shared": shared} if shared else {}),
        **facts,
    }


def _best(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The epoch with the lowest test error; a tuning run has none, because it does not use the test set."""
    if "test_error" not in lines[0]:
        return {}
    best = min(lines, key=lambda line: line["test_error"])
    return {"best_test_epoch": best["epoch"], "best_test_epoch_error": best["test_error"]}
