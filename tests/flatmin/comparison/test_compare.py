"""`flatmin.compare` on the user's own training: the same start, the same batches, nothing of the user's is touched."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flatmin
from flatmin.comparison import LONGER, PLAIN, Comparison, Outcome, Progress, read_outcome
from flatmin.comparison.held_out import loss_on_radius_data
from flatmin.doctor import Crash, examine
from flatmin.doctor.user_training import call

RANDOM = torch.Generator().manual_seed(0)
X, CENTRES = torch.randn(96, 6, generator=RANDOM), torch.randn(3, 6, generator=RANDOM)
Y = (X @ CENTRES.T).argmax(1)


class Own:
    """A user's module: makes trainings, and remembers what they saw."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.batches: list[list[Tensor]] = []
        self.first: list[Tensor] = []
        self.rates: list[list[float]] = []
        self.models: list[nn.Module] = []

    def __call__(self) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        base = SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen: list[Tensor] = []
        rates: list[float] = []
        self.batches.append(seen)
        self.rates.append(rates)
        self.models.append(model)
        self.first.append(torch.cat([param.detach().flatten() for param in model.parameters()]))

        def closure(x: Tensor, y: Tensor) -> Tensor:
            base.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            if not seen or not torch.equal(seen[-1], x):
                seen.append(x)
                rates.append(base.param_groups[0]["lr"])
            return loss

        made = {
            "model": model,
            "optimizer": base,
            "closure": closure,
            "batches": DataLoader(TensorDataset(X[:64], Y[:64]), batch_size=16, shuffle=True),
            "held_out": [(X[64:], Y[64:])],
            "scheduler": LambdaLR(base, lambda epoch: 0.5**epoch),
            "epochs": 3,
        }
        made |= {name: change(made) if callable(change) else change for name, change in self.changes.items()}
        return {name: part for name, part in made.items() if part is not None}


def compare(own: Callable[[], Any], **settings: Any) -> Comparison:
    return flatmin.compare(own, **{"seeds": 1, "radii": [0.1], "examined": False, **settings})


def by_key(comparison: Comparison) -> dict[str, flatmin.comparison.Outcome]:
    return {outcome.contender: outcome for outcome in comparison.outcomes}


def test_all_begin_with_the_same_weights_and_see_the_same_batches() -> None:
    own = Own()
    compare(own)
    _, plain, longer, amp = range(4)  # the first one is only looked at
    assert torch.equal(own.first[plain], own.first[longer])
    assert torch.equal(own.first[plain], own.first[amp])
    assert [len(seen) for seen in own.batches] == [0, 12, 24, 12]
    for seen in (own.batches[longer], own.batches[amp]):
        assert all(torch.equal(a, b) for a, b in zip(own.batches[plain], seen, strict=False))
    epochs = [torch.cat(own.batches[plain][4 * n : 4 * n + 4]) for n in range(3)]
    assert not torch.equal(epochs[0], epochs[1])


def test_an_automatic_radius_of_the_users_is_compared_as_one_or_refused() -> None:
    def automatic(made: dict[str, Any]) -> flatmin.AMP:
        return flatmin.AMP(made["optimizer"], epsilon="auto", model=made["model"])

    data = {"radius_data": [(X[64:80], Y[64:80])], "held_out": [(X[80:], Y[80:])]}
    with pytest.raises(
        ValueError, match=r"an AMP with epsilon=\"auto\".* but no such data: return them as 'radius_data'"
    ):
        compare(Own(optimizer=automatic), radii=None)
    with pytest.raises(ValueError, match="between epochs, but 1 are too few for that"):
        compare(Own(optimizer=automatic, epochs=1, **data), radii=None)
    found = compare(Own(optimizer=automatic, **data), radii=None)
    assert [contender.key for contender in found.contenders] == [
        *(PLAIN, LONGER),
        *("amp-0.03", "amp-0.1", "amp-0.3", "amp-auto"),
    ]
    compare(Own(optimizer=automatic))  # with radii of the user's choice


def test_it_says_on_which_device() -> None:
    assert compare(Own()).device == torch.device("cpu")


def test_seeds_differ() -> None:
    own = Own()
    compare(own, seeds=2)
    assert not torch.equal(own.first[1], own.first[4])
    assert not torch.equal(own.batches[1][0], own.batches[4][0])


