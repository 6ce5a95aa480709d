"""Logits and labels are checked before they are measured: a wrong one is named, on every device."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatmin import metrics

MEASURES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "error": metrics.error,
    "nll": metrics.nll,
    "brier": metrics.brier,
    "ece": metrics.ece,
    "adaptive_ece": metrics.adaptive_ece,
    "reliability": metrics.reliability,
    "temperature": metrics.temperature,
    "bootstrap": lambda logits, labels: metrics.bootstrap(metrics.error, logits, labels, samples=2),
}
every_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@every_measure
@every_device
def test_a_label_that_is_no_class_is_named(measure: Callable[..., object], device: str) -> None:
    """On a GPU an unchecked one would end the process."""
    for wrong in (-100, -1, 3, 255):
        labels = torch.tensor([0, 2, wrong, 1, wrong], device=device)
        with pytest.raises(ValueError, match=f"0 to 2 for 3 classes, got {wrong} in row 2, the first of 2 such rows"):
            measure(torch.zeros(5, 3, device=device), labels)
        measure(torch.zeros(5, 3, device=device), labels.clamp(0, 2))  # the device still works


@every_measure
def test_a_label_of_few_bits_is_not_taken_for_another(measure: Callable[..., object]) -> None:
    """1000 is 232 in eight bits: compared there, a label of 250 would be no class of 1000."""
    labels = torch.tensor([0, 100, 250])
    few, many = (measure(torch.zeros(3, 1000), labels.to(dtype)) for dtype in (torch.uint8, torch.int64))
    assert str(few) == str(many)  # tensors, bins or intervals


@every_measure
@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_row_without_probabilities_is_named(measure: Callable[..., object], device: str, dtype: torch.dtype) -> None:
    for row in ([1.0, math.nan], [math.nan, math.nan], [math.inf, 1.0], [-math.inf, -math.inf]):
        logits = torch.tensor([[0.0, 1.0], row, [0.0, 1.0], row], dtype=dtype, device=device)
        with pytest.raises(ValueError, match="2 such rows of 4, the first being row 1"):
            measure(logits, torch.zeros(4, dtype=torch.int64, device=device))


@every_device
def test_a_class_may_be_excluded(device: str) -> None:
    """−inf has the probability 0: every measure is that of the classes that are left."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 4, generator=generator), torch.randint(0, 4, (200,), generator=generator)
    excluded = torch.cat([logits, torch.full((200, 2), -math.inf)], dim=1).to(device)
    logits, labels = logits.to(device), labels.to(device)
    for measure in (metrics.error, metrics.nll, metrics.brier, metrics.ece, metrics.adaptive_ece, metrics.temperature):
        torch.testing.assert_close(measure(excluded, labels), measure(logits, labels), rtol=1e-6, atol=1e-7)


def test_a_label_that_was_excluded_is_infinitely_unlikely() -> None:
    logits, labels = torch.tensor([[0.0, -math.inf], [0.0, 1.0]]), torch.tensor([1, 1])
    assert metrics.nll(logits, labels) == math.inf
    assert metrics.brier(logits, labels).isfinite()
    with pytest.raises(ValueError, match="likelihood is 0 at every T; got 1 such rows"):
        metrics.temperature(logits, labels)


@pytest.mark.parametrize(
    ("logits", "labels"), [((3,), (3,)), ((3, 2), (2,)), ((0, 2), (0,)), ((3, 0), (3,)), ((3, 2), (3, 1))], ids=str
)
@every_measure
def test_wrong_shapes_are_named(
    measure: Callable[..., object], logits: tuple[int, ...], labels: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="must be"):
        measure(torch.zeros(logits), torch.zeros(labels, dtype=torch.long))


@every_measure
def test_labels_must_be_whole_numbers(measure: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"torch\.float32"):
        measure(torch.zeros(3, 2), torch.zeros(3))


def test_labels_may_be_whole_numbers_of_any_size() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(50, 4, generator=generator), torch.randint(0, 4, (50,), generator=generator)
    for measure in (metrics.error, metrics.nll, metrics.brier, metrics.ece, metrics.adaptive_ece, metrics.temperature):
        for dtype in (torch.uint8, torch.int16, torch.int32):
            assert torch.equal(measure(logits, labels.to(dtype)), measure(logits, labels))
