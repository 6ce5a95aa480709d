"""What `step` and `perturbed()` may be called with, and what a pass must leave behind: errors with the way out."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.amp import GradScaler

from flatmin.core.messages import describe


def usable_scaler(
    name: str, closure: object, misplaced: tuple[object, ...], scaler: GradScaler | None
) -> GradScaler | None:
    """Check a call of the optimizer called `name`; returns the scaler, or None if it is disabled."""
    closures = closure if isinstance(closure, list | tuple) else [] if closure is None else [closure]
    if isinstance(closure, list | tuple) and not closure:
        raise ValueError("step takes a closure, or a list with one per micro-batch, got an empty list")
    if misplaced or not all(map(callable, closures)):
        wrong = misplaced[0] if misplaced else next(one for one in closures if not callable(one))
        raise TypeError(
            f"{name} takes a closure by position and a GradScaler by keyword, got {describe(wrong)} "
            "by position; write step(closure, scaler=scaler) or perturbed(scaler=scaler)"
        )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {describe(scaler)}")
    return scaler if scaler is not None and scaler.is_enabled() else None


def check_ascent(name: str, closure: object, ascent: object, *, ascends: bool) -> None:
    """Of step(closure, ascent=…)."""
    if not ascends:
        raise TypeError(f"{name} draws Δ at random and has no ascent; leave out ascent=")
    if not callable(ascent) or closure is None or isinstance(closure, list | tuple):
        raise TypeError(
            "ascent must be a closure on less data, beside the step's own: step(closure, ascent=closure_on_less), "
            f"got {describe(ascent)} beside {describe(closure)}"
        )


def check_losses(closure: object, losses: object) -> None:
    """Of step(losses=…)."""
    if closure is not None:
        raise TypeError("losses= is for a step after perturbed() blocks; a closure returns its loss: leave it out")
    if not (isinstance(losses, tuple | list) and len(losses) == 2 and all(isinstance(x, Tensor) for x in losses)):
        raise TypeError(
            "losses must be two tensors, the loss at θ and that in the last perturbed() block: "
            f"step(losses=(loss, loss_perturbed)), got {describe(losses)}"
        )


def gradient_error(first: Tensor | None, params: Sequence[Tensor], model: nn.Module | None, where: str) -> RuntimeError:
    """After the pass `where`: its first gradient cannot be used, or there is none."""
    if first is not None:
        return RuntimeError(
            f"the gradients of {where} have a graph (of create_graph=True, or of torch.func.grad at parameters that "
            "require gradients); detach them, or, if the base differentiates them again, use epsilon=0 with it: the "
            "weights have moved by the time it steps"
        )
    check_still_of_model(params, model, f"in {where}")
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params):
        return RuntimeError(
            f"no parameter has a gradient after {where}, but a post-accumulate-grad hook, which may have taken it: "
            "a step within the backward pass cannot be perturbed; remove the hook"
        )
    return RuntimeError(
        f"no parameter got a gradient in {where}; call backward() inside it, on a loss of these parameters"
    )


def check_still_of_model(params: Sequence[Tensor], model: nn.Module | None, where: str) -> None:
    """Without a gradient: has something replaced the model's parameters?"""
    if model is not None and {id(p) for p in params}.isdisjoint(map(id, model.parameters())):
        raise RuntimeError(
            f"no parameter got a gradient {where}, because the optimizer's are no longer the model's; create the "
            "optimizer last, after fully_shard(), .to() and the like"
        )
