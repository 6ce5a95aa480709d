"""The line between two models: by brute force, with barriers that are known, and torch's own `update_bn`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import update_bn

from flatmin import flatness, metrics
from flatmin.core.model_state import eval_mode
from flatmin.flatness.risk import total_loss
from tests.flatmin.flatness.test_flatness import assert_same, everything
from tests.support.flatness_cases import CASES, DEVICES, Case


def pair(name: str, **how: Any) -> tuple[Case, Any]:
    """A case, and another model of its architecture."""
    case, other = Case(name, **how), Case(name, seed=1, **how).model
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.num_batches_tracked is not None
            module.num_batches_tracked += 5
    return case, other


@torch.no_grad()
def own_loss(model: nn.Module, case: Case) -> Tensor:
    with eval_mode(model):
        return total_loss(model, case.loss)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_ends_are_the_models_own_losses_bit_for_bit(name: str, dtype: torch.dtype, device: str) -> None:
    case, other = pair(name, dtype=dtype, device=device)
    for end in (other, other.state_dict()):
        found = flatness.between(case.model, end, case.loss, points=3)
        assert torch.equal(found.losses[0], own_loss(case.model, case))
        assert torch.equal(found.losses[-1], own_loss(other, case))


@pytest.mark.parametrize("name", CASES)
def test_a_point_of_the_line_is_the_model_with_the_mean_of_both(name: str) -> None:
    case, other = pair(name)
    error = flatness.empirical_risk(case.x, case.y, criterion=metrics.error)
    found = flatness.between(case.model, other, case.loss, points=6, error=error)
    first, second = case.model.state_dict(), other.state_dict()
    assert found.ts.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert found.errors is not None
    for t, loss, wrong in zip(found.ts.tolist(), found.losses, found.errors, strict=True):
        mixed = {
            key: (1 - t) * a + t * second[key] if a.is_floating_point() else (a if t < 0.5 else second[key])
            for key, a in first.items()
        }
        twin = copy.deepcopy(case.model)
        twin.load_state_dict(mixed)
        assert loss.item() == pytest.approx(own_loss(twin, case).item(), rel=1e-12)
        with eval_mode(twin):
            assert wrong.item() == pytest.approx(metrics.error(twin(case.x), case.y).item())


def test_integers_are_those_of_the_nearer_model() -> None:
    case, other = pair("convolutional")
    seen = []

    def loss(model: Any) -> Tensor:
        seen.append(model[1].num_batches_tracked.item())
        return cross_entropy(model(case.x), case.y)

    flatness.between(case.model, other, loss, points=5)
    assert seen == [0, 0, 0, 5, 5]


@pytest.mark.parametrize("name", CASES)
def test_the_way_back_is_the_way_there_turned_around(name: str) -> None:
    case, other = pair(name)
    there = flatness.between(case.model, other, case.loss, points=8)
    back = flatness.between(other, case.model, case.loss, points=8)
    assert torch.allclose(there.losses, back.losses.flip(0), rtol=1e-12)
    assert there.barrier.item() == pytest.approx(back.barrier.item(), abs=1e-12)


def test_between_equal_models_all_is_one_and_there_is_no_barrier() -> None:
    case, _ = pair("convolutional")
    found = flatness.between(case.model, copy.deepcopy(case.model), case.loss)
    assert (found.losses == found.losses[0]).all()
    assert found.barrier.item() == 0
    assert found.errors is None
    assert found.error_barrier is None


@pytest.mark.parametrize("seed", range(5))
def test_a_convex_loss_has_no_barrier(seed: int) -> None:
    torch.manual_seed(seed)
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    loss = flatness.empirical_risk(torch.randn(9, 4), torch.randn(9, 2), criterion=mse_loss)
    found = flatness.between(first, second, loss)
    assert found.barrier.item() <= 0
    assert found.highest.item() in (0, 1)


def test_the_barrier_is_the_rise_above_the_straight_line_between_the_ends() -> None:
    ts = torch.linspace(0, 1, 5, dtype=torch.float64)
    losses, errors = torch.tensor([1.0, 3.0, 2.0, 4.5, 3.0]), torch.tensor([0.0, 0.0, 0.5, 0.0, 1.0])
    found = flatness.Between(ts, losses, errors)
    assert found.barrier.item() == 2.0
    assert found.highest.item() == 0.75
    assert found.error_barrier is not None
    assert found.error_barrier.item() == 0


def permuted(model: Any, order: Tensor) -> Any:
    """The hidden units of a network of two layers in another order: the same function."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.copy_(model[0].weight[order])
        twin[0].bias.copy_(model[0].bias[order])
        twin[2].weight.copy_(model[2].weight[:, order])
    return twin


