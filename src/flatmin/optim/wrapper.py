"""An optimizer that wraps another and shares its state, groups, checkpoints and copies.

A wrapper that copies its base's groups must be linked to it again after every load, deepcopy or added group, and each
forgotten link is a learning rate that no longer changes. So nothing is copied: `state`, `param_groups` and `defaults`
are properties that return the base's, and all other attributes are looked up in the base. The wrapper's own
hyper-parameters (ε, ζ) are in the groups beside lr and weight decay, where schedulers change them, checkpoints save
them and each group may have its own.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar
from weakref import WeakMethod, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from flatmin.ball import BALLS, NORMS, Ball, Norm
from flatmin.core.messages import describe
from flatmin.core.tensors import ORDINARY_TYPES

Group = dict[str, Any]
Wrapper = TypeVar("Wrapper", bound="OptimizerWrapper")  # Self needs Python 3.11
Arguments = ParamSpec("Arguments")

_NOT_COPIED = ("step", "last", "maximises", "zeroed", "grad_scale", "found_inf")


class OptimizerWrapper(Optimizer):
    """An optimizer around `base`, with its own hyper-parameters in the base's groups."""

    base: Optimizer
    inner_iter: int
    ball: Ball
    norm: Norm
    sync_perturbation: bool = True
    scheduled_radii: Sequence[float] = ()  # what the last RadiusScheduler lets the groups' ε grow to
    radius_schedule: object = None  # all that its next steps depend on, for ranks to compare; None if it is constant

    _model: nn.Module | None
    _hyperparameters: ClassVar[tuple[str, ...]]
    _shown: ClassVar[tuple[str, ...]] = ("inner_iter", "ball", "norm")
    _settings: ClassVar[tuple[str, ...]] = ("base", "inner_iter", "ball", "norm", "model")

    def __init__(self, base: Optimizer, hyperparameters: dict[str, float], **settings: Any) -> None:
        _check_base(base, type(self).__name__, hyperparameters)
        _check_settings(base, **settings)
        for values in (hyperparameters, *base.param_groups):
            check_hyperparameters(base, {key: values[key] for key in hyperparameters if key in values}, waits=True)
        for key, value in ((key, _plain_number(value)) for key, value in hyperparameters.items()):
            earlier = base.defaults.get(key)  # set by an earlier wrapper: not a group's own value
            base.defaults[key] = value
            for group in base.param_groups:
                group[key] = value if group.get(key, earlier) == earlier else _plain_number(group[key])
            if earlier is not None and all(group[key] != value for group in base.param_groups):
                found = ", ".join(str(group[key]) for group in base.param_groups)
                warnings.warn(
                    f"{key}={value} changes nothing: all groups of this {type(base).__name__}, which was wrapped "
                    f"before, keep their own ({found}), perhaps a scheduler's; to change it, set group[{key!r}] = "
                    f"{value} for each group in optimizer.param_groups",
                    RuntimeWarning,
                    stacklevel=4,  # where AMP(…) is written
                )
        self._initialise({"base": base, **settings})

    def _initialise(self, attributes: Mapping[str, Any]) -> None:
        """Set up a new instance or a copy: its settings, torch's hook tables, and what a step keeps."""
        self._itself: ref[Any] = ref(self)
        for key, value in attributes.items():
            setattr(self, key, value)
        # of groups that do not say so themselves: torch's optimizers have it there, pytorch_optimizer's on themselves
        self.maximises = getattr(self.base, "maximize", False) is True
        super().__setstate__({})  # not Optimizer.__init__, which would create its own groups and state
        self._group_watchers: list[WeakMethod[Any]] = []
        self._make_step_state()

    def _make_step_state(self) -> None:
        """Create what a step keeps until the next one: none of it is copied or saved."""

    def behind_proxy(self: Wrapper) -> Wrapper:
        """The optimizer itself, or the one inside a proxy that imitates its class, as Lightning Fabric's does.

        A proxy finds methods in the class and attributes in the optimizer, so an attribute that a method sets would
        stay on the proxy, unseen by the step. Methods that set attributes therefore run on what this returns.
        """
        optimizer: Wrapper | None = self._itself()  # a proxy does not have its own, and finds the optimizer's
        assert optimizer is not None
        if optimizer is not self:
            for name in (name for name in self._settings if name in vars(self)):
                raise RuntimeError(
                    f"{name} is read from the optimizer itself, got {getattr(self, name)!r} on the "
                    f"{type(self).__name__} around it; set optimizer.optimizer.{name}"
                )
        return optimizer

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def param_groups(self) -> list[Group]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self.base.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    @property
    def model(self) -> nn.Module | None:
        """The model whose buffers and random numbers a step restores; a trainer may set it to its prepared model."""
        return self._model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        _check_model(self.base, model)
        optimizer = self.behind_proxy()
        optimizer._model = model
        optimizer._attach_model(model)

    def _attach_model(self, model: nn.Module | None) -> None:
        """Called with every new model."""

    if not TYPE_CHECKING:  # so type checkers find misspelt names

        def __getattr__(self, name: str) -> Any:
            """What the base has beyond torch's interface: schedule-free's `train()`, timm's `sync_lookahead()` …"""
            if name.startswith("_") or name == "base":
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return getattr(self.base, name)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle contains: nothing temporary (hooks, a scheduler's patch, a step's copies)."""
        of_a_subclass = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return {key: getattr(self, key) for key in self._settings} | {
            key: value for key, value in of_a_subclass.items() if key not in (*self._settings, *_NOT_COPIED)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._initialise(state)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={getattr(self, key)!r}" for key in self._shown)
        return f"{type(self).__name__}({settings}) around {self.base!r}"

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of its base alone, which leaves ε and ζ as they are."""
        before = [{key: group[key] for key in self._hyperparameters if key in group} for group in self.param_groups]
        self.base.load_state_dict(state_dict)
        for group, known in zip(self.param_groups, before, strict=True):
            for key, value in known.items():
                group.setdefault(key, value)
            check_hyperparameters(self.base, {key: group[key] for key in known}, waits=True)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; one without an ε gets the constructor's, or the current one if that changes over time."""
        given = {key: param_group[key] for key in self._hyperparameters if key in param_group}
        check_hyperparameters(self.base, given, waits=True)
        has_radius = "epsilon" in param_group
        for key in self._hyperparameters:
            if key in param_group:
                param_group[key] = _plain_number(param_group[key])
        self.base.add_param_group(param_group)
        for watcher in self.behind_proxy()._group_watchers:
            if (tell := watcher()) is not None:
                tell(self.base.param_groups[-1], has_radius)

    def watch_groups(self, tell: Callable[[Group, bool], None]) -> None:
        """Call `tell` with each group that is added, and whether it came with an ε; a method, held weakly."""
        watchers = self.behind_proxy()._group_watchers
        watchers[:] = [*(watcher for watcher in watchers if watcher() is not None), WeakMethod(tell)]

    def group_watchers(self) -> list[object]:
        """The objects whose methods `watch_groups` was given, as long as they are in use."""
        found = [watcher() for watcher in self.behind_proxy()._group_watchers]
        return [tell.__self__ for tell in found if tell is not None]

    def register_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self.base.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self.base.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self.base.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self.base.register_load_state_dict_post_hook(hook, prepend)

    def check_groups(self) -> None:
        """Check the groups' values, which may come from anywhere: a scheduler, a checkpoint, a user."""
        for group in self.param_groups:
            check_hyperparameters(
                self.base, {key: group.setdefault(key, self.defaults[key]) for key in self._hyperparameters}
            )
        epsilons = [group["epsilon"] for group in self.param_groups]
        radii = {epsilon for epsilon in epsilons if not isinstance(epsilon, Tensor) and epsilon > 0}
        if self.ball == "global" and len(radii) > 1:
            raise ValueError(
                f'ball="global" has one radius, got epsilon={", ".join(map(str, sorted(radii)))} in the groups; '
                'give all groups one value (or 0), or use ball="group"'
            )


