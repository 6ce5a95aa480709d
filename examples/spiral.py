"""The paper's spiral: why a flat minimum has a better decision boundary.

Two spiral arms, 400 training points, one label in five is wrong. A network with 33 666 weights memorises some of the
wrong labels, in a sharp minimum, where its boundary bends around single points. AMP minimises the worst loss near the
weights, so it does not stay there. Both methods start from the same weights and see the same batches. The problem
was chosen to show this; with right labels only, there is no such gap.

    python examples/spiral.py [--seeds 5] [--steps 2500] [--epsilon 0.2] [--out out/spiral.png]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import flatmin
from flatmin import flatness
from flatmin_lab.data.sources.spiral import Spiral
from flatmin_lab.report.figures import boundaries

WRONG = 0.2


@dataclass(frozen=True)
class TrainedNetwork:
    model: nn.Module
    data: Spiral
    test_error: float
    memorised: float  # the fraction of the wrong labels that the network predicts
    rise: float  # of the training loss, at the edge of the ball of radius ε
    seconds: float


def network() -> nn.Sequential:
    width = 128
    layers = [nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))


def closure_for(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def train(seed: int, *, epsilon: float, steps: int) -> TrainedNetwork:
    """ERM is AMP with a radius of 0: the same loop."""
    generator = torch.Generator().manual_seed(seed)
    data = Spiral.draw(400, wrong=WRONG, generator=generator)
    test = Spiral.draw(10_000, wrong=0.0, generator=generator)
    torch.manual_seed(seed)
    model = network()
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1, momentum=0.9), epsilon=epsilon)
    schedule = CosineAnnealingLR(optimizer, steps)
    start = perf_counter()
    for _ in range(steps):
        batch = torch.randint(0, len(data.y), (50,), generator=generator)
        optimizer.step(closure_for(optimizer, model, data.x[batch], data.y[batch]))
        schedule.step()
    seconds = perf_counter() - start
    with torch.no_grad():
        test_error = float((model(test.x).argmax(dim=1) != test.y).float().mean())
        repeated = model(data.x).argmax(dim=1) == data.y
    rise = flatness.sharpness(model, flatness.empirical_risk(data.x, data.y), epsilon=0.2)
    return TrainedNetwork(model, data, test_error, float(repeated[data.wrong].float().mean()), float(rise), seconds)


def save_figure(path: Path, erm: TrainedNetwork, amp: TrainedNetwork, epsilon: float) -> None:
    """With text that is legible at the width of a phone, and in 128 colours: a third of the bytes."""
    titles = {
        f"ERM: test error {erm.test_error:.1%}": (erm.model, erm.data),
        f"AMP, ε = {epsilon:g}: test error {amp.test_error:.1%}": (amp.model, amp.data),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = boundaries(titles).figure
    for axes in figure.axes:
        axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=19)
    figure.supxlabel(figure.get_supxlabel(), fontsize=16)
    figure.savefig(png := BytesIO(), dpi=110, bbox_inches="tight")
    Image.open(png).convert("RGB").quantize(128).save(path, format="png", optimize=True)


def cell(values: list[float], *, percent: bool = True) -> str:
    form = ".2%" if percent else ".3f"
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="training runs of each method")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--out", type=Path, default=Path("out/spiral.png"))
    arguments = parser.parse_args()
    for name, least in (("seeds", 1), ("steps", 1), ("epsilon", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(arguments, name)}")
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    methods = {"ERM": 0.0, "AMP": arguments.epsilon}
    runs: dict[str, list[TrainedNetwork]] = {name: [] for name in methods}
    print(f"{'':5}{'test error':>18}{'memorised':>20}{'loss rise in the ball':>24}{'seconds':>10}")
    for name, epsilon in methods.items():
        runs[name] = [train(seed, epsilon=epsilon, steps=arguments.steps) for seed in range(arguments.seeds)]
        error = cell([run.test_error for run in runs[name]])
        memorised = cell([run.memorised for run in runs[name]])
        sharpness = cell([run.rise for run in runs[name]], percent=False)
        print(
            f"{name:5}{error:>18}{memorised:>20}{sharpness:>24}{mean(run.seconds for run in runs[name]):10.1f}",
            flush=True,
        )
    save_figure(arguments.out, runs["ERM"][0], runs["AMP"][0], arguments.epsilon)
    print(f"\nmean ± standard deviation of {arguments.seeds} runs each; the boundaries of the first: {arguments.out}")


if __name__ == "__main__":
    main()