def test_the_same_function_with_its_units_in_another_order_is_behind_a_barrier() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2)).double()
    x = torch.randn(64, 2, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    twin = permuted(model, torch.randperm(24))
    loss = flatness.empirical_risk(x, y)
    found = flatness.between(model, twin, loss)
    assert found.losses[0].item() == pytest.approx(found.losses[-1].item(), rel=1e-9)
    assert found.barrier.item() > 0.05
    assert 0 < found.highest.item() < 1
    assert flatness.between(model, permuted(model, torch.arange(24)), loss).barrier.item() == 0


# ---- BatchNorm's statistics


class Normed(nn.Module):
    """BatchNorm in two places, one of which keeps no statistics, and dropout before one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6, momentum=0.3)
        self.drop = nn.Dropout(0.3)
        self.second, self.plain = nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.plain(self.second(self.drop(self.norm(self.first(x)).relu()))))
        return found


def normed(seed: int, device: str = "cpu") -> Normed:
    torch.manual_seed(seed)
    return Normed().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["pairs", "inputs", "function"])
def test_renewed_statistics_are_those_of_torchs_update_bn(form: str, device: str) -> None:
    model, other = normed(0, device), normed(1, device)
    torch.manual_seed(2)
    batches = [(torch.randn(8, 3).to(device), torch.randint(0, 3, (8,)).to(device)) for _ in range(3)]
    seen = []

    def loss(model: Any) -> Tensor:
        seen.append((model.norm.running_mean.clone(), model.norm.running_var.clone()))
        assert not model.training
        return cross_entropy(model(batches[0][0]), batches[0][1])

    def passed(model: nn.Module) -> None:
        for x, _ in batches:
            model(x)

    forms: dict[str, Any] = {"pairs": batches, "inputs": [x for x, _ in batches], "function": passed}
    torch.manual_seed(3)
    flatness.between(model, other, loss, points=2, renew=forms[form])
    for end, (mean, var) in zip((model, other), seen, strict=True):
        torch.manual_seed(3)  # the same masks
        twin = copy.deepcopy(end)
        update_bn(batches, twin)
        assert torch.equal(mean, twin.norm.running_mean)  # type: ignore[arg-type]
        assert torch.equal(var, twin.norm.running_var)  # type: ignore[arg-type]


def test_half_way_between_two_models_renewal_restores_the_variance() -> None:
    """Of two networks that fit alike with units of different signs, the mean has hardly any activation left."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    x, y = torch.randn(60, 4), torch.randint(0, 3, (60,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    twin: Any = copy.deepcopy(model)
    order = torch.randperm(8)
    with torch.no_grad():
        for key, value in twin[1].state_dict().items():
            if value.ndim:
                twin[1].state_dict()[key].copy_(value[order])
        twin[0].weight.copy_(twin[0].weight[order])
        twin[0].bias.copy_(twin[0].bias[order])
        twin[3].weight.copy_(twin[3].weight[:, order])
    loss = flatness.empirical_risk(x, y)
    without, renewed = (flatness.between(model, twin, loss, renew=renew) for renew in (None, [x]))
    assert renewed.barrier < without.barrier


def test_a_loader_that_shuffles_gives_the_same_batches_at_every_point() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(12, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model = normed(0)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, given: seen.append(given[0]) if module.training else None)
    flatness.between(model, normed(1), lambda model: model(torch.ones(2, 3)).sum(), points=3, renew=loader)
    assert len(seen) == 9
    assert torch.equal(torch.cat(seen[:3]), torch.cat(seen[6:]))


def test_a_model_without_batchnorm_has_nothing_to_renew() -> None:
    case, other = pair("mlp")
    plain, renewed = (
        flatness.between(case.model, other, case.loss, points=3, renew=renew) for renew in (None, [case.x])
    )
    assert torch.equal(plain.losses, renewed.losses)


class Broken(BaseException):
    """Not an Exception: as Ctrl-C is not."""


@pytest.mark.parametrize("breaks", [None, 0, 1, 3])
@pytest.mark.parametrize("where", ["loss", "renew"])
def test_both_models_are_left_bit_for_bit_as_they_were(where: str, breaks: int | None) -> None:
    model, other = normed(0), normed(1)
    model.second.requires_grad_(False)
    model.norm.eval()
    other.eval()
    x, calls = torch.randn(6, 3), dict.fromkeys(("loss", "renew"), 0)

    def count(name: str) -> None:
        calls[name] += 1
        if breaks is not None and name == where and calls[name] > breaks:
            raise Broken

    def loss(model: Any) -> Tensor:
        count("loss")
        return cross_entropy(model(x), torch.zeros(6, dtype=torch.long))

    def renew(model: Any) -> None:
        model(x)
        count("renew")

    before = [everything(one) for one in (model, other)]
    state = torch.get_rng_state()
    try:
        flatness.between(model, other, loss, points=5, renew=renew)
    except Broken:
        assert breaks is not None
    else:
        assert breaks is None
        assert not torch.equal(model.second.weight, other.second.weight)
    for one, was in zip((model, other), before, strict=True):
        assert_same(was, everything(one))
    assert (model.norm.momentum, other.norm.momentum) == (0.3, 0.3)
    assert torch.equal(state, torch.get_rng_state())


def test_frozen_parameters_move_as_well() -> None:
    case, other = pair("mlp")
    free = flatness.between(case.model, other, case.loss, points=3)
    case.model.requires_grad_(False)
    assert torch.equal(flatness.between(case.model, other, case.loss, points=3).losses, free.losses)


def test_a_compiled_model_is_the_plain_one() -> None:
    case, other = pair("mlp", dtype=torch.float32)
    compiled: Any = torch.compile(case.model, backend="eager")
    plain = flatness.between(case.model, other, case.loss, points=3)
    for first, second in ((compiled, other), (other, compiled.state_dict())):
        found = flatness.between(first, second, case.loss, points=3)
        assert found.losses.sum().item() == pytest.approx(plain.losses.sum().item(), rel=1e-5)


def test_inside_inference_mode_and_no_grad_it_is_the_same() -> None:
    case, other = pair("convolutional")
    plain = flatness.between(case.model, other, case.loss, points=3, renew=[case.x])
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            found = flatness.between(case.model, other, case.loss, points=3, renew=[case.x])
        assert torch.equal(found.losses, plain.losses)


def test_a_weight_that_is_not_a_number_gives_a_loss_that_is_none() -> None:
    case, other = pair("mlp")
    with torch.no_grad():
        other[0].weight[0, 0] = torch.nan
    found = flatness.between(case.model, other, case.loss, points=3)
    assert found.losses.isfinite().tolist() == [True, False, False]
    assert not found.barrier.isfinite()


# ---- bad input


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def without(key: str) -> Callable[[Case], Any]:
    return lambda case: {name: value + 1 for name, value in case.model.state_dict().items() if name != key}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda case: wider(), r"2\.weight is \(4, 5\) of float64 in the first model, \(6, 5\) of float64"),
        (lambda case: copy.deepcopy(case.model).float(), r"0\.weight is \(5, 3\) of float64 .* \(5, 3\) of float32"),
        (without("2.bias"), r"only the first has 2\.bias"),
        (lambda case: nn.Sequential(*copy.deepcopy(case.model), nn.Linear(3, 3)).double(), r"only the second has 5\."),
        (lambda case: case.model, "same weights in memory"),
        (lambda case: case.model.state_dict(), r"copy\.deepcopy"),
    ],
)
def test_what_cannot_be_connected_is_named(other: Callable[[Case], Any], text: str) -> None:
    case = Case("mlp")
    before = everything(case.model)
    with pytest.raises(ValueError, match=text):
        flatness.between(case.model, other(case), case.loss)
    assert_same(before, everything(case.model))


def test_no_batch_to_renew_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        flatness.between(normed(0), normed(1), lambda model: model(torch.ones(2, 3)).sum(), renew=[])


def test_a_weight_that_only_the_first_model_ties_is_named() -> None:
    case, other = pair("tied")
    state = copy.deepcopy(other.state_dict())
    state["outer.weight"] = state["outer.weight"] + 1
    with pytest.raises(ValueError, match=r"outer\.weight is tied"):
        flatness.between(case.model, state, case.loss)