def check_call(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorates a wrapper's constructor: a wrong call gets a more specific error than Python's own."""
    parameters = signature(init).parameters
    known = [name for name in parameters if name not in ("self", "base")]

    @wraps(init)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        name = type(args[0]).__name__
        example = f"{name}(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1)"
        if len(args) > 2:
            wrong = args[2] if isinstance(args[2], Real) else describe(args[2])
            raise TypeError(f"{name} takes its settings by keyword, got {wrong} by position; write {example}")
        if unknown := [key for key in kwargs if key not in parameters]:
            hint = "SAM's rho is epsilon here" if "rho" in unknown else f"choose from {', '.join(known)}"
            raise TypeError(f"{name} has no setting {', '.join(unknown)}; {hint}, as in {example}")
        if len(args) < 2 and "base" not in kwargs:
            raise TypeError(f"{name} wraps an optimizer, got none; write {example}")
        if "epsilon" not in kwargs:
            raise TypeError(f"{name} needs epsilon, the radius of the ball; write {example}")
        init(*args, **kwargs)

    return checked


def whole_number(name: str, value: object, *, least: int = 0) -> int:
    """`value` as an int of at least `least`.

    >>> whole_number("inner_iter", 1.5)
    Traceback (most recent call last):
    ValueError: inner_iter must be a whole number of at least 0, got 1.5
    """
    try:
        number = least - 1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def check_hyperparameters(base: Optimizer, values: Mapping[str, Any], *, waits: bool = False) -> None:
    """`waits`: may the host wait for a GPU, to read a tensor there? Not in a step."""
    for name, given in values.items():
        if isinstance(given, Tensor) and given.dim():
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(given.shape)}")
        if isinstance(given, Tensor) and not _is_readable(given, waits=waits):
            continue
        value = given.item() if isinstance(given, Tensor) else given
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and 0 <= float(value) < float("inf")):
            is_text = name == "epsilon" and isinstance(value, str)
            way_out = (
                '; an automatic radius is that of a whole flatmin.AMP: AMP(base, epsilon="auto")' if is_text else ""
            )
            raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}{way_out}")
    if _is_positive(values.get("epsilon", 0)) and evaluates_closure(base):
        raise ValueError(
            f"{type(base).__name__} evaluates its closure itself, at points it chooses, and cannot be perturbed, got "
            f"epsilon={values['epsilon']}; use epsilon=0 with it, or another base such as SGD"
        )
    if _is_positive(values.get("epsilon", 0)) and _steps_in_backward(base):
        raise ValueError(
            f"{type(base).__name__} with overlap_with_ddp=True steps within every backward pass and cannot be "
            f"perturbed, got epsilon={values['epsilon']}; leave out overlap_with_ddp, or use epsilon=0"
        )


def _is_readable(number: Tensor, *, waits: bool) -> bool:
    has_value = type(number) in ORDINARY_TYPES and not number.is_meta
    return has_value and (waits or number.is_cpu)


def evaluates_closure(base: Optimizer) -> bool:
    """Does its step need a closure? LBFGS evaluates it at several points."""
    given = signature(type(base).step).parameters.get("closure")
    return given is not None and given.default is Parameter.empty


def _steps_in_backward(base: Optimizer) -> bool:
    """Does a DDP hook take its steps? torch's ZeroRedundancyOptimizer has no public name for this mode."""
    return bool(getattr(base, "_overlap_with_ddp", False))


def _check_base(base: object, name: str, hyperparameters: Iterable[str]) -> None:
    if isinstance(base, OptimizerWrapper):
        raise TypeError(f"{name} cannot wrap {type(base).__name__}; wrap the optimizer inside it, `optimizer.base`")
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"{name} wraps an instance of torch.optim.Optimizer, got {describe(base)}; "
            f"write {name}(torch.optim.SGD(model.parameters(), lr=0.1), epsilon=0.1)"
        )
    if not hasattr(base, "defaults"):  # it did not call Optimizer.__init__
        raise TypeError(
            f"{name} wraps an optimizer that has defaults, got {describe(base)} without; wrap the optimizer "
            f"inside it, as in PostLocalSGDOptimizer({name}(optimizer, epsilon=0.1), averager)"
        )
    for key in signature(type(base)).parameters.keys() & set(hyperparameters):
        raise ValueError(
            f"{name} keeps {key} in the groups of its base, but {type(base).__name__} has its own {key} there; "
            "rename it in the base"
        )


def _check_settings(
    base: Optimizer, *, inner_iter: int, ball: object, norm: object, model: object, sync_perturbation: object = True
) -> None:
    if ball not in BALLS:
        raise ValueError(f"unknown ball {ball!r}; choose from {', '.join(BALLS)}")
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; choose from {', '.join(NORMS)}")
    if not isinstance(sync_perturbation, bool):
        raise TypeError(f"sync_perturbation must be True or False, got {sync_perturbation!r}")
    _check_model(base, model)


def _check_model(base: Optimizer, model: object) -> None:
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {describe(model)}")
    optimized = {id(p) for group in base.param_groups for p in group["params"]}
    if optimized and not any(id(p) in optimized for p in model.parameters()):
        raise ValueError(
            f"model must be the one that the optimizer trains, got a {type(model).__name__} with none of its parameters"
        )


def _plain_number(value: Any) -> Any:
    """As torch.load reads it: a numpy number in a checkpoint would need `weights_only=False`."""
    return value if isinstance(value, Tensor) or type(value) in (int, float) else float(value)


def _is_positive(epsilon: Any) -> bool:
    return isinstance(epsilon, Tensor) or epsilon > 0
