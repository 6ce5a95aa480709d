"""AMP with one step of ascent is optax's `contrib.sam` with a clipped gradient as its adversary, over many steps."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flatmin

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

STEPS, ROWS, INPUTS, HIDDEN = 100, 32, 5, 7
BASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[], Any]]] = {
    "sgd": (lambda params: torch.optim.SGD(params, lr=0.1), lambda: optax.sgd(0.1)),
    "momentum": (
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        lambda: optax.sgd(0.05, momentum=0.9),
    ),
    "adam": (lambda params: torch.optim.Adam(params, lr=1e-2), lambda: optax.adam(1e-2)),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def problem() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    weights = {"first": random.normal(size=(INPUTS, HIDDEN)), "last": random.normal(size=(HIDDEN, 1))}
    return weights, random.normal(size=(STEPS, ROWS, INPUTS)), random.normal(size=(STEPS, ROWS, 1))


def with_optax(epsilon: float, rate: float, make_base: Callable[[], Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Its adversary climbs: `chain` scales and clips the gradient, and sgd with a rate of one subtracts it."""
    weights, x, y = problem()
    ascent = optax.chain(optax.scale(rate), optax.clip_by_global_norm(epsilon), optax.sgd(1.0))
    sam = optax.contrib.sam(make_base(), ascent, sync_period=2, opaque_mode=True, reset_state=False)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2)

    params = {name: jnp.asarray(weight) for name, weight in weights.items()}
    state, losses = sam.init(params), []
    for batch, labels in zip(x, y, strict=True):

        def gradient(params: Any, _: object, batch: Any = batch, labels: Any = labels) -> Any:
            return jax.grad(loss_of)(params, batch, labels)

        losses.append(float(loss_of(params, batch, labels)))
        updates, state = sam.update(gradient(params, 0), state, params, grad_fn=gradient)
        params = optax.apply_updates(params, updates)
    return losses, {name: np.asarray(param) for name, param in params.items()}


def with_flatmin(
    epsilon: float, rate: float, make_base: Callable[..., torch.optim.Optimizer]
) -> tuple[list[float], dict[str, np.ndarray]]:
    weights, x, y = problem()
    params = {name: torch.nn.Parameter(torch.from_numpy(weight)) for name, weight in weights.items()}
    optimizer = flatmin.AMP(make_base(params.values()), epsilon=epsilon, inner_lr=rate)
    losses = []
    for batch, labels in zip(map(torch.from_numpy, x), map(torch.from_numpy, y), strict=True):

        def closure(batch: Tensor = batch, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = (torch.tanh(batch @ params["first"]) @ params["last"] - labels).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return losses, {name: param.detach().numpy() for name, param in params.items()}


@pytest.mark.parametrize("rate", [0.01, 1.0, 100.0])  # inside the ball, and at its edge
@pytest.mark.parametrize("base", BASES)
def test_a_hundred_steps_equal_optax(base: str, rate: float) -> None:
    ours, theirs = BASES[base]
    losses, weights = with_flatmin(0.1, rate, ours)
    expected, there = with_optax(0.1, rate, theirs)
    np.testing.assert_allclose(losses, expected, rtol=1e-11, atol=1e-12)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, there[name], rtol=1e-10, atol=1e-11)
