"""Wrong labels with every method's own setting chosen for them: digits, 20 or 40 % of whose training labels are wrong.

    tune    each method with each value of its grid on nine tenths of the training set, tested on the last tenth, which
            has its share of wrong labels, as a user's held-out data would have; its right ones are counted beside them.
            After the first seed only a method's best three values by error and best two by NLL go on
    test    each method with the value of the lowest mean held-out error (of equal ones, the lowest NLL; of values with
            every seed) on the whole training set, tested on the test images, whose labels are right
    show    the tables in Markdown

The network and the recipe are those of `flatmin train --data digits` (24 epochs). `mixup+amp` and `smoothing+amp` are
AMP with that regulariser, whose own setting is the paper's, as in the laboratory. Every run is one line of a JSON file;
those that are there already are not repeated. Tuning has other seeds than testing, so other wrong labels.

    python benchmarks/wrong_labels.py tune --seeds 3 && python benchmarks/wrong_labels.py test --seeds 20
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

import flatmin
import page_parts
from flatmin import metrics
from flatmin.regularisers import Target
from flatmin_lab import methods, models
from flatmin_lab.data import load
from flatmin_lab.data.label_noise import add_label_noise
from flatmin_lab.data.normalise import Normalisation
from flatmin_lab.report.html import format_p, mean_and_std
from flatmin_lab.report.stats import holm, welch
from flatmin_lab.system.machine import commit, hardware

FILE = Path(__file__).parent / "results/wrong_labels.jsonl"
EPOCHS, BATCH, RATE, DECAY = 24, 50, 0.1, 1e-4
HELD_OUT, MATCHED = 0.1, 0.6  # of the training set, and of the epochs, for AMP's automatic radius
FIRST_TUNING_SEED = 100
GO_ON = {"error": 3, "nll": 2}  # values of a method after the first tuning seed
NOISE = (0.2, 0.4)
RADII = (0.12, 0.25, 0.5, 1.0, 2.0)
RADII_BESIDE = (0.06, 0.12, 0.25, 0.5)  # of AMP with another regulariser


@dataclass(frozen=True)
class Contender:
    """A method of the laboratory, its setting that is chosen, and the values to choose from."""

    method: str
    name: str
    setting: str = ""
    grid: tuple[float, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()

    def settings(self, value: float | None) -> dict[str, Any]:
        return {**dict(self.fixed), **({} if value is None else {self.setting: value})}


CONTENDERS = {
    "erm": Contender("erm", "ERM"),
    "dropout": Contender("dropout", "Dropout", "rate", (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)),
    "label_smoothing": Contender("label_smoothing", "label smoothing", "smoothing", (0.1, 0.2, 0.4, 0.6, 0.8)),
    "flooding": Contender("flooding", "flooding", "level", (0.02, 0.3, 0.6, 0.9, 1.2, 1.5, 1.8)),
    "mixup": Contender("mixup", "MixUp", "alpha", (0.5, 1.0, 2.0, 4.0, 8.0)),
    "adversarial": Contender(
        "adversarial", "adversarial training", "epsilon", tuple(level / 255 for level in (1, 4, 8, 16, 32, 64))
    ),
    "rmp": Contender("rmp", "RMP", "epsilon", (0.1, 1.0, 2.0, 4.0, 8.0, 16.0)),
    "amp": Contender("amp", "AMP", "epsilon", RADII),
    "auto": Contender("amp", "AMP, ε auto", fixed=(("epsilon", methods.AUTO),)),
    "mixup+amp": Contender("amp", "MixUp and AMP", "epsilon", RADII_BESIDE, (("regulariser", "mixup"),)),
    "smoothing+amp": Contender(
        "amp", "label smoothing and AMP", "epsilon", RADII_BESIDE, (("regulariser", "label_smoothing"),)
    ),
}


@dataclass(frozen=True)
class Task:
    """Images to train on with labels some of which are wrong, and images to test on with given and with right ones."""

    x: Tensor
    y: Tensor
    wrong: Tensor  # indices of the wrong labels in y
    x_test: Tensor
    y_test: Tensor
    y_right: Tensor
    normalise: Normalisation


def task(stage: str, noise: float, seed: int) -> Task:
    right = load("digits")
    noisy, wrong = add_label_noise(right, noise, seed=seed)
    if stage == "test":
        kept, test, y_right = torch.arange(len(right.train)), noisy.test, right.test.y
    else:
        kept, out = noisy.split_indices(seed, share=HELD_OUT)
        test, y_right = noisy.train.at(out), right.train.y[out]
    kept = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed))]
    train = noisy.train.at(kept)
    normalise = Normalisation.of(train)
    is_wrong = torch.isin(kept, wrong).nonzero().flatten()
    return Task(normalise(train.x), train.y, is_wrong, normalise(test.x), test.y, y_right, normalise)


def trained(contender: Contender, value: float | None, given: Task, seed: int) -> nn.Module:
    """The network after the last epoch."""
    settings = contender.settings(value)
    method = methods.build(contender.method, normalise=given.normalise, **settings)
    torch.manual_seed(seed)
    model = models.build("convnet", in_channels=1, width=16, dropout=method.dropout)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=DECAY)
    optimizer: Any = method.wrap(sgd, model)
    is_matched = settings.get("epsilon") == methods.AUTO
    radius = flatmin.MatchedRadius(optimizer) if is_matched else None
    steps, count = len(given.x) // BATCH, len(given.x)
    kept = count - round(HELD_OUT * count)
    drops = MultiStepLR(optimizer, [EPOCHS * steps // 2, 3 * EPOCHS * steps // 4])
    for epoch in range(EPOCHS):
        model.train()
        is_held_out = is_matched and epoch < round(MATCHED * EPOCHS)
        order = torch.cat([torch.randperm(kept if is_held_out else count) for _ in range(2)])
        for index in order.split(BATCH)[:steps]:  # as many steps in every epoch
            x, target = method.regulariser.batch(model, given.x[index], given.y[index])

            def closure(x: Tensor = x, target: Target = target) -> Tensor:
                optimizer.zero_grad()
                loss = method.regulariser.loss(model(x), target)
                loss.backward()
                return loss

            optimizer.step(closure)
            drops.step()
        model.eval()
        if radius is not None and is_held_out:
            with torch.no_grad():
                radius.step(metrics.nll(model(given.x[kept:]), given.y[kept:]))
    return model


Run = dict[str, Any]


def result(stage: str, noise: float, name: str, value: float | None, seed: int) -> Run:
    """One run: error and NLL with the given and with the right labels, and the share of wrong labels it gives back."""
    given = task(stage, noise, seed)
    model = trained(CONTENDERS[name], value, given, seed)
    with torch.no_grad():
        logits, of_wrong = model(given.x_test), model(given.x[given.wrong])
    numbers = {
        "error": metrics.error(logits, given.y_right),
        "nll": metrics.nll(logits, given.y_right),
        "ece": metrics.ece(logits, given.y_right),
        "memorised": 1 - metrics.error(of_wrong, given.y[given.wrong]),
    }
    if stage == "tune":
        numbers |= {"given_error": metrics.error(logits, given.y_test), "given_nll": metrics.nll(logits, given.y_test)}
    named = {"stage": stage, "noise": noise, "method": name, "value": value, "seed": seed}
    return named | {key: round(float(number), 5) for key, number in numbers.items()}


def read(file: Path) -> list[Run]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def of(runs: Iterable[Run], stage: str, noise: float, name: str) -> list[Run]:
    return [run for run in runs if (run["stage"], run["noise"], run["method"]) == (stage, noise, name)]


def means_of(runs: Iterable[Run], noise: float, name: str, labels: str = "given_") -> dict[float, list[float]]:
    """Mean held-out error and NLL of the values that were tuned with the most seeds."""
    tried: dict[float, list[Run]] = {value: [] for value in CONTENDERS[name].grid}
    for run in of(runs, "tune", noise, name):
        tried[run["value"]].append(run)
    if missing := [value for value, own in tried.items() if not own]:
        raise ValueError(f"{name} was not tuned with {missing} at {noise}; run `tune` first")
    most = max(map(len, tried.values()), default=0)
    return {
        value: [mean(run[labels + key] for run in own) for key in ("error", "nll")]
        for value, own in tried.items()
        if len(own) == most
    }


def chosen(runs: Iterable[Run], noise: float, name: str, *, labels: str = "given_") -> float | None:
    """The value with the lowest mean held-out error, of equal ones the lowest NLL; None if there is no choice."""
    means = means_of(runs, noise, name, labels)
    return min(means, key=means.__getitem__, default=None)


def going_on(runs: Sequence[Run], noise: float, name: str) -> list[float]:
    """The best values of a method by the first tuning seed's held-out error or NLL."""
    means = means_of([run for run in runs if run["seed"] == FIRST_TUNING_SEED], noise, name)
    by_error = sorted(means, key=means.__getitem__)[: GO_ON["error"]]
    by_nll = sorted(means, key=lambda value: means[value][1])[: GO_ON["nll"]]
    return [value for value in CONTENDERS[name].grid if value in by_error or value in by_nll]


