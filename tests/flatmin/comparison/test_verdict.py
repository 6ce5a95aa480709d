"""The verdict: yes, no, or cannot tell, with what it would take; and a sentence that has the numbers."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from flatmin.comparison import LONGER, PLAIN, Outcome, Verdict, contenders_for, judge
from flatmin.comparison.verdict import show

CONTENDERS = contenders_for([0.03, 0.1, 0.3])
AMPS = [contender.key for contender in CONTENDERS if not contender.is_plain]


def outcomes(
    means: Mapping[str, float], *, seeds: int = 5, noise: float = 0.002, examples: int = 0, level: float = 0.2
) -> list[Outcome]:
    """Outcomes around these means; without a mean, a contender has `level`."""
    random = torch.Generator().manual_seed(0)
    found = []
    for contender in CONTENDERS:
        for seed in range(seeds):
            value = means.get(contender.key, level) + noise * float(torch.randn((), generator=random))
            rows = (torch.rand(examples, generator=random) < value).double() if examples else torch.zeros(0)
            value = float(rows.mean()) if examples else value
            per_example = {"error": rows.tolist()} if examples else {}
            found.append(Outcome(contender.key, seed, {"error": value}, per_example, seconds=60.0))
    return found


def verdict(means: Mapping[str, float] = {}, **settings: float) -> Verdict:
    return judge(CONTENDERS, outcomes(means, **settings))  # type: ignore[arg-type]


def test_yes_where_one_radius_beats_both() -> None:
    found = verdict({"amp-0.1": 0.1})
    assert (found.answer, found.best) == ("yes", "amp-0.1")
    assert found.sentence.startswith("Yes: AMP's error is ")
    for part in ("AMP with ε = 0.1: 9.90 %", "plain: 19.94 %", "plain, 2 times as long: ", "5 seeds"):
        assert part in found.sentence


def test_not_for_its_time_where_training_longer_does_as_well() -> None:
    found = verdict({LONGER: 0.1, **dict.fromkeys(AMPS, 0.1)}, noise=0.001)
    assert found.answer == "no"
    assert found.sentence.startswith("No, not for its time: ")


def test_no_where_a_gain_worth_having_is_ruled_out() -> None:
    found = verdict(noise=0.001)
    assert found.answer == "no"
    assert "by a tenth of the plain one's (2.00 points) or more" in found.sentence


def test_no_where_amp_is_worse() -> None:
    found = verdict(dict.fromkeys(AMPS, 0.3))
    assert found.answer == "no"
    assert "is higher at every radius tried" in found.sentence


def test_cannot_tell_says_how_many_seeds() -> None:
    found = verdict({"amp-0.1": 0.18}, noise=0.02)
    assert found.answer == "cannot tell"
    assert "seeds would decide" in found.sentence
    assert "minutes more at the pace so far" in found.sentence


def test_cannot_tell_from_one_seed() -> None:
    found = verdict({"amp-0.1": 0.01}, seeds=1)
    assert found.answer == "cannot tell"
    assert "at least 3 are needed" in found.sentence


def test_cannot_tell_from_few_examples() -> None:
    found = verdict({"amp-0.1": 0.17}, examples=40, noise=0.0)
    assert found.answer == "cannot tell"
    assert "40 held-out examples are too few" in found.sentence


def test_what_it_takes_is_about_right() -> None:
    """Trained with as many seeds as it asks for, most comparisons decide."""
    few = verdict({"amp-0.1": 0.15}, noise=0.03, seeds=4)
    assert few.answer == "cannot tell"
    asked = int(few.sentence.split("About ")[1].split()[0])
    assert 4 < asked < 40
    assert verdict({"amp-0.1": 0.15}, noise=0.03, seeds=2 * asked).answer == "yes"


def test_several_radii_are_several_chances() -> None:
    """Without any difference, hardly any of 200 comparisons says yes."""
    random = torch.Generator().manual_seed(1)
    yes = 0
    for _ in range(200):
        found = [
            Outcome(contender.key, seed, {"loss": 1 + 0.1 * float(torch.randn((), generator=random))})
            for contender in CONTENDERS
            for seed in range(4)
        ]
        yes += judge(CONTENDERS, found).answer == "yes"
    assert yes <= 6


@pytest.mark.parametrize("answer", ["yes", "no", "cannot tell"])
def test_the_order_of_outcomes_changes_nothing(answer: str) -> None:
    means, noise = {"yes": ({"amp-0.1": 0.1}, 0.002), "no": ({}, 0.001), "cannot tell": ({"amp-0.1": 0.18}, 0.02)}[
        answer
    ]
    found = outcomes(means, noise=noise)
    one, other = judge(CONTENDERS, found), judge(CONTENDERS, found[::-1])
    assert one.answer == other.answer == answer
    assert one.sentence == other.sentence


def test_diverged_trainings_are_counted_and_do_not_win() -> None:
    found = [one for one in outcomes({"amp-0.1": 0.1}) if one.contender != "amp-0.3"]
    found += [Outcome("amp-0.3", seed, {}, failed="the held-out error is not finite") for seed in range(5)]
    result = judge(CONTENDERS, found)
    assert (result.answer, result.best) == ("yes", "amp-0.1")
    assert [row.failed for row in result.rows["error"]] == [0, 0, 0, 0, 5]
    all_diverged = [one for one in found if one.contender in (PLAIN, LONGER)]
    all_diverged += [Outcome(key, seed, {}, failed="not finite") for key in AMPS for seed in range(5)]
    assert judge(CONTENDERS, all_diverged).sentence.startswith("No: AMP diverged at every radius")


def test_the_measure_decides() -> None:
    found = [
        Outcome(one.contender, one.seed, {**one.measures, "nll": 1 - one.measures["error"]})
        for one in outcomes({"amp-0.1": 0.1})
    ]
    assert judge(CONTENDERS, found).answer == "yes"
    assert judge(CONTENDERS, found, measure="nll").answer == "no"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: judge(CONTENDERS, outcomes({}), measure="f1"),
            "unknown measure 'f1'; choose from error",
        ),
        (lambda: judge(CONTENDERS, outcomes({}), worth=1.5), "worth must be a share"),
        (lambda: contenders_for([]), "at least one radius"),
        (lambda: contenders_for([0.1, -1.0]), "a finite number above 0, got -1.0"),
        (lambda: contenders_for([0.1, 0.1]), "the radii must differ"),
        (lambda: contenders_for([0.1, 0.100001]), "the radii must differ"),
    ],
)
def test_bad_input(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_nothing_trained_yet() -> None:
    assert judge(CONTENDERS, []).answer == "cannot tell"
    assert show("error", float("inf")) == "—"


def test_new_examples_with_every_seed_make_more_seeds_worth_it() -> None:
    found = outcomes({"amp-0.1": 0.17}, seeds=5, examples=200)
    same, new = (judge(CONTENDERS, found, new_examples=each) for each in (False, True))
    assert same.answer == new.answer == "cannot tell"
    assert "More seeds will not decide it" in same.sentence
    assert "seeds would decide a difference of this size" in new.sentence


def test_the_time_of_a_seed_may_be_known_better_than_by_the_sum_of_its_trainings() -> None:
    found = outcomes({}, seeds=1)
    assert "That is 10 minutes more" in judge(CONTENDERS, found).sentence  # five trainings of a minute, twice
    assert "That is 4.0 minutes more" in judge(CONTENDERS, found, seconds_a_seed=120.0).sentence


def test_where_no_error_is_left_there_is_nothing_to_gain() -> None:
    found = [replace(one, measures={"error": 0.0}) for one in outcomes({}, seeds=3)]
    assert judge(CONTENDERS, found).sentence.startswith("No: the error on the held-out data is already 0 without AMP")
    few = [one for one in found if one.seed < 2]
    assert judge(CONTENDERS, few).answer == "cannot tell"
    own = judge(CONTENDERS, [replace(one, measures={"misses": 0.0}) for one in found])  # of which 0 may be the least
    assert own.answer == "cannot tell"
    assert "let a loss decide" in own.sentence


def with_failed(found: list[Outcome], failed: dict[str, list[int]]) -> list[Outcome]:
    return [
        Outcome(one.contender, one.seed, {}, failed="not finite") if one.seed in failed.get(one.contender, []) else one
        for one in found
    ]


def test_a_radius_that_diverges_with_some_seeds_is_no_answer() -> None:
    found = with_failed(outcomes({"amp-0.3": 0.01}, noise=0.001), {"amp-0.3": [1, 4]})
    result = judge(CONTENDERS, found)
    assert (result.answer, result.best) != ("yes", "amp-0.3")
    assert "diverged with some seeds: AMP, ε = 0.3" in result.sentence
    everywhere = judge(CONTENDERS, with_failed(found, {key: [0] for key in AMPS}))
    assert everywhere.sentence.startswith("No: AMP diverged with some seeds at every radius")


def test_means_are_over_the_seeds_that_all_have() -> None:
    """The plain training of a hard seed diverged: AMP's mean over it would not be of a pair."""
    found = with_failed(outcomes({}, noise=0.0), {})
    hard = [
        Outcome(one.contender, one.seed, {"error": 0.9}) if one.seed == 4 and one.contender != PLAIN else one
        for one in found
        if (one.contender, one.seed) != (PLAIN, 4)
    ]
    assert "plain: 20.00 %; plain, 2 times as long: 20.00 %" in judge(CONTENDERS, hard).sentence


