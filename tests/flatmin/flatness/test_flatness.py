"""Looking at a model leaves it bit for bit as it was, whatever happens; and what bad input gets."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from flatmin import flatness
from flatmin.flatness.risk import parts_of, total_loss
from tests.support.flatness_cases import DEVICES, Case

# ---- left as it was

CPU_AXIS = torch.ones(2, device="cpu")
LOOKS: dict[str, Callable[[nn.Module, flatness.Loss], object]] = {
    "line": flatness.line,
    "plane": lambda model, loss: flatness.plane(model, loss, xs=CPU_AXIS, ys=CPU_AXIS),
    "together": lambda model, loss: flatness.line(model, loss, at_once=4),
    "worst_case_loss": lambda model, loss: flatness.worst_case_loss(model, loss, epsilon=0.1, steps=2),
    "mean_loss": lambda model, loss: flatness.mean_loss(model, loss, epsilon=0.1),
    "adaptive": lambda model, loss: flatness.worst_case_loss(model, loss, epsilon=0.1, steps=2, adaptive=True),
    "sharpness": lambda model, loss: flatness.sharpness(model, loss, epsilon=0.1),
    "gradient_norm": flatness.gradient_norm,
    "top_eigenvalues": lambda model, loss: flatness.top_eigenvalues(model, loss, k=2, max_products=5),
    "trace": lambda model, loss: flatness.trace(model, loss, products=6),
    "spectrum": lambda model, loss: flatness.spectrum(model, loss, steps=3, probes=2),
    "between": lambda model, loss: flatness.between(model, moved(model), loss, points=4, renew=passes(loss)),
}


def passes(loss: flatness.Loss) -> Callable[[nn.Module], object]:
    return lambda model: total_loss(model, parts_of(loss))


def moved(model: nn.Module) -> nn.Module:
    """A model of the same architecture, elsewhere."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    return other


def everything(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        found[f"{name}: grad"] = None if p.grad is None else p.grad.clone()
        found[f"{name}: place"] = (p.data_ptr(), p.requires_grad)
    for name, module in model.named_modules():
        found[f"{name}: mode"] = module.training
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


class Broken(BaseException):
    """Not an Exception: as Ctrl-C is not."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("breaks", [None, 0, 1, 4])
@pytest.mark.parametrize("look", LOOKS)
def test_the_model_is_left_bit_for_bit_as_it_was(
    look: str, breaks: int | None, dtype: torch.dtype, device: str
) -> None:
    case = Case("convolutional", dtype=dtype, device=device)
    model = case.model
    model[1].eval()  # modes that differ
    cross_entropy(model(case.x), case.y).backward()
    before = everything(model)
    calls = [0]

    def loss(model: Any) -> Tensor:
        calls[0] += 1
        if breaks is not None and calls[0] > breaks:
            raise Broken
        return cross_entropy(model(case.x), case.y)

    try:
        LOOKS[look](model, loss)
    except Broken:
        assert breaks is not None
    assert_same(before, everything(model))


class Counting(nn.Module):
    """Changes a buffer in eval mode as well."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize("look", [name for name in LOOKS if name != "together"])
def test_buffers_are_put_back_too(look: str) -> None:
    model = Counting()
    LOOKS[look](model, flatness.empirical_risk(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])))
    assert model.calls.item() == 0


class Growing(nn.Module):
    """Makes a buffer and lets another one grow; a third lies in memory once for all its numbers."""

    seen: Any
    made: Any
    shared: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("made", None)
        self.register_buffer("shared", torch.tensor(1.0).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.new_ones(1)])
        self.made = x.detach().sum()
        found: Tensor = self.layer(x) * self.shared
        return found


def test_buffers_that_a_pass_makes_or_replaces_are_put_back() -> None:
    model = Growing()
    flatness.line(model, flatness.empirical_risk(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])))
    assert model.seen.numel() == 0
    assert model.made is None
    assert model.shared.stride() == (0,)


