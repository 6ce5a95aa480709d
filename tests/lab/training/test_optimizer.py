"""The base optimizer of a recipe, and which parameters its weight decay leaves out."""

import pytest
import torch
from torch import nn

import flatmin
from flatmin_lab.recipes.recipe import Recipe
from flatmin_lab.training.optimizer import build_optimizer


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_norms_and_biases_can_be_left_out_of_the_weight_decay(optimizer: str, clip_norm: float | None) -> None:
    model = network()
    recipe = Recipe(
        data="digits", model="convnet", optimizer=optimizer, exempt_norms=True, weight_decay=0.5, clip_norm=clip_norm
    )
    base = build_optimizer(recipe, model)
    decayed, exempt = base.param_groups
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.5, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[3].weight)]
    assert {id(p) for p in (*decayed["params"], *exempt["params"])} == {id(p) for p in model.parameters()}


def test_a_step_without_gradients_shrinks_the_weights_alone() -> None:
    model = network()
    nn.init.constant_(model[-1].get_parameter("bias"), 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    recipe = Recipe(data="digits", model="convnet", exempt_norms=True, weight_decay=0.5, lr=0.1)
    optimizer = flatmin.AMP(build_optimizer(recipe, model), epsilon=0.1, model=model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((p - p.detach()).sum() * 0.0 for p in model.parameters()), start=torch.zeros(()))
        loss.backward()
        return loss

    optimizer.step(closure)
    for p, old in zip(model.parameters(), before, strict=True):
        factor = 1 - 0.1 * 0.5 * 1.9 if p.ndim > 1 else 1.0  # Nesterov's first step is 1 + 0.9 times the gradient
        assert torch.allclose(p, factor * old)


def test_a_network_of_matrices_has_one_group() -> None:
    recipe = Recipe(data="digits", model="convnet", exempt_norms=True)
    (group,) = build_optimizer(recipe, nn.Linear(2, 2, bias=False)).param_groups
    assert group["weight_decay"] == recipe.weight_decay


def test_an_optimizer_of_ones_own_makes_its_own_groups() -> None:
    with pytest.raises(ValueError, match="left out where the optimizer is your own"):
        Recipe(data="digits", model="convnet", optimizer="mine.py:make_optimizer", exempt_norms=True)
