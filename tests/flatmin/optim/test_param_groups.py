"""Perturbing some parameters: norm layers alone, no biases, adapters alone; tied and frozen weights. Plain torch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

import flatmin
from tests.support.cases import METHODS, MakeBase, same, tensors_in

Choice = Callable[[str, nn.Parameter], bool]

CHOICES: dict[str, Choice] = {
    "norms": lambda name, param: "norm" in name,
    "no-biases": lambda name, param: not name.endswith("bias"),
    "matrices": lambda name, param: param.ndim > 1,
    "adapters": lambda name, param: "adapter" in name,
    "all": lambda name, param: True,
}


class Adapted(nn.Module):
    """A layer that stays, and a narrow one beside it that learns."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.adapter_in = nn.Linear(layer.in_features, rank, bias=False)
        self.adapter_out = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.adapter_out(self.adapter_in(x))
        return out


class Transformer(nn.Module):
    """An encoder layer with LayerNorm and dropout, an adapter, and an output layer tied to the embedding."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=16, batch_first=True)
        self.adapted = Adapted(nn.Linear(width, width))
        self.final_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.output(self.final_norm(self.adapted(self.encoder(self.embedding(words)))))
        return out


class Case:
    """The transformer with a batch; `deltas` has Δ of each pass, by the names of the parameters that it moved."""

    def __init__(self, *, freeze: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Transformer()
        if freeze:
            for name, param in self.model.named_parameters():
                param.requires_grad_("adapter" in name)
        self.words = torch.randint(0, 11, (4, 5))
        self.deltas: list[dict[str, Tensor]] = []

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def train(self, optimizer: flatmin.AMP | flatmin.RMP, steps: int) -> None:
        for _ in range(steps):
            theta = self.weights()

            def closure(theta: dict[str, Tensor] = theta) -> Tensor:
                moves = {name: weight - theta[name] for name, weight in self.weights().items()}
                self.deltas.append({name: move for name, move in moves.items() if move.any()})
                optimizer.zero_grad()
                loss = cross_entropy(self.model(self.words).flatten(0, 1), self.words.roll(1, 1).flatten())
                loss.backward()
                return loss

            optimizer.step(closure)

    def perturbed(self) -> list[dict[str, Tensor]]:
        """Δ of the passes that had one."""
        return [delta for delta in self.deltas if delta]


def length(delta: dict[str, Tensor]) -> float:
    return math.hypot(*[float(move.norm()) for move in delta.values()])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("method", METHODS)
def test_the_chosen_are_perturbed_and_all_are_trained(choice: str, method: str) -> None:
    case = Case()
    perturb = CHOICES[choice]
    optimizer = METHODS[method](
        SGD(flatmin.groups(case.model, perturb=perturb), lr=0.5),
        model=case.model,
    )
    before = case.weights()
    case.train(optimizer, 3)
    chosen = {name for name, param in case.model.named_parameters() if perturb(name, param)}
    assert case.perturbed()
    assert all(set(delta) == chosen for delta in case.perturbed())
    assert all(not torch.equal(before[name], weight) for name, weight in case.weights().items())


def test_the_radius_is_that_of_the_chosen_alone() -> None:
    case = Case()
    groups = flatmin.groups(case.model, perturb=CHOICES["norms"])
    optimizer = flatmin.AMP(SGD(groups, lr=0.1), epsilon=0.05)
    case.train(optimizer, 3)
    assert [length(delta) for delta in case.perturbed()] == pytest.approx([0.05] * 3, rel=1e-3)


def test_choosing_all_is_no_choice_to_the_last_bit(make_base: MakeBase) -> None:
    ends = []
    for chosen in (False, True):
        case = Case()
        params: Any = flatmin.groups(case.model, perturb=CHOICES["all"]) if chosen else case.model.parameters()
        case.train(flatmin.AMP(make_base(params), epsilon=0.1, model=case.model), 3)
        ends.append(case.weights().values())
    assert same(*ends)


@pytest.mark.parametrize("name", ["embedding", "output"])
def test_a_tied_weight_is_chosen_by_either_name_and_perturbed_once(name: str) -> None:
    case = Case()
    groups = flatmin.groups(case.model, perturb=lambda own, param: own.startswith(name))
    optimizer = flatmin.AMP(SGD(groups, lr=0.1), epsilon=0.05, ball="tensor")
    case.train(optimizer, 2)
    assert [set(delta) for delta in case.perturbed()] == [{"embedding.weight"}] * 2
    assert [length(delta) for delta in case.perturbed()] == pytest.approx([0.05] * 2, rel=1e-3)
    assert case.model.output.weight is case.model.embedding.weight
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    assert len(trained) == len(set(trained)) == len(list(case.model.parameters()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("named", [False, True], ids=["all-parameters", "groups"])
def test_frozen_weights_keep_every_bit_and_adapters_alone_are_perturbed(method: str, named: bool) -> None:
    """No group is needed for that: what gets no gradient gets no Δ."""
    case = Case(freeze=True)
    params: Any = flatmin.groups(case.model, perturb=CHOICES["adapters"]) if named else case.model.parameters()
    optimizer = METHODS[method](AdamW(params, lr=0.1, weight_decay=0.1), model=case.model)
    before = case.weights()
    case.train(optimizer, 3)
    for name, weight in case.weights().items():
        assert torch.equal(weight, before[name]) == ("adapter" not in name)
    assert case.perturbed()
    assert all("adapter" in name for delta in case.perturbed() for name in delta)
    assert len(optimizer.state) == 2


def test_groups_keep_their_settings_and_those_that_would_be_empty_are_left_out() -> None:
    model = Transformer()
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    among = [{"params": matrices, "weight_decay": 0.1, "lr": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    split = flatmin.groups(model, perturb=CHOICES["matrices"], among=among)
    assert [{key: value for key, value in group.items() if key != "params"} for group in split] == [
        {"weight_decay": 0.1, "lr": 0.5},
        {"weight_decay": 0.0, "epsilon": 0.0},
    ]
    split = flatmin.groups(model, perturb=CHOICES["no-biases"], among=among)
    assert [(group["weight_decay"], group.get("epsilon")) for group in split] == [(0.1, None), (0.0, None), (0.0, 0.0)]
    assert among[0] == {"params": matrices, "weight_decay": 0.1, "lr": 0.5}
    again = flatmin.groups(model, perturb=CHOICES["norms"], among=split)  # a choice among the chosen
    assert sum(len(group["params"]) for group in again) == len(list(model.parameters()))
    assert sum(len(group["params"]) for group in again if "epsilon" not in group) == 3  # weights of norm layers


def test_a_checkpoint_of_split_groups_goes_on_at_the_same_bits() -> None:
    ends = []
    for interrupted in (False, True):
        case = Case()

        def new(model: nn.Module = case.model) -> flatmin.AMP:
            base = AdamW(flatmin.groups(model, perturb=CHOICES["norms"]), lr=1e-2)
            return flatmin.AMP(base, epsilon=0.1, model=model)

        optimizer = new()
        case.train(optimizer, 2)
        if interrupted:
            saved, optimizer = optimizer.state_dict(), new()
            optimizer.load_state_dict(saved)
        case.train(optimizer, 2)
        ends.append([*case.weights().values(), *tensors_in(optimizer)])
    assert same(*ends)


def test_what_is_wrong_is_told() -> None:
    model = Transformer()
    with pytest.raises(ValueError, match=r"got none of 19; the first names are embedding.weight, encoder"):
        flatmin.groups(model, perturb=lambda name, param: "nrom" in name)
    with pytest.raises(ValueError, match=r"got 1 that it does not have; give it the model that the optimizer trains"):
        flatmin.groups(model, perturb=CHOICES["all"], among=[{"params": [nn.Parameter(torch.ones(1))]}])


def test_names_go_with_their_parameters_and_pairs_are_taken() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    split = flatmin.groups(
        model, perturb=lambda name, _: name.startswith("0"), among=SGD(model.named_parameters(), lr=0.1).param_groups
    )
    assert [group["param_names"] for group in split] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    pairs: list[dict[str, Any]] = [{"params": list(model.named_parameters())}]
    split = flatmin.groups(model, perturb=lambda name, _: name.startswith("0"), among=pairs)
    optimizer = flatmin.AMP(SGD(split, lr=0.1), epsilon=0.1)
    assert optimizer.param_groups[1]["param_names"] == ["1.weight", "1.bias"]
    alone = flatmin.groups(model, perturb=lambda *_: True, among=[{"params": model[0].weight}])
    assert alone[0]["params"] == [model[0].weight]


def test_what_is_no_model_or_no_function_is_told() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"got an object of type generator and .* write groups\(model, perturb="):
        flatmin.groups(model.parameters(), perturb=lambda *_: True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got an object of type Linear and an object of type str"):
        flatmin.groups(model, perturb="norm")  # type: ignore[arg-type]