class Sparse(nn.Module):
    """A graph's adjacency, as such networks keep it, and a buffer that is changed behind autograd's back."""

    graph: Any
    behind: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.register_buffer("behind", torch.tensor([float("nan"), 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        self.behind.data += 1
        found: Tensor = torch.sparse.mm(self.graph, self.layer(x))
        return found


def test_sparse_buffers_do_no_harm_and_changes_through_data_are_seen() -> None:
    model = Sparse()
    graph = model.graph
    flatness.line(model, flatness.empirical_risk(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])))
    assert model.graph is graph
    assert model.behind[1].item() == 1


def test_a_compiled_model_is_looked_at_as_the_plain_one() -> None:
    case = Case("mlp", dtype=torch.float32)
    compiled: Any = torch.compile(case.model, backend="eager")
    one = flatness.line(case.model, case.loss)
    other = flatness.line(compiled, case.loss)
    assert torch.allclose(one.losses, other.losses)


@pytest.mark.parametrize("look", [name for name in LOOKS if name != "between"])
def test_a_scripted_model_is_looked_at_as_the_plain_one(look: str) -> None:
    case = Case("convolutional")
    scripted: Any = torch.jit.script(case.model)
    before = everything(scripted)
    assert_equal_numbers(LOOKS[look](case.model, case.loss), LOOKS[look](scripted, case.loss))
    assert_same(before, everything(scripted))


def test_the_buffers_of_a_scripted_model_are_put_back_too() -> None:
    model = torch.jit.script(Replacing())
    calls: Any = model.calls
    flatness.line(model, flatness.empirical_risk(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])))
    assert model.calls is calls
    assert calls.item() == 0


class Replacing(Counting):
    """Puts another buffer in the place of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        found: Tensor = self.layer(x)
        return found


def assert_equal_numbers(one: Any, other: Any) -> None:
    """All tensors in both, in whatever they are wrapped."""
    if isinstance(one, Tensor):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)
    elif isinstance(one, tuple | list):
        for pair in zip(one, other, strict=True):
            assert_equal_numbers(*pair)


class Quantised(nn.Module):
    """Frozen parameters that have no gradient at all, integers and complex numbers, under a layer that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Parameter(torch.tensor([[3, 1, 2]], dtype=torch.uint8), requires_grad=False)
        self.turned = nn.Parameter(torch.tensor([[1j, 2.0, -1j]]), requires_grad=False)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x * self.fixed * self.turned.abs())
        return found


@pytest.mark.parametrize("look", [name for name in LOOKS if name != "between"])
def test_frozen_parameters_of_any_type_stay_where_they_are(look: str) -> None:
    torch.manual_seed(0)
    model, x, y = Quantised(), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    scaled = x * model.fixed * model.turned.abs()
    before = everything(model)
    found = LOOKS[look](model, flatness.empirical_risk(x, y))
    assert_equal_numbers(LOOKS[look](model.layer, flatness.empirical_risk(scaled, y)), found)
    assert_same(before, everything(model))


def test_frozen_parameters_of_any_type_are_on_the_line_between_two_models() -> None:
    one, other = Quantised(), Quantised()
    with torch.no_grad():
        other.fixed.add_(1)
        other.turned.mul_(3)
    loss = flatness.empirical_risk(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    ends = [total_loss(model, loss) for model in (one, other)]
    before = everything(one)
    found = flatness.between(one, other, loss, points=3)
    assert found.losses[::2].tolist() == [end.item() for end in ends]
    assert_same(before, everything(one))


@pytest.mark.parametrize("look", LOOKS)
def test_torchs_default_device_and_type_play_no_part(look: str) -> None:
    """With `torch.set_default_device("cuda")`, for example; on "meta" every use of it would raise."""
    case = Case("convolutional")
    found = LOOKS[look](case.model, case.loss)
    with torch.device("meta"):
        assert_equal_numbers(found, LOOKS[look](case.model, case.loss))
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal_numbers(found, LOOKS[look](case.model, case.loss))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("look", [*LOOKS, "batch_rise", "linf"])
def test_an_embedding_with_sparse_gradients_is_looked_at_as_the_dense_one(look: str) -> None:
    looks: dict[str, Callable[[nn.Module, flatness.Loss], object]] = {
        "batch_rise": lambda model, _: flatness.batch_rise(model, [(x, y)], radii=[0.1]),
        "linf": lambda model, loss: flatness.worst_case_loss(model, loss, epsilon=0.1, norm="linf", steps=2),
        **LOOKS,
    }
    x, y = torch.tensor([[0, 1, 1], [2, 2, 0], [1, 4, 2]]), torch.tensor([0, 1, 2])
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Embedding(5, 4, sparse=sparse), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)]
        found.append(looks[look](nn.Sequential(*layers).double(), flatness.empirical_risk(x, y, batch_size=2)))
    assert_equal_numbers(*found)


