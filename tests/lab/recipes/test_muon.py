"""Muon: matrices as torch's own moves them, filters as matrices, and SGD for the rest."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatmin
from flatmin_lab.recipes.muon import Muon, orthogonal


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(6, 6), (4, 20), (20, 4), (1, 7)])
def test_the_result_has_the_directions_of_the_matrix_and_singular_values_near_one(shape: tuple[int, int]) -> None:
    given = matrix(*shape)
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    inner = u.T @ orthogonal(given, 5).float() @ v.T
    values = inner.diagonal()
    assert bool(((values > 0.6) & (values < 1.3)).all())
    assert (inner - values.diag()).abs().max() < 0.05  # bfloat16 has three digits


def test_matrices_move_as_with_torchs_own() -> None:
    ours, theirs = ([matrix(5, 9).requires_grad_(), matrix(9, 3, 1).requires_grad_()] for _ in range(2))
    kind: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}
    optimizers = [Muon(ours, **kind), torch.optim.Muon(theirs, **kind)]
    for number in range(5):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for place, p in enumerate(params):
                p.grad = matrix(p.size(0), p.size(1), 10 * number + place)
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=0.01)  # sums in another order, in bfloat16


def test_filters_are_a_matrix_and_biases_take_steps_of_sgd() -> None:
    filters, flat, bias, plain = matrix(4, 18).view(4, 2, 3, 3), matrix(4, 18), matrix(1, 4)[0], matrix(1, 4)[0]
    params = [nn.Parameter(p) for p in (filters, flat, bias)]
    muon = Muon(params, lr=0.1, weight_decay=0.5, momentum=0.9, others=3.0)
    beside = nn.Parameter(plain)
    sgd = torch.optim.SGD([beside], lr=0.3, momentum=0.9, nesterov=True)
    for seed in range(3):
        gradient = matrix(4, 18, seed)
        params[0].grad, params[1].grad = gradient.view(4, 2, 3, 3), gradient.clone()
        params[2].grad = matrix(1, 4, seed)[0]
        beside.grad = params[2].grad.clone()
        muon.step()
        sgd.step()
    assert torch.equal(params[0].flatten(1), params[1])
    assert torch.allclose(params[2], beside)


def test_amp_wraps_it_and_a_resumed_run_has_the_same_bits() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 1, 6, 6), torch.randint(0, 3, (32,))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def trained(net: nn.Module, optimizer: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(net(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    optimizer = flatmin.AMP(Muon(model.parameters(), lr=0.05), epsilon=0.05, model=model)
    losses = trained(model, optimizer, 10)
    assert losses[-1] < 0.7 * losses[0]
    twin = copy.deepcopy(model)
    resumed = flatmin.AMP(Muon(twin.parameters(), lr=0.05), epsilon=0.05, model=twin)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert trained(model, optimizer, 5) == trained(twin, resumed, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0 and finite, got -1.0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"others": float("inf")}, "others must be at least 0 and finite, got inf"),
    ],
)
def test_settings_that_cannot_be_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.zeros(2, 2))], **given)
