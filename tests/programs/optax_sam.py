"""optax's `contrib.sam` with a clipped gradient as its adversary, as a program: a file to write its answers to.

A program of its own, because a process that has run JAX warns at every fork, and other tests fork.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS, ROWS, INPUTS, HIDDEN = 100, 32, 5, 7
EPSILON = 0.1
RATES = (0.01, 1.0, 100.0)  # inside the ball, and at its edge
BASES = ("sgd", "momentum", "adam")


def problem() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    weights = {"first": random.normal(size=(INPUTS, HIDDEN)), "last": random.normal(size=(HIDDEN, 1))}
    return weights, random.normal(size=(STEPS, ROWS, INPUTS)), random.normal(size=(STEPS, ROWS, 1))


def main(path: str) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    jax.config.update("jax_enable_x64", True)
    bases: dict[str, Callable[[], Any]] = {
        "sgd": lambda: optax.sgd(0.1),
        "momentum": lambda: optax.sgd(0.05, momentum=0.9),
        "adam": lambda: optax.adam(1e-2),
    }

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2)

    measured = jax.jit(jax.value_and_grad(loss_of))

    def trained(base: str, rate: float) -> dict[str, np.ndarray]:
        """Its adversary climbs: `chain` scales and clips the gradient, and sgd with a rate of one subtracts it."""
        weights, x, y = problem()
        ascent = optax.chain(optax.scale(rate), optax.clip_by_global_norm(EPSILON), optax.sgd(1.0))
        sam = optax.contrib.sam(bases[base](), ascent, sync_period=2, opaque_mode=True, reset_state=False)
        params = {name: jnp.asarray(weight) for name, weight in weights.items()}
        state, losses = sam.init(params), []
        for batch, labels in zip(x, y, strict=True):

            def gradient(params: Any, _: object, batch: Any = batch, labels: Any = labels) -> Any:
                return measured(params, batch, labels)[1]

            loss, at_params = measured(params, batch, labels)
            losses.append(float(loss))
            updates, state = sam.update(at_params, state, params, grad_fn=gradient)
            params = optax.apply_updates(params, updates)
        return {"losses": np.array(losses), **{name: np.asarray(param) for name, param in params.items()}}

    cases = {f"{base} {rate}": trained(base, rate) for base in BASES for rate in RATES}
    arrays: dict[str, Any] = {f"{case} {name}": array for case, found in cases.items() for name, array in found.items()}
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
