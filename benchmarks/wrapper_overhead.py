"""What the wrapper itself costs: everything of a step but the two forward-backward passes and the base's own update.

The closure only assigns gradients computed beforehand, and the base does nothing, so what is timed is the arithmetic of
the perturbation: norm, projection, θ kept, moved and put back, and the check that every gradient is finite. AMP and
pytorch_optimizer's SAM take turns in one process, because machines are noisy; a ratio is of the medians.

The floor counts bytes. In parameter sizes (R read, W written), the least that a step can move:

    R∇ for its norm · Rθ R∇ W(θ+Δ) W(copy of θ) · R(copy) Wθ to put back · R∇ to check it is finite      = 8

AMP moves 9: θ is read once for the copy and once to move. On a GPU without Triton it moves 9 more for a base that is
not fused, because the host does not wait to learn whether a gradient was not finite: 2 to zero such a gradient before
the base's step, and 7 to choose θ after it. (Our kernels then read the flag and nothing else; a fused base is told to
skip.) SAM moves 12 and checks nothing. With `model=` AMP also saves and restores buffers and random states, which are
small and many.

    python benchmarks/wrapper_overhead.py [--steps 60] [--device cpu] [--json out/wrapper_overhead.json]
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import flatmin
from flatmin.core.multi_tensor import has_gradient_kernels
from flatmin_lab import models
from flatmin_lab.system.machine import facts
from machine import command, in_turns, line

FLOOR = 8
COPY = "a copy of the parameters"


class Nothing(Optimizer):
    """A base whose step costs nothing: what remains is the wrapper's own."""

    def __init__(self, params: Any, *, lr: float = 0.1, fused: bool = False, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "fused": fused})
        self._step_supports_amp_scaling = fused

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        pass


def contenders(model: nn.Module, gradients: list[Tensor]) -> dict[str, tuple[Callable[[], object], int]]:
    """Name to (one step, the parameter sizes it moves)."""
    params = list(model.parameters())
    unfused = 18 if params[0].is_cuda and not has_gradient_kernels(torch.float32, params[0].device) else 9

    def hand_over() -> float:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        return 0.0

    def steps(*, fused: bool, within: nn.Module | None) -> Callable[[], object]:
        optimizer = flatmin.AMP(Nothing(params, fused=fused), epsilon=0.05, model=within)
        return lambda: optimizer.step(hand_over)

    runs: dict[str, tuple[Callable[[], object], int]] = {
        "flatmin AMP": (steps(fused=False, within=None), unfused),
        "flatmin AMP, fused base": (steps(fused=True, within=None), 9),
        "flatmin AMP, model=": (steps(fused=False, within=model), unfused),
        "flatmin AMP, fused base, model=": (steps(fused=True, within=model), 9),
    }
    if find_spec("pytorch_optimizer") is None:
        print("pytorch_optimizer is not installed here: its SAM is left out\n")
        return runs
    sam = import_module("pytorch_optimizer").SAM
    sams = {foreach: sam(params, Nothing, rho=0.05, foreach=foreach) for foreach in (None, True)}

    def sam_step(foreach: bool | None) -> None:
        hand_over()
        sams[foreach].step(hand_over)

    return {
        **runs,
        "pytorch_optimizer SAM": (lambda: sam_step(None), 12),
        "pytorch_optimizer SAM, foreach=True": (lambda: sam_step(True), 12),
    }


def measure(steps: int, device: torch.device) -> dict[str, Any]:
    """On the 62 tensors of a PreActResNet18 without biases: 11.2 million numbers."""
    torch.manual_seed(0)
    model = models.build("preactresnet18", bias=False).to(device)
    params = list(model.parameters())
    gradients = [torch.randn_like(param) for param in params]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    size = sum(param.nbytes for param in params)
    runs = contenders(model, gradients)
    runs[COPY] = (lambda: torch._foreach_copy_(copies, gradients), 2)
    times = in_turns({name: step for name, (step, _) in runs.items()}, device, turns=steps)
    bandwidth = 2 * size / times[COPY][1] * 1e3
    rows = {}
    for name, (_, moved) in runs.items():
        low, middle, high = times[name]
        rows[name] = {"ms": middle, "ms_quartiles": [low, high], "parameter_sizes_moved": moved}
    return {
        "parameters": sum(param.numel() for param in params),
        "steps": steps,
        "bandwidth_GB_per_s": bandwidth / 1e9,
        "floor_ms": FLOOR * size / bandwidth * 1e3,
        "rows": rows,
        **facts(device),
    }


def show(result: dict[str, Any]) -> None:
    ours = result["rows"]["flatmin AMP"]["ms"]
    print(f"{result['parameters'] / 1e6:.1f} million parameters, {result['steps']} steps each, in turns")
    print(line(result), end="\n\n")
    print(f"{'':38}{'ms a step':>10}  {'quartiles':>15}{'bytes moved':>13}{'against AMP':>13}")
    for name, row in result["rows"].items():
        low, high = row["ms_quartiles"]
        spread = f"{low:.2f} .. {high:.2f}"
        moved = f"{row['parameter_sizes_moved']} sizes"
        print(f"{name:38}{row['ms']:10.2f}  {spread:>15}{moved:>13}{row['ms'] / ours:12.2f}x")
    bandwidth = f"{result['bandwidth_GB_per_s']:.0f} GB/s"
    print(f"{'floor: ' + str(FLOOR) + ' sizes at the speed of a copy':38}{result['floor_ms']:10.2f}  {bandwidth:>15}")


if __name__ == "__main__":
    command(__doc__, measure, show, counted="steps", default=60, json_file="out/wrapper_overhead.json")
