"""An automatic radius where training smooths its labels: matched to the NLL on held-out data, or to the loss itself.

The convolutional network of `examples/worth_it.py` on 900 digits, with and without 20 % wrong labels, 30 epochs. 100
other digits, with as many wrong labels, are held out to adjust ε after each of the first 18 epochs; the rest, with
right labels, is the test set. Every run is one line of a JSON file; those that are there already are not repeated.

    python benchmarks/smoothed_labels.py [--seeds 10] [--file smoothed_labels.jsonl]
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import flatmin
from flatmin import metrics
from flatmin_lab.system.machine import commit

sys.path.append(str(Path(__file__).parents[1]))
from examples import worth_it

TRAIN, HELD_OUT, BATCH, EPOCHS, MATCHED = 900, 100, 50, 30, 18
RULES = {"plain": 0.0, "fixed": 0.1, "nll": "auto", "own": "auto"}  # ε; `own`: matched to the training loss itself


def train(rule: str, *, wrong: float, smoothing: float, seed: int) -> dict[str, Any]:
    x, y, truth = worth_it.digits(wrong=wrong)
    torch.manual_seed(seed)
    parts: dict[str, Any] = worth_it.wrong_labels()
    model, base = parts["model"], parts["optimizer"]
    epsilon: Any = RULES[rule]
    optimizer = flatmin.AMP(base, epsilon=epsilon, model=model)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(base, EPOCHS)
    order = torch.Generator().manual_seed(seed)
    held_out = slice(TRAIN, TRAIN + HELD_OUT)
    for epoch in range(EPOCHS):
        for index in torch.randperm(TRAIN, generator=order).split(BATCH):

            def closure(index: torch.Tensor = index) -> torch.Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(x[index]), y[index], label_smoothing=smoothing)
                loss.backward()
                return loss

            optimizer.step(closure)
        rate.step()
        if epsilon == "auto" and epoch < MATCHED:
            model.eval()
            with torch.no_grad():
                own = smoothing if rule == "own" else 0.0
                loss = cross_entropy(model(x[held_out]), y[held_out], label_smoothing=own)
            model.train()
            optimizer.radius.step(loss)
    model.eval()
    with torch.no_grad():
        logits = model(x[held_out.stop :]).double()
    labels = truth[held_out.stop :]
    return {
        "wrong": wrong,
        "smoothing": smoothing,
        "rule": rule,
        "seed": seed,
        "epsilon": optimizer.param_groups[0]["epsilon"],
        "test_error": float(metrics.error(logits, labels)),
        "test_nll": float(metrics.nll(logits, labels)),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--file", type=Path, default=Path("smoothed_labels.jsonl"))
    options = parser.parse_args()
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    runs = [json.loads(line) for line in lines]
    done = {(run["wrong"], run["smoothing"], run["rule"], run["seed"]) for run in runs}
    for wrong in (0.2, 0.0):
        for seed in range(options.seeds):
            for smoothing in (0.1, 0.2):
                for rule in RULES:
                    if (wrong, smoothing, rule, seed) not in done:
                        runs.append(train(rule, wrong=wrong, smoothing=smoothing, seed=seed))
                        with options.file.open("a") as file:
                            file.write(json.dumps(runs[-1]) + "\n")
    print("| wrong labels | smoothing | | n | error, % | NLL | ε at the end |\n|---|---|---|---|---|---|---|")
    for wrong in (0.2, 0.0):
        for smoothing in (0.1, 0.2):
            for rule in RULES:
                wanted = wrong, smoothing, rule
                print(row([run for run in runs if (run["wrong"], run["smoothing"], run["rule"]) == wanted]))


def row(runs: list[dict[str, Any]]) -> str:
    errors, nlls = [100 * run["test_error"] for run in runs], [run["test_nll"] for run in runs]
    radii = sorted(run["epsilon"] for run in runs)
    first = runs[0]
    return (
        f"| {first['wrong']:.0%} | {first['smoothing']} | {first['rule']} | {len(runs)} | {mean(errors):.2f} ± "
        f"{stdev(errors):.2f} | {mean(nlls):.3f} ± {stdev(nlls):.3f} | {radii[0]:.3g} to {radii[-1]:.3g} |"
    )


if __name__ == "__main__":
    main()
