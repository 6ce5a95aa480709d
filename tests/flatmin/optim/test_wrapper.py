"""One optimizer to the outside: checkpoints, schedulers, added groups and copies."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import flatmin
from tests.support.cases import MakeBase, Method, Setup, run, same, setup, tensors_in


def scheduler_for(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=20, cycle_momentum=False)


@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_three_steps_save_load_three_steps_equal_six(
    method: Method, make_base: MakeBase, model_name: str, form: str, tmp_path: Any
) -> None:
    def train(case: Setup, optimizer: flatmin.AMP | flatmin.RMP, scheduler: OneCycleLR) -> None:
        for _ in range(3):
            if form == "closure":
                optimizer.step(case.closure(optimizer))
            else:
                case.step_in_blocks(optimizer)
            scheduler.step()

    def fresh() -> tuple[Setup, flatmin.AMP | flatmin.RMP, OneCycleLR]:
        case = setup(model_name)
        optimizer = method(make_base(case.model.parameters()), model=case.model)
        return case, optimizer, scheduler_for(optimizer)

    case, optimizer, scheduler = fresh()
    torch.manual_seed(1)
    train(case, optimizer, scheduler)
    saved = {
        "model": case.model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(saved, tmp_path / "checkpoint.pt")
    train(case, optimizer, scheduler)

    again, optimizer_again, scheduler_again = fresh()
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again.model.load_state_dict(loaded["model"])
    optimizer_again.load_state_dict(loaded["optimizer"])
    scheduler_again.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["random"])
    train(again, optimizer_again, scheduler_again)
    assert same(again.weights(), case.weights())
    assert same(again.buffers(), case.buffers())
    assert same(tensors_in(optimizer_again), tensors_in(optimizer))


def test_learning_rate_changes_after_loading_take_effect(method: Method, make_base: MakeBase) -> None:
    case = setup()
    optimizer = method(make_base(case.model.parameters()))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.0)
    run(case, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.0
    scheduler.step()
    theta = case.weights()
    assert optimizer.base.param_groups[0]["lr"] == 0
    assert same(run(case, optimizer, 2), theta)


def test_schedulers_can_move_the_radius() -> None:
    case = setup(dtype=torch.float64)
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.1, inner_lr=1e6)
    for epsilon in (0.1, 0.0, 0.3):
        optimizer.param_groups[0]["epsilon"] = epsilon
        optimizer.step(case.closure(optimizer))
        if epsilon:
            assert optimizer.last.delta_norm == pytest.approx(epsilon)
        else:
            assert optimizer.last.delta_norm is None


def test_a_checkpoint_of_the_plain_base_loads_and_one_of_amp_loads_into_the_base(make_base: MakeBase) -> None:
    case = setup()
    base = make_base(case.model.parameters())
    run(case, base, 2)
    optimizer = flatmin.AMP(make_base(case.model.parameters()), epsilon=0.3, inner_lr=0.7)
    optimizer.load_state_dict(base.state_dict())
    assert (optimizer.param_groups[0]["epsilon"], optimizer.param_groups[0]["inner_lr"]) == (0.3, 0.7)
    assert same(tensors_in(optimizer), tensors_in(base))
    run(case, optimizer, 2)
    base.load_state_dict(optimizer.state_dict())
    assert same(tensors_in(base), tensors_in(optimizer))


def test_values_lost_behind_the_wrappers_back_are_filled_in() -> None:
    case = setup()
    optimizer = flatmin.AMP(SGD(case.model.parameters(), lr=0.1), epsilon=0.3)
    optimizer.base.load_state_dict(SGD(case.model.parameters(), lr=0.2).state_dict())
    run(case, optimizer, 1)
    assert optimizer.param_groups[0]["epsilon"] == 0.3


def test_state_groups_and_defaults_are_the_bases_own(method: Method, make_base: MakeBase) -> None:
    case = setup()
    base = make_base(case.model.parameters())
    optimizer = method(base)
    run(case, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state is base.state
    assert optimizer.param_groups is base.param_groups
    assert optimizer.defaults is base.defaults
    plain = setup()
    plain_optimizer = make_base(plain.model.parameters())
    run(plain, plain_optimizer, 1)
    assert [list(s) for s in base.state.values()] == [list(s) for s in plain_optimizer.state.values()]


def test_an_added_group_is_trained_with_its_own_or_the_default_radius(method: Method, make_base: MakeBase) -> None:
    case = setup()
    first, (weight, bias) = case.layers()
    optimizer = method(make_base(first), ball="tensor", epsilon=0.1)
    scheduler = StepLR(optimizer, step_size=1)
    run(case, optimizer, 1)
    optimizer.add_param_group({"params": weight})
    optimizer.add_param_group({"params": [bias], "epsilon": 0.5})
    assert [group["epsilon"] for group in optimizer.param_groups] == [0.1, 0.1, 0.5]
    theta = case.weights()
    assert not any(torch.equal(a, b) for a, b in zip(run(case, optimizer, 1), theta, strict=True))
    assert scheduler.optimizer is optimizer


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_copy_steps_its_own_weights(
    method: Method, make_base: MakeBase, duplicate: Callable[[Any], Any], with_model: bool
) -> None:
    case = setup("conv-batchnorm")
    settings = {"model": case.model} if with_model else {}
    optimizer = method(make_base(case.model.parameters()), **settings)
    scheduler_for(optimizer)
    run(case, optimizer, 2)
    theta, buffers = case.weights(), case.buffers()
    copied, copied_optimizer = duplicate((case, optimizer))
    assert copied_optimizer.state is copied_optimizer.base.state
    assert copied_optimizer.model is (copied.model if with_model else None)
    torch.manual_seed(5)
    weights = run(copied, copied_optimizer, 2)
    assert same(case.weights(), theta)
    assert same(case.buffers(), buffers)
    torch.manual_seed(5)
    assert same(run(case, optimizer, 2), weights)


def test_wrapping_a_base_again_takes_the_new_radius_but_keeps_a_groups_own() -> None:
    case = setup()
    first, second = case.layers()
    base = SGD([{"params": first, "epsilon": 0.5}, {"params": second}], lr=0.1)  # type: ignore[arg-type]
    flatmin.AMP(base, epsilon=0.1)
    assert [group["epsilon"] for group in base.param_groups] == [0.5, 0.1]
    flatmin.AMP(base, epsilon=0.2)
    assert [group["epsilon"] for group in base.param_groups] == [0.5, 0.2]


def test_a_copy_of_a_subclass_keeps_its_own_attributes() -> None:
    case = setup()
    optimizer = Scheduled(SGD(case.model.parameters(), lr=0.1), epsilon=0.1)
    optimizer.plan = [0.1, 0.2]
    StepLR(optimizer, 1)  # patches `step` of this one
    optimizer.step(case.closure(optimizer))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.plan == [0.1, 0.2]
        assert "step" not in vars(copied)
        assert copied.last.loss is None


class Scheduled(flatmin.AMP):
    plan: list[float]


# ---- what bases have beyond an optimizer


class Lookahead(SGD):
    """With what timm's has, and its training script asks for with hasattr."""

    is_second_order = False
    synced = 0

    def sync_lookahead(self) -> None:
        self.synced += 1