class ChangesItsInputs(nn.Module):
    """As forward passes do that begin with `x /= 255`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x /= 2
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize("look", [*LOOKS, "renewed", "batch_rise"])
def test_a_model_that_changes_its_inputs_in_place_is_looked_at_on_the_same_ones(look: str) -> None:
    case = Case("convolutional")

    def found(model: nn.Module, x: Tensor) -> object:
        loss = flatness.empirical_risk(x, case.y, batch_size=5)
        if look == "batch_rise":
            return flatness.batch_rise(model, [(x, case.y)], radii=[0.1, 0.2])
        if look in ("between", "renewed"):
            renew = [x[:6], x[6:]] if look == "renewed" else None
            return flatness.between(model, moved(model), loss, points=4, renew=renew)
        return LOOKS[look](model, loss)

    before = case.x.clone()
    changing = found(ChangesItsInputs(case.model), case.x)
    assert torch.equal(case.x, before)
    assert_equal_numbers(found(case.model, case.x / 2), changing)


@pytest.mark.parametrize("batch_size", [500, 20, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_parts_in_half_precision_add_up_to_what_they_do_in_float64(dtype: torch.dtype, batch_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    x, y = torch.randn(1000, 3).to(dtype), torch.randint(0, 3, (1000,))
    exact, wide = copy.deepcopy(model).double(), flatness.empirical_risk(x.double(), y)
    loss = flatness.empirical_risk(x, y, batch_size=batch_size)
    found = flatness.worst_case_loss(model, loss, epsilon=0.1, steps=1, restarts=0)
    close: dict[str, Any] = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    assert torch.allclose(found.centre.double(), total_loss(exact, wide), **close)
    length = flatness.gradient_norm(model, loss).double()
    assert torch.allclose(length, flatness.gradient_norm(exact, wide), rtol=0.02)


def test_only_the_parameters_given_move() -> None:
    case = Case("mlp")
    *others, weight, bias = case.model.parameters()
    before = [p.detach().clone() for p in case.model.parameters()]
    moved = []

    def loss(model: Any) -> Tensor:
        moved.append([not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)])
        return cross_entropy(model(case.x), case.y)

    flatness.worst_case_loss(case.model, loss, epsilon=0.1, parameters=[weight, bias])
    assert not any(any(here[: len(others)]) for here in moved)
    assert any(all(here[len(others) :]) for here in moved)
    case.model[0].requires_grad_(False)
    assert len(flatness.directions(case.model)[0]) == 4


def test_a_regression_can_be_looked_at_as_well() -> None:
    layer = nn.Linear(2, 1)
    loss = flatness.empirical_risk(torch.randn(8, 2), torch.randn(8, 1), criterion=mse_loss)
    assert flatness.top_eigenvalue(layer, loss) > 0


# ---- bad input


look: Any = flatness  # what it is given here is of the wrong type


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda model, loss: look.line(model, 3), TypeError, "function of the model"),
        (lambda model, loss: look.line(model, []), TypeError, "function of the model"),
        (lambda model, loss: look.line(model, lambda _: 3.0), TypeError, "got float"),
        (lambda model, loss: look.line(model, lambda _: torch.zeros(2)), TypeError, r"shape \(2,\)"),
        (lambda model, loss: look.line(model, loss, alphas=torch.tensor([torch.nan])), ValueError, "finite"),
        (lambda model, loss: look.line(model, loss, alphas=torch.zeros(0)), ValueError, "finite"),
        (
            lambda model, loss: look.line(model, loss, direction=[torch.zeros(1)]),
            ValueError,
            "one tensor per parameter",
        ),
        (lambda model, loss: look.line(model, loss, at_once=0), ValueError, "got 0"),
        (lambda model, loss: look.directions(model, vectors="none"), ValueError, "'none'"),
        (lambda model, loss: look.directions(model, number=0), ValueError, "got 0"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=-1.0), ValueError, r"got -1\.0"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=torch.nan), ValueError, "got nan"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=1.0, steps=0), ValueError, "got 0"),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=1.0, ball="all"), ValueError, "all"),
        (lambda model, loss: look.mean_loss(model, loss, epsilon=1.0, samples=1), ValueError, "got 1"),
        (lambda model, loss: look.mean_loss(model, loss, epsilon=1.0, eta=0.1), ValueError, "add adaptive=True"),
        (lambda model, loss: look.sharpness(model, loss, epsilon=1.0, adaptive=True, eta=-1.0), ValueError, "got -1"),
        (lambda model, loss: look.top_eigenvalues(model, loss, k=0), ValueError, "got 0"),
        (lambda model, loss: look.top_eigenvalues(model, loss, k=9, max_products=3), ValueError, "got 9 and 3"),
        (lambda model, loss: look.trace(model, loss, products=5), ValueError, "got 5"),
        (lambda model, loss: look.spectrum(model, loss, steps=0), ValueError, "got 0 and 4"),
        (lambda model, loss: look.spectrum(model, loss, probes=0), ValueError, "got 60 and 0"),
        (lambda model, loss: look.spectrum(model, lambda m: loss[0](m) / 0), ValueError, "finite"),
        (lambda model, loss: look.spectrum(model, loss, steps=2).density(width=0.0), ValueError, r"got 0\.0"),
        (lambda model, loss: look.spectrum(model, loss, steps=2).density(torch.zeros(1, 1)), ValueError, "in a row"),
        (lambda model, loss: look.spectrum(model, loss, steps=2).moments(-1), ValueError, "got -1"),
        (lambda model, loss: look.between(model, moved(model), loss, points=1), ValueError, "got 1"),
        (lambda model, loss: look.between(model, 3, loss), TypeError, "got int"),
        (lambda model, loss: look.between(model, {}, loss), TypeError, "state_dict"),
        (lambda model, loss: look.between(model, moved(model), loss, renew=3), TypeError, "got int"),
        (lambda model, loss: look.between(model, moved(model), loss, renew=iter([])), TypeError, "used up"),
        (lambda model, loss: look.line(torch.sin, loss), TypeError, "nn.Module"),
        (lambda model, loss: look.gradient_norm(model, lambda _: torch.ones(())), ValueError, "must depend on"),
        (
            lambda model, loss: look.top_eigenvalue(nn.Linear(2, 2), lambda _: loss[0](model)),
            ValueError,
            "must depend on",
        ),
        (lambda model, loss: look.worst_case_loss(model, loss, epsilon=1.0, step_size=-1.0), ValueError, "got -1"),
        (lambda model, loss: look.line(model, loss, parameters=model.named_parameters()), TypeError, "got tuple"),
        (lambda model, loss: look.mean_loss(model, loss, epsilon=1.0, parameters=model[0].weight), TypeError, "a list"),
        (lambda model, loss: look.line(nn.LazyLinear(3), loss), ValueError, "run a batch"),
        (lambda model, loss: look.line(nn.Linear(2, 2, dtype=torch.complex64), loss), TypeError, "complex64; keep"),
        (lambda model, loss: look.trace(model, lambda m: loss[0](m) / 0), ValueError, "finite"),
        (lambda model, loss: look.empirical_risk([1.0], torch.zeros(1)), TypeError, "got list .* one for each batch"),
        (
            lambda model, loss: look.empirical_risk(
                torch.zeros(2, 3), torch.zeros(2), criterion=nn.CrossEntropyLoss(reduction="sum")
            ),
            ValueError,
            "leave the reduction out",
        ),
        (
            lambda model, loss: look.empirical_risk(
                torch.zeros(2, 3), torch.zeros(2), criterion=partial(cross_entropy, reduction="sum")
            ),
            ValueError,
            "leave the reduction out",
        ),
        (lambda model, loss: look.line(nn.Identity(), loss), ValueError, "got none"),
        (lambda model, loss: look.directions(nn.BatchNorm1d(3)), ValueError, "scaled"),
        (
            lambda model, loss: look.empirical_risk(torch.zeros(0, 3), torch.zeros(0)),
            ValueError,
            "at least one example",
        ),
        (lambda model, loss: look.empirical_risk(torch.zeros(2, 3), torch.zeros(3)), ValueError, "2 and 3"),
        (lambda model, loss: look.top_eigenvalue(model, lambda m: loss[0](m) / 0), ValueError, "finite"),
    ],
)
def test_bad_input_is_named(call: Callable[[Any, Any], object], error: type[Exception], text: str) -> None:
    case = Case("mlp")
    before = everything(case.model)
    with pytest.raises(error, match=text):
        call(case.model, case.loss)
    assert_same(before, everything(case.model))
