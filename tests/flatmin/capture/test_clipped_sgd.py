"""SGD that clips: as torch clips, and in a captured step's graph."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatmin
from flatmin.capture.clipped_sgd import ClippedSGD, clipped


@pytest.mark.parametrize("clip_norm", [0.3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_as_torch_clips_them(clip_norm: float, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weights = [torch.zeros(shape) for shape in ((3, 4), (5,), (2, 3, 3, 3))]
    gradients = {p: torch.randn(p.shape, generator=random).to(dtype) for p in weights}
    kept = {p: gradient.clone() for p, gradient in gradients.items()}
    found = clipped(gradients, clip_norm)
    for p in weights:
        p.grad = kept[p].to(p.dtype, copy=True)
    nn.utils.clip_grad_norm_(weights, clip_norm)
    for p in weights:
        torch.testing.assert_close(found[p], p.grad, rtol=1e-6, atol=0)
        assert torch.equal(gradients[p], kept[p])  # what was handed over stays


def test_without_gradients_there_is_nothing_to_clip() -> None:
    assert clipped({}, 1.0) == {}


@pytest.mark.cuda
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_captured_step_has_the_clipping_in_its_graph(epsilon: float, autocast: torch.dtype | None) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).cuda()
    x, y = torch.randn(16, 3, 8, 8, device="cuda"), torch.arange(16, device="cuda") % 5

    def trained(*, capture: bool, clip_norm: float) -> tuple[nn.Module, flatmin.capture.CapturedStep]:
        model = copy.deepcopy(first)
        base = ClippedSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, clip_norm=clip_norm)
        optimizer = flatmin.AMP(base, epsilon=epsilon, model=model)

        def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(model(x).float(), y)

        step = flatmin.captured_step(model, loss_of, optimizer, autocast=autocast, capture=capture)
        for _ in range(6):
            step(x, y)
        return model, step

    captured, step = trained(capture=True, clip_norm=0.1)
    eager, _ = trained(capture=False, clip_norm=0.1)
    unclipped, _ = trained(capture=False, clip_norm=1e6)
    assert step.captured
    assert all(graph.inside for graph in step._graphs.values())
    tolerance = 1e-4 if autocast is None else 1e-2
    for ours, theirs, other in zip(*(m.parameters() for m in (captured, eager, unclipped)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(ours, other, rtol=tolerance, atol=tolerance) or ours.ndim == 1