def test_what_else_the_base_can_do_is_passed_on(tmp_path: Path) -> None:
    case = setup()
    optimizer: Any = flatmin.AMP(Lookahead(case.model.parameters(), lr=0.1), epsilon=0.1)
    assert hasattr(optimizer, "sync_lookahead")
    optimizer.sync_lookahead()
    assert optimizer.base.synced == optimizer.synced == 1
    assert optimizer.is_second_order is False
    for name in ("train", "_private", "nothing"):
        assert not hasattr(optimizer, name)
    copied = copy.deepcopy(optimizer)
    assert copied.base is not optimizer.base
    torch.save(optimizer, tmp_path / "optimizer.pt")
    assert hasattr(torch.load(tmp_path / "optimizer.pt", weights_only=False), "sync_lookahead")


def test_a_schedule_free_base_changes_its_mode() -> None:
    """Its weights in eval mode are another point than in train mode: the mean of the path."""
    oracle = pytest.importorskip("pytorch_optimizer", reason="an oracle, installed with flatmin[dev]")
    case = setup()
    optimizer: Any = flatmin.AMP(oracle.ScheduleFreeSGD(case.model.parameters(), lr=0.1), epsilon=0.1, model=case.model)
    optimizer.train()
    run(case, optimizer, 3)
    training = case.weights()
    optimizer.eval()
    assert not same(case.weights(), training)
    optimizer.train()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(case.weights(), training, strict=True))


