"""Choosing on the device: bit for bit, whatever the bits say, and the same in both ways of doing it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatmin.core.copies import Copies
from flatmin.core.tensors import plain, select_, select_at_once, select_one_by_one, zero_unless_
from tests.support.cases import same

SPECIAL = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 1e-40, 3.4e38]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Of odd and even sizes, of none, with no dimension, laid out in several ways; special values among the numbers."""
    torch.manual_seed(0)
    values = torch.tensor(SPECIAL) if dtype.is_floating_point or dtype.is_complex else torch.arange(9)
    long = values.repeat(11).to(dtype)
    return [
        long,
        long[:7],
        long[1:9],
        long[:0],
        long[2],
        long[:96].view(4, 2, 3, 4),
        long[:96].view(8, 12).T,
        long[::2],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flag", [True, False])
def test_keep_leaves_every_bit_or_none(dtype: torch.dtype, flag: bool) -> None:
    kept = [tensor.clone() for tensor in tensors(dtype)]
    zero_unless_(kept, torch.tensor(flag))
    expected = tensors(dtype) if flag else [torch.zeros_like(tensor) for tensor in tensors(dtype)]
    assert same(kept, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("flag", [True, False])
def test_of_an_expanded_tensor_every_number_is_kept_or_zeroed(dtype: torch.dtype, flag: bool) -> None:
    kept = [torch.tensor([[3.0], [float("nan")]], dtype=dtype).expand(2, 5), torch.tensor(2.0, dtype=dtype).expand(4)]
    expected = [tensor.clone() if flag else torch.zeros_like(tensor) for tensor in kept]
    zero_unless_(kept, torch.tensor(flag))
    assert same(kept, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flag", [True, False])
def test_choose_takes_every_bit_of_one_or_the_other(dtype: torch.dtype, flag: bool) -> None:
    targets, sources = [t.clone() for t in tensors(dtype)], [t.flip(0) if t.dim() else t + 1 for t in tensors(dtype)]
    expected = [t.clone() for t in (sources if flag else targets)]
    select_(zip(targets, sources, strict=True), torch.tensor(flag))
    assert same(targets, expected)


@pytest.mark.parametrize("way", [select_one_by_one, select_at_once])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("flag", [True, False])
def test_both_ways_of_choosing_are_the_same(
    way: Callable[[list[Tensor], list[Tensor], Tensor], None], dtype: torch.dtype, flag: bool
) -> None:
    """The one for the CPU and the one for GPUs, both on the CPU."""
    torch.manual_seed(0)
    limits = torch.iinfo(dtype)
    shapes = [(5,), (4, 6), (0,), ()]
    targets = [torch.randint(limits.min, limits.max, shape, dtype=dtype) for shape in shapes]
    sources = [torch.randint(limits.min, limits.max, shape, dtype=dtype) for shape in shapes]
    expected = [t.clone() for t in (sources if flag else targets)]
    way(targets, sources, torch.tensor(flag))
    assert same(targets, expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says so at any sparse tensor
def test_plain_shares_memory() -> None:
    weight = torch.zeros(2, dtype=torch.complex64)
    plain(weight).fill_(1)
    assert weight.tolist() == [1 + 1j, 1 + 1j]
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), [1.0, 2.0], (3,), check_invariants=True)
    plain(sparse).mul_(3)
    assert sparse.to_dense().tolist() == [3, 0, 6]


def test_copies_keep_their_memory_while_it_fits() -> None:
    copies: Copies[str] = Copies()
    weight = torch.zeros(4)
    copies.take({"weight": weight})
    first = copies["weight"].data_ptr()
    copies.forget()
    assert "weight" not in copies
    copies.take({"weight": weight})
    assert copies["weight"].data_ptr() == first
    copies.forget()
    copies.take({"weight": weight.double()})
    assert copies["weight"].dtype == torch.float64
    assert copies.nbytes() == 32


def test_nothing_is_put_back_when_memory_runs_out_while_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: Copies[str] = Copies()
    tensors = {"first": torch.ones(2), "second": torch.ones(3)}
    real = torch.empty_like

    def short_of_memory(tensor: Tensor, **settings: Any) -> Tensor:
        if len(tensor) == 3:
            raise MemoryError
        return real(tensor, **settings).fill_(7)

    monkeypatch.setattr(torch, "empty_like", short_of_memory)
    with pytest.raises(MemoryError):
        copies.take(tensors)
    copies.put_back(tensors)
    assert tensors["first"].tolist() == [1, 1]


def new_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


def transposed(weight: nn.Parameter) -> None:
    """In the same memory."""
    weight.data = weight.data.t()


def reshaped(weight: nn.Parameter) -> None:
    weight.data = weight.data.reshape(-1)


def in_float64(weight: nn.Parameter) -> None:
    weight.data = weight.data.double()


@pytest.mark.parametrize("change", [new_memory, transposed, reshaped, in_float64])
def test_lists_that_were_kept_serve_the_same_tensors_alone(change: Callable[[nn.Parameter], None]) -> None:
    weights = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(2))]
    copies: Copies[Tensor] = Copies()
    assert not copies.take_again(weights)
    copies.take({weight: weight for weight in weights})
    copies.forget()
    assert not copies.put_back_again(weights)  # nothing is held
    assert copies.take_again(weights)
    assert not copies.take_again(weights)  # it is held already
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    for others in (weights[:1], weights[::-1], [*weights, weights[0]], [weights[0], nn.Parameter(torch.zeros(2))]):
        assert not copies.holds_just(others)
        assert not copies.put_back_again(others)
    assert copies.put_back_again(weights)
    assert same(weights, before)
    change(weights[0])
    assert not copies.put_back_again(weights)
    copies.forget()
    assert not copies.take_again(weights)
    copies.take({weight: weight for weight in weights})
    assert copies[weights[0]].dtype == weights[0].dtype
    assert same([copies[weight] for weight in weights], weights)


@pytest.mark.parametrize("flag", [True, False])
def test_all_are_put_back_if_a_flag_holds(flag: bool) -> None:
    weights = [torch.randn(3, 3), torch.randn(5), torch.tensor(float("nan")), torch.randn(2, dtype=torch.complex64)]
    copies: Copies[Tensor] = Copies()
    copies.take({weight: weight for weight in weights})
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.add_(1)
    after = [weight.clone() for weight in weights]
    assert copies.put_back_again(weights, flag=torch.tensor(flag))
    assert same(weights, before if flag else after)