def test_plain_is_the_users_own_loop() -> None:
    """Without dropout, by hand: the same weights to the last bit."""
    own = Own()
    make = own.__call__

    def without_dropout() -> dict[str, Any]:
        made = make()
        made["model"][2].p = 0.0
        return made

    compare(without_dropout)
    trained, batches = own.models[1], own.batches[1]
    torch.manual_seed(0)
    by_hand = without_dropout()
    for number, x in enumerate(batches):
        y = (x @ CENTRES.T).argmax(1)
        by_hand["closure"](x, y)
        by_hand["optimizer"].step()
        if number % 4 == 3:
            by_hand["scheduler"].step()
    for ours, theirs in zip(trained.parameters(), by_hand["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_longer_stretches_the_schedule() -> None:
    own = Own()
    compare(own)
    plain, longer = own.rates[1], own.rates[2]
    assert plain == [0.1] * 4 + [0.05] * 4 + [0.025] * 4
    assert longer == [0.1] * 8 + [0.05] * 8 + [0.025] * 8
    own = Own(scheduler=None, scheduler_per_step=lambda made: LambdaLR(made["optimizer"], lambda step: 0.9**step))
    compare(own)
    assert own.rates[2] == pytest.approx([rate for rate in own.rates[1] for _ in range(2)])


def test_amp_of_the_users_own_is_scaled_group_by_group() -> None:
    def wrapped(made: dict[str, Any]) -> flatmin.AMP:
        first, last = made["model"][0], made["model"][3]
        groups = [
            {"params": list(first.parameters()), "epsilon": 0.0},
            {"params": list(last.parameters()), "epsilon": 0.2},
        ]
        base = SGD(groups, lr=0.1)
        return flatmin.AMP(base, epsilon=0.2, inner_iter=2, ball="group", model=made["model"])

    own = Own(optimizer=wrapped, scheduler=None)
    found = flatmin.compare(own, seeds=1, examined=False)
    assert [one.name for one in found.contenders] == [
        *("plain", "plain, 3 times as long"),
        *("AMP, ε = 0.06667", "AMP, ε = 0.2", "AMP, ε = 0.6"),
    ]
    assert [one.passes for one in found.contenders] == [1, 3, 3, 3, 3]


def test_a_radius_is_found_where_there_is_data_for_it() -> None:
    own = Own(radius_data=[(X[64:80], Y[64:80])], held_out=[(X[80:], Y[80:])])
    assert compare(own).contenders[-1].name == "AMP, ε found while training"


def smoothed(made: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Another loss than the NLL. It brings the model into training mode, as a loop may, and uses up its batch."""

    def closure(x: Tensor, y: Tensor) -> Tensor:
        made["optimizer"].zero_grad()
        loss = cross_entropy(made["model"](x), y, label_smoothing=0.2)
        loss.backward()
        x.zero_()
        return loss

    return closure


def test_a_radius_is_matched_to_the_training_loss_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, float]] = []
    x, y = X[64:84], Y[64:84]
    own = Own(closure=smoothed, radius_data=[(x[:16], y[:16]), (x[16:], y[16:])], held_out=[(X[84:], Y[84:])])

    def step(radius: flatmin.MatchedRadius, loss: float) -> float:
        model = own.models[-1].eval()
        with torch.no_grad():
            found.append((loss, float(cross_entropy(model(x), y, label_smoothing=0.2))))
        model.train()
        return 1.0

    monkeypatch.setattr(flatmin.MatchedRadius, "step", step)
    compare(own)
    assert len(found) == 1  # in 0.6 of three epochs
    assert found[0][0] == pytest.approx(found[0][1])


def test_the_loss_on_radius_data_leaves_no_trace() -> None:
    norm = nn.BatchNorm1d(6, affine=False)
    own = Own(
        model=lambda made: made["model"].insert(0, norm),
        closure=lambda made: lambda x, y: (made["model"].train(), smoothed(made)(x, y))[1],
        radius_data=[(X[64:80], Y[64:80])],
    )
    training = call(own, 0)
    before = copy.deepcopy(training.model.state_dict()), torch.get_rng_state()
    losses = [loss_on_radius_data(training) for _ in range(2)]
    assert losses[0] == losses[1]  # dropout too
    after = training.model.state_dict(), torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(param.grad is None for param in training.model.parameters())
    assert training.model.training


def test_without_batches_a_radius_is_matched_to_the_nll() -> None:
    """The closure, which has a batch of its own, takes no other."""
    own = Own(batches=None, radius_data=[(X[64:80], Y[64:80])])
    training = call(own, 0)
    with torch.no_grad():
        logits = training.model.eval()(X[64:80])
    assert loss_on_radius_data(training) == pytest.approx(float(cross_entropy(logits, Y[64:80])))


def test_held_out_pairs_give_error_nll_and_ece() -> None:
    own = Own()
    outcome = by_key(compare(own))[PLAIN]
    model = own.models[1].eval()
    with torch.no_grad():
        logits = model(X[64:])
    assert outcome.measures["error"] == pytest.approx(float(flatmin.metrics.error(logits, Y[64:])))
    assert outcome.measures["nll"] == pytest.approx(float(flatmin.metrics.nll(logits, Y[64:])), rel=1e-5)
    assert outcome.measures["nll"] == pytest.approx(sum(outcome.per_example["nll"]) / 32)
    assert outcome.per_example["error"] == (logits.argmax(1) != Y[64:]).double().tolist()
    assert [point["epoch"] for point in outcome.curve] == [1, 2, 3]


def test_an_evaluate_of_ones_own() -> None:
    own = Own(held_out=None, evaluate=lambda made: lambda: {"distance": made["model"][0].weight.norm(), "other": 1})
    found = compare(own, seeds=2)
    assert found.verdict.measure == "distance"
    assert list(found.verdict.rows) == ["distance", "other"]
    number = compare(Own(held_out=None, evaluate=lambda made: lambda: 0.25))
    assert by_key(number)[LONGER].measures == {"loss": 0.25}


def test_it_resumes_from_what_has_ended(tmp_path: Path) -> None:
    whole = compare(Own(), seeds=2, out=tmp_path / "whole")
    own, ended = Own(), 0

    def interrupt(progress: Progress) -> None:
        nonlocal ended
        ended += progress.outcome is not None
        if ended == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(own, seeds=2, out=tmp_path / "parts", progress=interrupt)
    again: list[Progress] = []
    parts = compare(Own(), seeds=2, out=tmp_path / "parts", progress=again.append)
    assert [one.was_there for one in again if one.outcome is not None] == [True] * 3 + [True] + [False] * 2

    def facts(comparison: Comparison) -> list[Any]:
        return [(one.contender, one.seed, one.measures, one.per_example, one.curve) for one in comparison.outcomes]

    assert facts(parts) == facts(whole)
    assert parts.verdict.rows == whole.verdict.rows


def test_a_damaged_file_is_trained_again(tmp_path: Path) -> None:
    whole = compare(Own(), out=tmp_path)
    (tmp_path / "plain-seed-0.json").write_text("{")
    assert by_key(compare(Own(), out=tmp_path))[PLAIN].measures == by_key(whole)[PLAIN].measures


def test_no_field_of_an_outcome_is_taken_on_trust(tmp_path: Path) -> None:
    """A file with any field gone or of another kind is no outcome: its run is trained again."""
    outcome = Outcome(PLAIN, 0, {"error": 0.5}, {"error": [1.0, 0.0]}, [{"epoch": 1, "error": 0.5}], 1.0)
    outcome.write(tmp_path)
    path = tmp_path / "plain-seed-0.json"
    whole = json.loads(path.read_text())
    assert read_outcome(tmp_path, PLAIN, 0) == outcome
    for name in whole:
        for wrong in ("abc", ["q"], [3], {"error": "x"}, {"error": None}, -math.inf, math.nan, True, 7):
            path.write_text(json.dumps({**whole, name: wrong}))
            known = read_outcome(tmp_path, PLAIN, 0)
            # a run may have taken 7 seconds, or failed with these words
            assert (known is None) == ((name, wrong) not in [("seconds", 7), ("failed", "abc")]), (name, wrong)
    for name in ("measures", "contender", "seed"):
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        assert read_outcome(tmp_path, PLAIN, 0) is None
    path.write_text(json.dumps({**whole, "contender": LONGER}))  # a copy of another run's
    assert read_outcome(tmp_path, PLAIN, 0) is None


def test_another_comparison_is_not_mixed_in(tmp_path: Path) -> None:
    compare(Own(), out=tmp_path / "one")
    with pytest.raises(ValueError, match="holds another comparison: its epochs was 3 and is now 2; choose another"):
        compare(Own(), epochs=2, out=tmp_path / "one")
    other = Own(optimizer=lambda made: SGD(made["model"].parameters(), lr=0.2), scheduler=None)
    with pytest.raises(ValueError, match="its weights and optimizer was"):
        compare(other, out=tmp_path / "one")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty and holds no comparison"):
        compare(Own(), out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_of_two_comparisons_at_once_in_a_folder_the_second_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    def begin_another(progress: Progress) -> None:
        if progress.outcome is None:
            with pytest.raises(BlockingIOError) as error:
                compare(Own(), out=tmp_path)
            refused.append(str(error.value))

    first = compare(Own(), out=tmp_path, progress=begin_another)
    rule = f"another process is comparing in {tmp_path}; wait for it to end, or choose another folder"
    assert refused == [rule] * len(first.outcomes)
    assert compare(Own(), out=tmp_path).outcomes == first.outcomes  # afterwards the folder is free


def test_seeds_that_do_not_fit_into_the_time_are_left_out() -> None:
    found = compare(Own(), seeds=50, minutes=0.0001)
    assert found.stopped.startswith("Stopped at seed 0")
    assert found.verdict.answer == "cannot tell"
    enough = compare(Own(), seeds=2, minutes=10)
    assert (enough.stopped, enough.verdict.seeds) == ("", 2)


def test_the_callers_generators_are_left_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(3), random.random()
    torch.manual_seed(3)
    random.seed(3)
    compare(Own())
    assert torch.equal(expected[0], torch.rand(3))
    assert expected[1] == random.random()


def test_a_training_that_diverges_is_said_to_have() -> None:
    own = Own(optimizer=lambda made: SGD(made["model"].parameters(), lr=1e30), scheduler=None)
    found = compare(own)
    assert all(one.failed or one.measures for one in found.outcomes)
    assert by_key(found)[PLAIN].failed is not None
    assert found.verdict.answer == "cannot tell"


def test_the_doctor_looks_first() -> None:
    def draws_inside() -> dict[str, Any]:
        made = Own()()
        inner, data = made["closure"], iter(list(made["batches"]) * 100)
        return {**made, "closure": lambda *_: inner(*next(data))}

    with pytest.raises(ValueError, match=r"the doctor found a mistake in this training.*closure repeats"):
        flatmin.compare(draws_inside, seeds=1)


def test_the_doctor_takes_the_same_function() -> None:
    findings = examine(Own())
    assert {finding.verdict for finding in findings} <= {"ok", "cannot tell"}
    assert len(findings) > 10


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"held_out": None}, {}, "either held_out .* or evaluate .*, got neither"),
        ({"evaluate": lambda made: lambda: 1.0}, {}, "got both"),
        ({"epochs": None}, {}, "must know how long to train: give epochs="),
        ({"epochs": 0}, {}, "epochs must be a whole number of at least 1, got 0"),
        ({"typo": 1}, {}, "got one with 'typo'"),
        ({"model": None}, {}, "got one without 'model'"),
        (
            {"batches": lambda made: iter(made["batches"])},
            {},
            "the batches of make_training must be something to iterate",
        ),
        ({"scheduler": 3}, {}, r"the scheduler of make_training must have a step\(\)"),
        ({"held_out": [X]}, {}, r"held-out batches must be pairs \(inputs, classes\)"),
        ({"held_out": [(X, X[:, 0])]}, {}, "give evaluate for anything else"),
        ({"held_out": []}, {}, "at least one example, got none"),
        (
            {"held_out": None, "evaluate": lambda made: lambda: {"accuracy": 0.9}},
            {},
            "for 'accuracy' higher seems to be",
        ),
        ({"held_out": None, "evaluate": lambda made: lambda: "good"}, {}, "must return a number"),
        (
            {"held_out": None, "evaluate": lambda made: lambda: {"error": 3.2}},
            {},
            "'error' is a share from 0 to 1, which is shown in per cent, got 3.2; call yours something else",
        ),
        (
            {"optimizer": lambda made: flatmin.RMP(made["optimizer"], epsilon=0.1)},
            {},
            "a plain optimizer or a flatmin.AMP",
        ),
        ({}, {"seeds": 0}, "seeds must be a whole number of at least 1, got 0"),
        ({}, {"minutes": -1}, "minutes must be above 0, got -1"),
        ({}, {"radii": [0.0]}, "a finite number above 0, got 0.0"),
        ({}, {"measure": "f1"}, "unknown measure 'f1'"),
        ({}, {"worth": 1.5}, "worth must be a share"),
        ({"held_out": lambda made: lambda: made["held_out"]}, {}, "the held_out of make_training must be something"),
        ({"scheduler": lambda made: ReduceLROnPlateau(made["optimizer"])}, {}, "must step without arguments"),
        (
            {"held_out": lambda made: made["batches"]},
            {},
            "batches and held_out of make_training must be different data",
        ),
        ({"radius_data": lambda made: made["held_out"]}, {}, "held_out and radius_data of make_training must be"),
    ],
)
def test_bad_input(changes: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    def compared() -> None:
        try:
            compare(Own(**changes), **settings)
        except Crash as crash:  # in the user's own code
            raise crash.error from None

    with pytest.raises((TypeError, ValueError), match=message):
        compared()


def test_the_table_has_a_line_for_each() -> None:
    text = str(compare(Own(), seeds=2))
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["seeds", "passes", "error", "nll"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["plain", "plain, 2 times as long", "AMP, ε = 0.1"]
    assert lines[-1].startswith(("Yes", "No", "Cannot tell"))


def silent(made: dict[str, Any]) -> Callable[[Tensor, Tensor], None]:
    def closure(x: Tensor, y: Tensor) -> None:
        cross_entropy(made["model"](x), y).backward()

    return closure


UNKNOWN_CLASS = Y[64:].where(torch.arange(32) != 5, 3)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"measure": "f1"}, "unknown measure 'f1'; choose from error, nll, ece"),
        ({"held_out": [(X[64:], UNKNOWN_CLASS)]}, {}, "labels must be from 0 to 2 for 3 classes, got 3 in row 5"),
        ({"held_out": [(X[64:], UNKNOWN_CLASS - 4)]}, {}, "labels must be from 0 to 2 for 3 classes, got -"),
        ({"held_out": [(X[64:], Y[64:, None])]}, {}, r"int64 of shape \(32, 1\); give evaluate"),
        ({"radius_data": []}, {}, "radius_data must have at least one example, got none"),
        ({"radius_data": [(X[64:], Y[64:])], "closure": silent}, {}, "the closure must return its loss, .* got none"),
        ({"radius_data": [(X[64:],)]}, {}, "calling the closure on a batch of radius_data"),
    ],
)
def test_what_cannot_be_measured_is_named_before_anything_is_trained(
    changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    own = Own(**changes)
    with pytest.raises((TypeError, ValueError, Crash), match=message):
        compare(own, **settings)
    assert len(own.models) == 1  # it is only looked at


def test_a_classifier_with_one_logit_is_told_what_to_give() -> None:
    own = Own(held_out=[(X[64:], (Y[64:] > 0).long())], model=lambda made: made["model"].append(nn.Linear(3, 1)))
    with pytest.raises(TypeError, match=r"K at least 2.*got torch.float32 of shape \(32, 1\).*give evaluate"):
        compare(own)


def test_an_unknown_measure_of_an_evaluate_is_named_after_the_first_training() -> None:
    own = Own(held_out=None, evaluate=lambda made: lambda: {"loss": 1.0})
    with pytest.raises(ValueError, match="unknown measure 'f1'"):
        compare(own, measure="f1")
    assert len(own.models) == 2  # one is only looked at


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Data of unknown length: `len` of its loader raises."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.pairs = list(zip(x, y, strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.pairs)


def test_loaders_of_unknown_length_are_those_of_known_length() -> None:
    def outcomes(kind: Any) -> list[Any]:
        rows = {"batches": slice(0, 64), "held_out": slice(64, 80), "radius_data": slice(80, 96)}
        loaders = {name: DataLoader(kind(X[row], Y[row]), batch_size=16) for name, row in rows.items()}
        return [outcome.measures for outcome in compare(Own(**loaders)).outcomes]

    assert outcomes(Stream) == outcomes(TensorDataset)


class Halving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.div_(2)


def test_a_model_that_changes_its_inputs_in_place_is_measured_on_the_same_ones() -> None:
    held_out, before = [(X[64:].clone(), Y[64:])], X[64:].clone()
    compare(Own(held_out=held_out, model=lambda made: made["model"].insert(0, Halving())))
    assert torch.equal(held_out[0][0], before)


@pytest.mark.parametrize("evaluates", [True, False])
def test_seeds_that_change_nothing_decide_nothing(evaluates: bool) -> None:
    """A training that sets its own seed gives three times the same run; three seeds would be sure of anything."""

    def always_the_same() -> dict[str, Any]:
        torch.manual_seed(0)
        own = Own(batches=[(X[:64], Y[:64])], model=lambda made: made["model"].eval())()
        if evaluates:
            own["evaluate"] = lambda: float(cross_entropy(own["model"](X[64:]), Y[64:]))
            del own["held_out"]
        return own

    found = compare(always_the_same, seeds=3, measure=None if evaluates else "nll")
    assert found.verdict.answer == "cannot tell"
    assert "all 3 seeds gave the same runs" in found.verdict.sentence


@pytest.mark.parametrize("reset", [False, True])
def test_a_run_that_goes_on_where_the_last_one_ended_is_no_comparison(reset: bool) -> None:
    model = nn.Linear(6, 3)

    def the_same_model(_: object) -> nn.Module:
        if reset:
            model.reset_parameters()
        return model

    def the_same_training() -> dict[str, Any]:
        made = Own(model=the_same_model, scheduler=None)()
        base = SGD(model.parameters(), lr=0.1)

        def closure(x: Tensor, y: Tensor) -> Tensor:
            base.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        return {**made, "optimizer": base, "closure": closure}

    if reset:
        assert len(compare(the_same_training).outcomes) == 3
        return
    with pytest.raises(ValueError, match="must start anew, but make_training returned the weights that the last run"):
        compare(the_same_training)


def test_an_evaluate_of_another_model_decides_nothing() -> None:
    another = nn.Linear(6, 3)
    own = Own(held_out=None, evaluate=lambda made: lambda: cross_entropy(another(X), Y))
    verdict = compare(own, seeds=3).verdict
    assert verdict.answer == "cannot tell"
    assert "is the same in every run" in verdict.sentence


def test_a_file_is_no_folder_for_results(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(ValueError, match="out must be a folder"):
        compare(Own(), out=tmp_path / "notes")


@pytest.mark.parametrize("name", ["accuracy", "eval_accuracy", "val/acc", "Test F1", "held_out_top-1"])
def test_measures_of_which_more_is_better_are_refused_by_their_names(name: str) -> None:
    with pytest.raises(Crash) as crash:
        compare(Own(held_out=None, evaluate=lambda made: lambda: {name: 0.9}))
    assert "higher seems to be" in str(crash.value.error)


def test_what_the_doctor_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    def without_a_gradient() -> dict[str, Any]:
        return {**Own()(), "closure": lambda x, y: torch.zeros(())}

    with pytest.raises(ValueError, match="the doctor found a mistake"):
        flatmin.compare(without_a_gradient, seeds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert compare(Own(), out=tmp_path / "out").outcomes


def test_explicit_radii_are_those_that_are_trained() -> None:
    own = Own(optimizer=lambda made: flatmin.AMP(SGD(made["model"].parameters(), lr=0.1), epsilon=1.0), scheduler=None)
    found = flatmin.compare(own, seeds=1, examined=False, radii=[0.03, 0.1, 0.3])
    assert [one.epsilon for one in found.contenders if not one.is_plain] == [0.03, 0.1, 0.3]


def test_held_out_examples_come_in_the_same_order_however_the_loader_shuffles() -> None:
    shuffled = DataLoader(TensorDataset(X[64:], Y[64:]), batch_size=8, shuffle=True)
    found = by_key(compare(Own(held_out=shuffled), radii=[1e-9]))
    plain, amp = (torch.tensor(found[key].per_example["nll"]) for key in (PLAIN, "amp-1e-09"))
    torch.testing.assert_close(plain, amp, rtol=1e-3, atol=1e-4)


def test_batches_that_are_used_up_are_named() -> None:
    def once(made: dict[str, Any]) -> Callable[[], Any]:
        used = iter(list(made["batches"]))
        return lambda: used

    with pytest.raises(ValueError, match="must be there in every epoch, but epoch 2 had none"):
        compare(Own(batches=once))


def test_a_radius_scheduler_is_refused() -> None:
    def late() -> dict[str, Any]:
        made = Own(scheduler=None)()
        optimizer = flatmin.AMP(made["optimizer"], epsilon=0.1, model=made["model"])
        return {**made, "optimizer": optimizer, "scheduler_per_step": flatmin.RadiusScheduler(optimizer, 12, start=0.5)}

    with pytest.raises(ValueError, match="a RadiusScheduler would reset it"):
        compare(late, radii=[0.1])


@pytest.mark.parametrize("known", [True, False])
def test_a_late_start_leaves_the_steps_before_it_plain(known: bool) -> None:
    """Steps are counted, or epochs where their length is not known; plain training runs for as long as that takes."""
    passes: list[list[int]] = []

    def counted() -> dict[str, Any]:
        made = own()
        calls: list[int] = []
        passes.append(calls)

        def closure(x: Tensor, y: Tensor) -> Tensor:
            calls.append(len(own.batches[-1]))
            loss: Tensor = made["closure"](x, y)
            return loss

        loader = made["batches"]
        return {**made, "closure": closure, "batches": loader if known else lambda: iter(list(loader))}

    own = Own(epochs=4)
    found = compare(counted, start=0.75)
    assert [one.name for one in found.contenders] == ["plain", "plain, 1.25 times as long", "AMP, ε = 0.1"]
    assert [one.passes for one in found.contenders] == [1, 1.25, 1.25]
    assert [len(calls) for calls in passes[1:]] == [16, 20, 12 + 2 * 4]
    late, plain = own.models[3], own.models[1]
    assert not all(torch.equal(a, b) for a, b in zip(late.parameters(), plain.parameters(), strict=True))


def test_a_late_start_is_a_loop_by_hand_with_a_radius_scheduler() -> None:
    """To the last bit, without dropout; of 12 steps the last 3 are perturbed, which is less than an epoch."""
    own = Own()

    def without_dropout() -> dict[str, Any]:
        made = own()
        made["model"][2].p = 0.0
        return made

    compare(without_dropout, start=0.75)
    trained, batches = own.models[3], own.batches[3]
    torch.manual_seed(0)
    by_hand = without_dropout()
    optimizer = flatmin.AMP(by_hand["optimizer"], epsilon=0.1, model=by_hand["model"])
    late = flatmin.RadiusScheduler(optimizer, 12, start=0.75)
    perturbed = 0
    for number, x in enumerate(batches):
        perturbed += optimizer.perturbs
        optimizer.step(partial(by_hand["closure"], x, (x @ CENTRES.T).argmax(1)))
        late.step()
        if number % 4 == 3:
            by_hand["scheduler"].step()
    assert perturbed == 3
    for ours, theirs in zip(trained.parameters(), by_hand["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_radius_is_found_late_if_there_are_epochs_for_it() -> None:
    data = {"radius_data": [(X[64:80], Y[64:80])], "held_out": [(X[80:], Y[80:])]}
    assert compare(Own(epochs=8, **data), start=0.5).contenders[-1].name == "AMP, ε found while training"
    assert compare(Own(epochs=3, **data), start=0.75).contenders[-1].name == "AMP, ε = 0.1"


def test_another_start_is_another_comparison(tmp_path: Path) -> None:
    compare(Own(), out=tmp_path, start=0.5)
    with pytest.raises(ValueError, match=r"its passes was 1.5 and is now 2"):
        compare(Own(), out=tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["start"] == 0.5
    with pytest.raises(ValueError, match=r"start must be a share of the training, at least 0 and below 1, got 1"):
        compare(Own(), start=1)


def test_a_curve_has_finite_numbers_alone() -> None:
    own = Own(optimizer=lambda made: SGD(made["model"].parameters(), lr=1e30), scheduler=None)
    points = [value for one in compare(own).outcomes for point in one.curve for value in point.values()]
    assert all(math.isfinite(value) for value in points)