@pytest.mark.parametrize("name", ["AdaHessian", "SophiaH"])
def test_a_base_that_differentiates_gradients_gets_a_clear_word(name: str) -> None:
    oracle = pytest.importorskip("pytorch_optimizer", reason="an oracle, installed with flatmin[dev]")
    for epsilon in (0.1, 0.0):
        case = setup()
        theta = case.weights()
        base = getattr(oracle, name)(case.model.parameters(), lr=0.1)
        optimizer = flatmin.AMP(base, epsilon=epsilon, model=case.model)

        def closure(case: Setup = case, optimizer: flatmin.AMP = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = case.loss()
            loss.backward(create_graph=True)
            return loss

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward")  # torch: create_graph may leak memory
            if epsilon:
                with pytest.raises(RuntimeError, match=r"have a graph \(of create_graph=True.*use epsilon=0"):
                    optimizer.step(closure)
                assert same(case.weights(), theta)
            else:
                optimizer.step(closure)
                assert not same(case.weights(), theta)
        optimizer.zero_grad()


class Searching(SGD):
    """Steps to the best of a few points, so it needs the closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_a_base_that_needs_a_closure_is_refused_where_it_would_be_perturbed() -> None:
    case = setup()
    with pytest.raises(ValueError, match=r"Searching evaluates its closure itself.*got epsilon=0\.1; use epsilon=0"):
        flatmin.AMP(Searching(case.model.parameters(), lr=0.1), epsilon=0.1)
    theta, optimizer = case.weights(), flatmin.AMP(Searching(case.model.parameters(), lr=0.1), epsilon=0.0)
    assert not same(run(case, optimizer, 1), theta)


def test_numbers_of_numpy_are_saved_as_plain_ones() -> None:
    """torch.load reads no others, unless it is told to trust the file."""
    first, second, third = (nn.Parameter(torch.ones(1)) for _ in range(3))
    base = torch.optim.SGD([{"params": [first]}, {"params": [second], "epsilon": np.float64(0.5)}], lr=0.1)
    optimizer = flatmin.AMP(base, epsilon=np.float64(0.1), inner_lr=np.float32(2), ball="group")
    optimizer.add_param_group({"params": [third], "epsilon": np.float64(0.3)})
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    groups = torch.load(file, weights_only=True)["param_groups"]
    assert [group["epsilon"] for group in groups] == [0.1, 0.5, 0.3]
    assert {group["inner_lr"] for group in groups} == {2}


def test_a_second_wrapper_replaces_the_first_ones_radius_but_not_that_of_a_group() -> None:
    split: list[dict[str, Any]] = [{"params": [nn.Parameter(torch.ones(2))]}]
    split += [{"params": [nn.Parameter(torch.ones(2))], "epsilon": 0.0}]
    first = flatmin.AMP(SGD(split, lr=0.1), epsilon=0.1)
    second = flatmin.AMP(first.base, epsilon=0.05)
    assert [group["epsilon"] for group in second.param_groups] == [0.05, 0.0]


def test_a_radius_that_no_group_takes_because_a_scheduler_has_moved_theirs_is_named() -> None:
    first = flatmin.AMP(SGD([nn.Parameter(torch.ones(2))], lr=0.1), epsilon=0.1)
    flatmin.RadiusScheduler(first, 10, start=0.5)  # not reached yet: ε is 0
    with pytest.warns(
        RuntimeWarning, match=r"epsilon=0.05 changes nothing: .* of this SGD, .* their own \(0.0\)"
    ) as seen:
        second = flatmin.AMP(first.base, epsilon=0.05)
    assert seen[0].filename == __file__
    assert not second.perturbs
