"""Bad input gets one line that states the rule, the value and the way out; the weights stay as they were."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

import flatmin
from tests.support.cases import METHODS, Setup, same, setup

AMP: Any = flatmin.AMP  # so that the type checker lets the mistakes below be made
RMP: Any = flatmin.RMP


class OwnEpsilon(torch.optim.SGD):
    """Someone's optimizer in whose groups `epsilon` means something else."""

    def __init__(self, params: Any, epsilon: float = 1e-8) -> None:
        super().__init__(params)
        self.defaults["epsilon"] = self.param_groups[0]["epsilon"] = epsilon


class Averaging(Optimizer):
    """Does not call Optimizer.__init__, like torch's PostLocalSGDOptimizer."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim, self.param_groups = optim, optim.param_groups


def sgd(case: Setup) -> SGD:
    return SGD(case.model.parameters(), lr=0.1)


CONSTRUCTORS: dict[str, tuple[Callable[[Setup], Any], str]] = {
    "epsilon by position": (
        lambda case: AMP(sgd(case), 0.1),
        r"AMP takes its settings by keyword, got 0.1 by position; write AMP\(.*, epsilon=0.1\)",
    ),
    "the model by position": (
        lambda case: AMP(sgd(case), case.model),
        "AMP takes its settings by keyword, got an object of type .* by position",
    ),
    "no base": (lambda case: AMP(epsilon=0.1), "AMP wraps an optimizer, got none; write AMP"),
    "no epsilon": (lambda case: RMP(sgd(case)), "RMP needs epsilon, the radius of the ball; write RMP"),
    "sam's name": (lambda case: AMP(sgd(case), rho=0.05), "AMP has no setting rho; SAM's rho is epsilon here"),
    "the base's settings": (
        lambda case: AMP(SGD, lr=0.1, epsilon=0.1),
        r"AMP has no setting lr; choose from epsilon, inner_lr, .* as in AMP\(torch.optim.SGD\(.*, lr=0.1\)",
    ),
    "negative epsilon": (
        lambda case: AMP(sgd(case), epsilon=-0.1),
        "epsilon must be a finite number of at least 0, got -0.1",
    ),
    "infinite epsilon": (lambda case: AMP(sgd(case), epsilon=float("inf")), "epsilon .* finite .* got inf"),
    "nan epsilon": (lambda case: RMP(sgd(case), epsilon=float("nan")), "epsilon .* finite .* got nan"),
    "text epsilon": (lambda case: AMP(sgd(case), epsilon="0.1"), "epsilon .* number .* got '0.1'"),
    "true epsilon": (lambda case: AMP(sgd(case), epsilon=True), "epsilon .* number .* got True"),
    "vector epsilon": (lambda case: AMP(sgd(case), epsilon=torch.ones(2)), r"one number, got .* shape \(2,\)"),
    "negative tensor epsilon": (
        lambda case: AMP(sgd(case), epsilon=torch.tensor(-0.5)),
        "epsilon must be a finite number of at least 0, got -0.5",
    ),
    "nan tensor epsilon": (lambda case: RMP(sgd(case), epsilon=torch.tensor(torch.nan)), "epsilon .* got nan"),
    "negative rate": (lambda case: AMP(sgd(case), epsilon=0.1, inner_lr=-1), "inner_lr .* at least 0, got -1"),
    "nan rate": (lambda case: AMP(sgd(case), epsilon=0.1, inner_lr=float("nan")), "inner_lr .* got nan"),
    "half a pass": (
        lambda case: AMP(sgd(case), epsilon=0.1, inner_iter=1.5),
        "inner_iter must be a whole number of at least 0, got 1.5",
    ),
    "auto": (
        lambda case: RMP(sgd(case), epsilon="auto"),
        r"got 'auto'; an automatic radius is that of a whole .* AMP\(base, epsilon=\"auto\"\)",
    ),
    "negative passes": (lambda case: AMP(sgd(case), epsilon=0.1, inner_iter=-1), "inner_iter .* got -1"),
    "true passes": (lambda case: AMP(sgd(case), epsilon=0.1, inner_iter=True), "inner_iter .* got True"),
    "unknown ball": (
        lambda case: AMP(sgd(case), epsilon=0.1, ball="layer"),
        "unknown ball 'layer'; choose from global, group, tensor",
    ),
    "unknown norm": (lambda case: RMP(sgd(case), epsilon=0.1, norm="l1"), "unknown norm 'l1'; .* l2, linf"),
    "model is a list": (lambda case: AMP(sgd(case), epsilon=0.1, model=[1]), "model .* got .* list"),
    "model is a class": (lambda case: AMP(sgd(case), epsilon=0.1, model=nn.Linear), "model .* got the class Linear"),
    "model is another": (
        lambda case: AMP(sgd(case), epsilon=0.1, model=nn.Linear(1, 1)),
        "model must be the one that the optimizer trains, got a Linear with none of its parameters",
    ),
    "generator is a seed": (lambda case: RMP(sgd(case), epsilon=0.1, generator=3), "generator .* got int"),
    "base is a class": (
        lambda case: AMP(SGD, epsilon=0.1),
        r"instance of torch.optim.Optimizer, got the class SGD; write AMP\(torch.optim.SGD",
    ),
    "base is parameters": (
        lambda case: AMP(case.model.parameters(), epsilon=0.1),
        "got an object of type generator; write",
    ),
    "amp around amp": (
        lambda case: AMP(AMP(sgd(case), epsilon=0.1), epsilon=0.1),
        "AMP cannot wrap AMP; wrap the optimizer inside it, `optimizer.base`",
    ),
    "rmp around amp": (
        lambda case: RMP(AMP(sgd(case), epsilon=0.1), epsilon=0.1),
        "RMP cannot wrap AMP",
    ),
    "a base with an epsilon of its own": (
        lambda case: AMP(OwnEpsilon(case.model.parameters()), epsilon=0.1),
        "AMP keeps epsilon in the groups of its base, but OwnEpsilon has its own epsilon there; rename it",
    ),
    "a base around another, without its defaults": (
        lambda case: AMP(Averaging(sgd(case)), epsilon=0.1),
        r"that has defaults, got an object of type Averaging without; .* PostLocalSGDOptimizer\(AMP\(optimizer",
    ),
    "lbfgs": (lambda case: AMP(LBFGS(case.model.parameters()), epsilon=0.1), "LBFGS .* got epsilon=0.1; use"),
    "bad group": (
        lambda case: AMP(SGD([{"params": case.model.parameters(), "epsilon": -2}], lr=0.1), epsilon=0.1),
        "epsilon .* got -2",
    ),
    "bad tensor group": (
        lambda case: AMP(SGD([{"params": case.model.parameters(), "epsilon": torch.tensor(-2)}], lr=0.1), epsilon=0.1),
        "epsilon .* got -2",
    ),
    "bad added tensor": (
        lambda case: AMP(sgd(case), epsilon=0.1).add_param_group({"params": [], "inner_lr": torch.tensor(torch.inf)}),
        "inner_lr .* got inf",
    ),
    "bad added group": (
        lambda case: AMP(sgd(case), epsilon=0.1).add_param_group({"params": [], "inner_lr": -3}),
        "inner_lr .* got -3",
    ),
}


@pytest.mark.parametrize("mistake", CONSTRUCTORS)
def test_a_wrong_argument_is_named_in_one_line(mistake: str) -> None:
    case = setup()
    theta = case.weights()
    make, message = CONSTRUCTORS[mistake]
    with pytest.raises((TypeError, ValueError), match=message) as error:
        make(case)
    assert "\n" not in str(error.value)
    assert same(case.weights(), theta)


def test_a_refused_base_is_left_as_it_was() -> None:
    case = setup()
    base = sgd(case)
    defaults, group = dict(base.defaults), dict(base.param_groups[0])
    with pytest.raises(ValueError, match="inner_lr"):
        flatmin.AMP(base, epsilon=0.1, inner_lr=-1)
    assert base.defaults == defaults
    assert base.param_groups[0] == group


CALLS: dict[str, tuple[Callable[[Setup, Any], Any], str]] = {
    "no closure": (
        lambda case, optimizer: optimizer.step(),
        r"step needs a closure .* use `with optimizer.perturbed\(\):`",
    ),
    "scaler as closure": (
        lambda case, optimizer: optimizer.step(GradScaler("cpu")),
        r"by keyword, got .* GradScaler by position; write step\(closure, scaler=scaler\)",
    ),
    "scaler by position": (
        lambda case, optimizer: optimizer.step(case.closure(optimizer), GradScaler("cpu")),
        r"by keyword, got .* GradScaler by position",
    ),
    "scaler by position in a block": (
        lambda case, optimizer: optimizer.perturbed(GradScaler("cpu")).__enter__(),
        r"by keyword, got .* GradScaler by position; .* perturbed\(scaler=scaler\)",
    ),
    "not a scaler": (
        lambda case, optimizer: optimizer.step(case.closure(optimizer), scaler=2.0),
        "scaler must be a torch.amp.GradScaler, got .* float",
    ),
    "a loss for a closure": (lambda case, optimizer: optimizer.step(case.loss()), "takes a closure .* got .* Tensor"),
}


@pytest.mark.parametrize("mistake", CALLS)
@pytest.mark.parametrize("kind", ["amp", "rmp"])
def test_a_wrong_call_is_named_in_one_line(kind: str, mistake: str) -> None:
    case = setup()
    optimizer = METHODS[kind](sgd(case))
    case.loss().backward()
    theta = case.weights()
    call, message = CALLS[mistake]
    with pytest.raises(TypeError, match=message) as error:
        call(case, optimizer)
    assert "\n" not in str(error.value)
    assert same(case.weights(), theta)
    optimizer.step(case.closure(optimizer))
    assert not same(case.weights(), theta)


@pytest.mark.parametrize(("key", "value"), [("epsilon", -1.0), ("epsilon", float("nan")), ("inner_lr", float("inf"))])
def test_a_bad_value_that_came_into_a_group_later_is_named_at_the_step(key: str, value: float) -> None:
    case = setup()
    optimizer = flatmin.AMP(sgd(case), epsilon=0.1)
    optimizer.param_groups[0][key] = value
    theta = case.weights()
    with pytest.raises(ValueError, match=f"{key} must be a finite number of at least 0, got {value}"):
        optimizer.step(case.closure(optimizer))
    assert same(case.weights(), theta)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["epsilon", "inner_lr"])
def test_a_bad_value_of_a_tensor_is_named_at_the_step_even_if_it_was_changed_in_place(key: str, value: float) -> None:
    case = setup()
    optimizer = flatmin.AMP(sgd(case), epsilon=torch.tensor(0.1), inner_lr=torch.tensor(1.0))  # type: ignore[arg-type]
    optimizer.step(case.closure(optimizer))
    optimizer.param_groups[0][key].fill_(value)
    theta = case.weights()
    with pytest.raises(ValueError, match=f"{key} must be a finite number of at least 0, got {value}"):
        optimizer.step(case.closure(optimizer))
    assert same(case.weights(), theta)


def test_a_bad_value_of_a_tensor_in_a_checkpoint_is_named_when_it_is_loaded() -> None:
    case = setup()
    optimizer = flatmin.AMP(sgd(case), epsilon=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["epsilon"] = torch.tensor(-0.25)
    with pytest.raises(ValueError, match=r"epsilon must be a finite number of at least 0, got -0.25"):
        optimizer.load_state_dict(saved)


def test_a_tensor_without_a_value_is_not_read() -> None:
    optimizer = AMP(sgd(setup()), epsilon=torch.tensor(0.1, device="meta"))
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_global_ball_with_unequal_radii_names_the_group_ball() -> None:
    case = setup()
    first, second = case.layers()
    optimizer = flatmin.AMP(SGD([{"params": first}, {"params": second, "epsilon": 0.3}], lr=0.1), epsilon=0.1)  # type: ignore[arg-type]
    theta = case.weights()
    with pytest.raises(ValueError, match=r'one radius, got epsilon=0.1, 0.3 in the groups; .* use ball="group"'):
        optimizer.step(case.closure(optimizer))
    assert same(case.weights(), theta)
    optimizer.param_groups[1]["epsilon"] = 0.0
    optimizer.step(case.closure(optimizer))
    assert not same(case.weights(), theta)


def test_lbfgs_works_with_epsilon_zero_and_is_refused_when_it_rises() -> None:
    case = setup()
    optimizer = flatmin.AMP(LBFGS(case.model.parameters(), lr=0.1), epsilon=0)
    theta = case.weights()
    optimizer.step(case.closure(optimizer))
    assert not same(case.weights(), theta)
    optimizer.param_groups[0]["epsilon"] = 0.1
    with pytest.raises(ValueError, match="LBFGS"):
        optimizer.step(case.closure(optimizer))


def test_sparse_gradients_are_refused_unless_their_group_has_epsilon_zero() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = head(table(torch.tensor([1, 3, 1]))).square().sum()
        loss.backward()
        return loss

    for base in (SGD([*table.parameters(), *head.parameters()], lr=0.1), SparseAdam(list(table.parameters()))):
        optimizer = flatmin.AMP(base, epsilon=0.1)
        theta = [table.weight.detach().clone()]
        with pytest.raises(ValueError, match=r"dense gradients, got a sparse one .* \(5, 3\); use sparse=False"):
            optimizer.step(closure)
        assert same([table.weight.detach()], theta)
    optimizer = flatmin.AMP(SGD(table.parameters(), lr=0.1), epsilon=0.0)
    optimizer.add_param_group({"params": head.parameters(), "epsilon": 0.1})
    optimizer.step(closure)
    assert not same([table.weight.detach()], theta)
    assert not optimizer.last.skipped
    with torch.no_grad():
        head.weight.fill_(float("nan"))
    theta = [table.weight.detach().clone()]
    optimizer.step(closure)
    assert optimizer.last.skipped
    assert same([table.weight.detach()], theta)


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_a_backward_pass_before_the_step_does_not_do_for_the_closures_own(inner_iter: int) -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_iter=inner_iter)
    theta, calls = case.weights(), 0

    def once() -> Tensor:
        nonlocal calls
        calls += 1
        loss = case.loss()
        if calls == 1:
            loss.backward()
        return loss

    loss = case.loss()
    loss.backward()
    for closure in (lambda: loss, once):
        with pytest.raises(RuntimeError, match=r"no parameter got a gradient in the closure; call backward"):
            optimizer.step(closure)
        assert same(case.weights(), theta)


def test_a_gradient_that_a_hook_takes_is_told_apart_from_a_missing_backward() -> None:
    case = setup()
    for param in case.model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    with pytest.raises(RuntimeError, match=r"a post-accumulate-grad hook, .* cannot be perturbed; remove the hook"):
        optimizer.step(case.closure(optimizer))


@pytest.mark.parametrize("device", ["cpu", "meta"])  # a model made on "meta" gets its weights from to_empty()
def test_parameters_that_are_the_models_no_more_are_told_apart_from_a_missing_backward(device: str) -> None:
    case = setup()
    weights = copy.deepcopy(case.model.state_dict())
    case.model.to(device)
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, model=case.model)
    case.model.load_state_dict(weights, assign=True)
    with pytest.raises(RuntimeError, match="are no longer the model's; create the optimizer last"):
        optimizer.step(case.closure(optimizer))
    case.loss().backward()
    with pytest.raises(RuntimeError, match=r"before perturbed\(\), because .* are no longer the model's"):
        optimizer.perturbed().__enter__()


@pytest.mark.parametrize("method", METHODS)
def test_a_step_in_inference_mode_is_refused_before_anything_is_kept(method: str) -> None:
    case, expected = setup(), setup()
    optimizer = METHODS[method](SGD(case.model.parameters(), lr=0.1), model=case.model)
    theta = case.weights()
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode\(\) is on.*take the step outside"):
        optimizer.step(case.closure(optimizer))
    assert same(case.weights(), theta)
    other = METHODS[method](SGD(expected.model.parameters(), lr=0.1), model=expected.model)
    for each, own in ((optimizer, case), (other, expected)):
        torch.manual_seed(1)
        each.step(own.closure(each))
    assert same(case.weights(), expected.weights())


def test_rmp_says_that_weights_without_a_shape_cannot_be_moved() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    optimizer = flatmin.RMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, model=model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(3, 5)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"have no shape yet \(lazy modules\); run the model once before training"):
        optimizer.step(closure)
    model(torch.ones(1, 5))
    theta = [param.detach().clone() for param in model.parameters()]
    optimizer.step(closure)
    assert not same(list(model.parameters()), theta)