def remaining(runs: Sequence[Run], options: argparse.Namespace) -> list[tuple[float, str, float | None, int]]:
    """What is still to be trained, seed by seed, so that an interrupted machine leaves complete tables."""
    names = [(noise, name) for noise in options.noise for name in options.methods]
    there = {tuple(run[key] for key in ("stage", "noise", "method", "value", "seed")) for run in runs}
    first = FIRST_TUNING_SEED if options.stage == "tune" else 0
    for seed in range(first, first + options.seeds):
        wanted = [(*one, value, seed) for one in names for value in _values(runs, *one, options.stage, seed)]
        if left := [one for one in wanted if (options.stage, *one) not in there]:
            return left
    return []


def _values(runs: Sequence[Run], noise: float, name: str, stage: str, seed: int) -> Sequence[float | None]:
    if stage == "test":
        return [chosen(runs, noise, name)]
    return CONTENDERS[name].grid if seed == FIRST_TUNING_SEED else going_on(runs, noise, name)


def tested(runs: Sequence[Run]) -> str:
    """A row for each method: the chosen value, test numbers, and p of the error against AMP's, by Holm's correction."""
    head = [""]
    cells: dict[str, list[str]] = {name: [contender.name] for name, contender in CONTENDERS.items()}
    for noise in NOISE:
        head += [f"{noise:.0%} wrong: chosen".replace("%", " %"), "error, %", "p", "NLL", "memorised, %"]
        errors = {name: [run["error"] for run in of(runs, "test", noise, name)] for name in CONTENDERS}
        tests = {name: welch(own, errors["amp"]) for name, own in errors.items() if name != "amp"}
        p = holm({name: test.p for name, test in tests.items() if test is not None})
        for name, contender in CONTENDERS.items():
            own = of(runs, "test", noise, name)
            nll, memorised = ([run[key] for run in own] for key in ("nll", "memorised"))
            cells[name] += [
                shown(contender, chosen(runs, noise, name)),
                mean_and_std([100 * value for value in errors[name]], 2),
                format_p(p[name]).removeprefix("=\u00a0") if name in p else "",
                mean_and_std(nll, 3),
                mean_and_std([100 * value for value in memorised], 1),
            ]
    every = [run for run in runs if run["stage"] == "test"]
    counts = {len(of(runs, "test", noise, name)) for noise in NOISE for name in CONTENDERS}
    machine, torch_version, version = (
        ", ".join(sorted({str(run[key]) for run in every})) for key in ("hardware", "torch", "commit")
    )
    source = f"n = {' to '.join(map(str, sorted({min(counts), max(counts)})))}; {machine}, one core; "
    return f"{page_parts.markdown(head, list(cells.values()))}\n\n{source}torch {torch_version}; commit {version}."