@pytest.mark.parametrize(
    ("ended", "failed", "words"),
    [
        ([], [PLAIN, LONGER, *AMPS], "every run diverged; lower the learning rate first"),
        (AMPS, [PLAIN, LONGER], "every plain run diverged"),
        (AMPS, [], "no run of the plain optimizer has finished yet"),
        ([PLAIN], [LONGER], "no run of AMP has finished yet"),
        ([PLAIN, LONGER], AMPS[:1], "no run of AMP has finished yet"),
    ],
)
def test_what_is_missing_is_said_as_it_is(ended: list[str], failed: list[str], words: str) -> None:
    found = [Outcome(key, seed, {"error": 0.2}) for key in ended for seed in range(3)]
    found += [Outcome(key, seed, {}, failed="not finite") for key in failed for seed in range(3)]
    result = judge(CONTENDERS, found)
    assert result.answer == "cannot tell"
    assert words in result.sentence


def test_two_seeds_are_no_answer_however_equal_they_are() -> None:
    assert verdict({"amp-0.1": 0.01}, seeds=2, noise=0.0).answer == "cannot tell"


def test_higher_than_the_longer_training_alone_is_said_so() -> None:
    found = verdict({LONGER: 0.1, **dict.fromkeys(AMPS, 0.199)}, noise=0.001)
    assert "is higher than that of the plain optimizer trained for as long at every radius" in found.sentence


@pytest.mark.parametrize("amp", [0.0, 0.01, 0.5, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("seeds", [2, 3])
def test_what_cannot_be_told_lies_within_what_a_share_can_be(amp: float, seeds: int) -> None:
    """AMP's error may be from 0 to 100 %, however wide the interval is; and nothing is −2 points above."""
    sentence = verdict(
        {PLAIN: 0.4, LONGER: 0.5, **dict.fromkeys(AMPS, amp)}, seeds=seeds, noise=0.0, examples=20
    ).sentence
    for size, side in re.findall(r"(\S+?)(?: points)? (below|above)", sentence):
        assert 0 <= float(size) <= 100, (side, sentence)
    assert "−" not in sentence


def test_what_is_equal_in_all_seeds_has_no_range_and_zero_no_minus() -> None:
    assert "anywhere" not in verdict(seeds=2, noise=0.0).sentence
    assert (show("error", -0.00001), show("loss", -0.0), show("loss", -1e-9)) == ("0.00 %", "0", "−1e−09")
