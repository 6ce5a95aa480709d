"""AMP with one step of ascent is optax's `contrib.sam` with a clipped gradient as its adversary, over many steps."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

import flatmin
from tests import PYTHONPATH
from tests.programs.optax_sam import BASES, EPSILON, RATES, problem

pytestmark = pytest.mark.skipif(find_spec("optax") is None, reason="needs optax")
MAKE_BASE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("optax") / "answers.npz"
    program = [sys.executable, "-m", "tests.programs.optax_sam", str(path)]
    subprocess.run(program, env={**os.environ, "PYTHONPATH": PYTHONPATH}, check=True)
    with np.load(path) as answers:
        return dict(answers)


def trained(rate: float, make_base: Callable[..., torch.optim.Optimizer]) -> dict[str, np.ndarray]:
    weights, x, y = problem()
    params = {name: torch.nn.Parameter(torch.from_numpy(weight)) for name, weight in weights.items()}
    optimizer = flatmin.AMP(make_base(params.values()), epsilon=EPSILON, inner_lr=rate)
    losses = []
    for batch, labels in zip(map(torch.from_numpy, x), map(torch.from_numpy, y), strict=True):

        def closure(batch: Tensor = batch, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = (torch.tanh(batch @ params["first"]) @ params["last"] - labels).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return {"losses": np.array(losses), **{name: param.detach().numpy() for name, param in params.items()}}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("base", BASES)
def test_a_hundred_steps_equal_optax(theirs: dict[str, np.ndarray], base: str, rate: float) -> None:
    for name, ours in trained(rate, MAKE_BASE[base]).items():
        rtol, atol = (1e-11, 1e-12) if name == "losses" else (1e-10, 1e-11)
        np.testing.assert_allclose(ours, theirs[f"{base} {rate} {name}"], rtol=rtol, atol=atol)
