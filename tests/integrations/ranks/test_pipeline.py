"""One ball over the stages of a pipeline, as the page about several GPUs does it: two gloo processes train as one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import flatmin
from tests import ROOT
from tests.integrations.ranks.processes import in_ranks
from tests.support.doc_blocks import blocks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

PAGE = ROOT / "docs" / "several_gpus.md"
STAGES = 2


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    stages = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(*stages).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(4)]


def train_in_stages(rank: int) -> dict[str, Any]:
    (text,) = (block.text for block in blocks(PAGE, "python") if "PipelineStage" in block.text)
    names: dict[str, Any] = {"model": whole()[rank], "loader": batches(), "loss_fn": cross_entropy}
    names |= {"torch": torch, "flatmin": flatmin, "device": torch.device("cpu")}
    exec(compile(text, "page", "exec"), names)
    last = names["optimizer"].last
    return {"weights": [param.detach() for param in names["model"].parameters()], "delta_norm": last.delta_norm}


def test_stages_share_one_ball_and_train_as_one_process(tmp_path: Path) -> None:
    seen = in_ranks({"stages": train_in_stages}, STAGES, tmp_path)
    model = whole()
    optimizer = flatmin.AMP(AdamW(model.parameters(), lr=1e-3), epsilon=0.1, model=model)
    for x, y in batches():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with optimizer.perturbed():
            cross_entropy(model(x), y).backward()
        optimizer.step()
    for stage, results in zip(model, seen, strict=True):
        for weight, found in zip(stage.parameters(), results["stages"]["weights"], strict=True):
            torch.testing.assert_close(found, weight.detach(), rtol=1e-9, atol=1e-12)
    assert float(torch.stack([results["stages"]["delta_norm"] for results in seen]).norm()) == pytest.approx(0.1)
