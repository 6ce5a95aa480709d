"""The demo page's closer look at two networks, from made-up numbers."""

from typing import Any

import pytest

from flatmin_lab.report.pages.demo_networks import drawn_digit, networks


def network(answer: int, *, plain: float, scaled: float | None) -> dict[str, Any]:
    line = {"pictures": 2, "line": [2.0, 0.5, 4.0], "plane": None}
    return {
        "train": 9,
        "held_out": 1,
        "digits": [{"pixels": [[0, 255], [128, 0]], "given": 3, "true": 8, "answer": answer, "confidence": 0.9}],
        "calibration": {
            "plain": {"error": 0.1, "nll": 0.3, "ece": plain},
            "temperature": None if scaled is None else 0.5,
            "scaled": None if scaled is None else {"error": 0.1, "nll": 0.2, "ece": scaled},
        },
        "landscape": {"axis": [-1.0, 0.0, 1.0], "splits": {"training": line, "test": line}},
    }


@pytest.mark.parametrize(
    ("amp", "said"),
    [
        ((0.2, 0.01), "afterwards its ECE is the lower one"),
        ((0.2, 0.021), "less than one test digit"),
        ((0.2, 0.05), "before and after scaling"),
        ((0.05, 0.01), "not worse calibrated"),
        ((0.05, 0.05), "only after scaling"),
        ((0.2, None), ""),
    ],
)
def test_whether_amp_is_worse_calibrated_follows_the_numbers(amp: tuple[float, float | None], said: str) -> None:
    found = networks({"erm": network(3, plain=0.1, scaled=0.02), "amp": network(8, plain=amp[0], scaled=amp[1])}, 359)
    assert found is not None
    assert said in found.answer
    assert bool(said) == bool(found.answer)


def test_an_answer_that_repeats_the_wrong_label_is_counted_and_marked() -> None:
    found = networks({"erm": network(3, plain=0.1, scaled=0.1), "amp": network(8, plain=0.1, scaled=0.1)}, 359)
    assert found is not None
    (digit,) = found.digits
    assert (digit.given, digit.true) == (3, 8)
    assert [(answer.name, answer.label, answer.is_given) for answer in digit.answers] == [
        ("ERM", 3, True),
        ("AMP", 8, False),
    ]
    assert found.repeated == {"ERM": 1, "AMP": 0}
    assert found.rises["ERM"] == (0.5, 3.0)
    assert len(found.lines) == 2


def test_a_digit_is_drawn_a_square_a_pixel_with_ink() -> None:
    drawn = drawn_digit([[0, 255], [128, 0]])
    assert drawn.count("<rect") == 2
    assert 'x="1" y="0" width="1.02" height="1.02" opacity="1.00"' in drawn


def test_numbers_without_networks_make_no_section() -> None:
    assert networks({}, 359) is None
