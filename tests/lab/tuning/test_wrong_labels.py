"""How benchmarks/wrong_labels.py chooses a setting: by held-out data whose labels are as wrong as the others."""

import wrong_labels
from wrong_labels import FIRST_TUNING_SEED, Run

GRID = wrong_labels.CONTENDERS["mixup"].grid


def run(value: float, error: float, nll: float, *, seed: int = FIRST_TUNING_SEED, right: float = 0.0) -> Run:
    measured = {"given_error": error, "given_nll": nll, "error": right, "nll": right}
    return {"stage": "tune", "noise": 0.2, "method": "mixup", "value": value, "seed": seed, **measured}


def first_seed() -> list[Run]:
    """The larger the value the higher the error, and the lower the NLL and what right labels would say."""
    return [run(value, 0.2 + 0.01 * place, 1 - 0.1 * place, right=0.1 / value) for place, value in enumerate(GRID)]


def test_given_labels_choose_and_not_the_right_ones() -> None:
    assert wrong_labels.chosen(first_seed(), 0.2, "mixup") == GRID[0]
    assert wrong_labels.chosen(first_seed(), 0.2, "mixup", labels="") == GRID[-1]


def test_of_equal_errors_the_lower_nll_is_chosen() -> None:
    runs = [run(value, 0.2, 1 - 0.1 * place) for place, value in enumerate(GRID)]
    assert wrong_labels.chosen(runs, 0.2, "mixup") == GRID[-1]


def test_the_best_by_error_and_by_nll_go_on_and_one_of_those_with_every_seed_is_chosen() -> None:
    runs = first_seed()
    assert set(wrong_labels.going_on(runs, 0.2, "mixup")) == {*GRID[:3], *GRID[-2:]}
    later = [run(value, 0.5, 2.0, seed=FIRST_TUNING_SEED + 1) for value in GRID[1:]]
    assert wrong_labels.chosen([*runs, *later], 0.2, "mixup") == GRID[1]


def test_what_has_no_setting_has_nothing_to_choose() -> None:
    assert wrong_labels.chosen([], 0.2, "erm") is None