def tuned(runs: Sequence[Run], noise: float) -> str:
    """A row for each method and value: held-out error with the given labels, and with the right ones."""
    rows = []
    for name, contender in CONTENDERS.items():
        for value in contender.grid:
            own = [run for run in of(runs, "tune", noise, name) if run["value"] == value]
            given, right = ([100 * run[key] for run in own] for key in ("given_error", "error"))
            marks = [
                " *" if value is not None and value == chosen(runs, noise, name, labels=labels) else ""
                for labels in ("given_", "")
            ]
            cells = [f"{mean_and_std(numbers, 1)}{mark}" for numbers, mark in zip((given, right), marks, strict=True)]
            rows.append([contender.name, shown(contender, value), *cells, str(len(own))])
    return page_parts.markdown([f"{noise:.0%} wrong", "value", "held-out error, %", "with right labels", "n"], rows)


def shown(contender: Contender, value: float | None) -> str:
    if value is None:
        return ""
    return f"{255 * value:.0f}/255" if contender.method == "adversarial" else f"{value:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tune", "test", "show"])
    parser.add_argument("--noise", type=float, nargs="+", default=list(NOISE))
    parser.add_argument("--methods", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    runs = read(options.file) if options.file.exists() else []
    if options.stage == "show":
        print("\n\n".join([*(tuned(runs, noise) for noise in NOISE), tested(runs)]))
        return
    torch.set_num_threads(1)
    facts = {"commit": commit(), "hardware": hardware(torch.device("cpu")), "torch": torch.__version__}
    with options.file.open("a") as file:
        while left := remaining(runs, options):
            runs.append(result(options.stage, *left[0]) | facts)
            file.write(json.dumps(runs[-1]) + "\n")
            file.flush()
            print(f"{len(left)} left with this seed: {runs[-1]}", flush=True)


if __name__ == "__main__":
    main()
