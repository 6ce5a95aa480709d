"""The rise of the loss on mini-batches: the formula in a plain loop, train mode, and a model that is as it was."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatmin.flatness import batch_rise
from flatmin.flatness.minibatch_sharpness import SCALES, Scale

RADII = [0.0, 0.02, 0.1]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 36, 3)]
    return nn.Sequential(*layers).double()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 10, 1, 8, 8, generator=draw, dtype=torch.float64)
    return [(one, torch.arange(10) % 3) for one in x]


def plain(model: nn.Module, x: Tensor, y: Tensor, radius: float, scale: Scale) -> tuple[float, float]:
    """Loss and rise on a copy in train mode, with one mask of dropout."""
    copy = deepcopy(model).train()
    start = torch.get_rng_state()
    loss = cross_entropy(copy(x), y)
    gradient = torch.autograd.grad(loss, list(copy.parameters()))
    whole = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    with torch.no_grad():
        for p, g in zip(copy.parameters(), gradient, strict=True):
            if scale == "global":
                p.add_(g, alpha=radius / whole)
            elif p.ndim > 1:
                for row, slope in zip(p, g, strict=True):
                    row.add_(radius * row.norm() * slope / slope.norm())
        torch.set_rng_state(start)
        return float(loss), float(cross_entropy(copy(x), y) - loss)


@pytest.mark.parametrize("scale", SCALES)
def test_it_is_the_plain_loop_in_train_mode(scale: Scale) -> None:
    model = network().eval()
    state = torch.get_rng_state()
    found = batch_rise(model, batches(), radii=RADII, scale=scale)
    assert found.rises.shape == (3, 3)
    for number, (x, y) in enumerate(batches()):
        for place, radius in enumerate(RADII):
            torch.set_rng_state(state)
            loss, rise = plain(model, x, y, radius, scale)
            assert float(found.losses[number]) == pytest.approx(loss, rel=1e-12)
            assert float(found.rises[number, place]) == pytest.approx(rise, rel=1e-9, abs=1e-12)
    assert found.mean[0] == 0
    assert 0 < found.mean[1] < found.mean[2]


def test_batches_that_are_drawn_as_they_are_asked_for_are_those_of_a_list() -> None:
    """Passes wind random generators back, and must not do so to whoever draws the batches."""
    rises = []
    for drawn in (iter, list):
        torch.manual_seed(5)
        batches = ((torch.randn(10, 1, 8, 8, dtype=torch.float64), torch.arange(10) % 3) for _ in range(3))
        rises.append(batch_rise(network(), drawn(batches), radii=[0.05]).losses)
    assert torch.equal(*rises)
    assert len(set(rises[0].tolist())) == 3


def test_the_model_is_bit_for_bit_as_it_was_even_after_an_error() -> None:
    model = network()
    model[1].eval()
    before, modes = deepcopy(model.state_dict()), [module.training for module in model.modules()]
    random = torch.get_rng_state()

    def failing(logits: Tensor, y: Tensor) -> Tensor:
        raise ArithmeticError("no loss")

    batch_rise(model, batches(), radii=RADII)
    with pytest.raises(ArithmeticError):
        batch_rise(model, batches(), radii=RADII, loss=failing)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_a_filter_without_a_gradient_stays_where_it_is(scale: Scale, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dead = nn.Linear(3, 4)
    with torch.no_grad():
        dead.bias[0] = -100.0
    model = nn.Sequential(dead, nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    exact = batch_rise(model, [(x, y)], radii=[0.1], scale=scale).mean
    found = batch_rise(model.to(dtype), [(x.to(dtype), y)], radii=[0.1], scale=scale).mean
    assert torch.allclose(found.float(), exact, atol=4 * torch.finfo(dtype).eps)


def test_doubling_a_filter_before_batchnorm_changes_nothing_at_filter_radii() -> None:
    """BatchNorm takes the scale out again; a radius of its own length does not notice, one in absolute terms does."""
    model = network().eval()
    for module in model:
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-12
    twice = deepcopy(model)
    with torch.no_grad():
        for p in twice[0].parameters():
            p.mul_(2)
    one, other = (batch_rise(each, batches(), radii=[0.1]).mean for each in (model, twice))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    one, other = (batch_rise(each, batches(), radii=[0.1], scale="global").mean for each in (model, twice))
    assert not torch.allclose(one, other, rtol=1e-3)


def test_a_wrong_request_says_why() -> None:
    model = network()
    with pytest.raises(ValueError, match="unknown scale 'layer'"):
        batch_rise(model, batches(), radii=RADII, scale="layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one radius"):
        batch_rise(model, batches(), radii=[])
    with pytest.raises(ValueError, match="at least one batch"):
        batch_rise(model, [], radii=RADII)
    with pytest.raises(ValueError, match="at least 0 and finite"):
        batch_rise(model, batches(), radii=[-1.0])
    named: Any = [{"x": torch.zeros(2, 1, 8, 8), "y": torch.zeros(2)}]
    with pytest.raises(TypeError, match=r"pairs \(inputs, targets\), got a dict; make it a pair"):
        batch_rise(model, named, radii=RADII)
    three: Any = [(1, 2, 3)]
    with pytest.raises(TypeError, match="got a tuple of 3"):
        batch_rise(model, three, radii=RADII)


def test_radii_may_be_a_tensor() -> None:
    radii: Any = torch.tensor(RADII, dtype=torch.float64)
    one, other = (batch_rise(network(), batches(), radii=given) for given in (RADII, radii))
    assert all(map(torch.equal, one, other))
