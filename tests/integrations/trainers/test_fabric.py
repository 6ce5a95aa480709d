"""flatmin under Lightning Fabric equals flatmin in a loop without it, whichever form the step has."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import flatmin
from tests import ROOT
from tests.support.cases import MODELS, same
from tests.support.doc_blocks import code

pytest.importorskip("lightning", reason="needs Lightning: pip install 'flatmin[lightning]'")

from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

Batches = list[tuple[Tensor, Tensor]]
Form = Literal["closure", "blocks"]

PAGE = ROOT / "docs" / "trainers_lightning.md"


def batches(device: str = "cpu") -> Batches:
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, 6, 6, generator=generator)
    drawn = [(draw(), torch.randint(0, 3, (6,), generator=generator)) for _ in range(5)]
    return [(x.to(device), y.to(device)) for x, y in drawn]


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def amp(model: nn.Module, **settings: Any) -> flatmin.AMP:
    return flatmin.AMP(SGD(model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, model=model, **settings)


def fabric_on_cpu(**settings: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, **settings)


def train(
    model: nn.Module,
    optimizer: Any,
    form: Form,
    *,
    backward: Callable[[Tensor], object] = Tensor.backward,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    scaler: GradScaler | None = None,
    device: str = "cpu",
) -> list[float]:
    """The loop of a user, with Fabric or without; the loss of every pass."""
    torch.manual_seed(1)
    losses = []
    for x, y in batches(device):

        def run(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = functional.cross_entropy(model(x).float(), y)
            backward(loss)
            losses.append(loss.item())
            return loss

        def closure(run: Callable[[], Tensor] = run) -> Tensor:
            optimizer.zero_grad()
            return run()

        if form == "closure":
            optimizer.step(closure)
        else:
            closure()
            for _ in range(optimizer.inner_iter):
                with optimizer.perturbed(scaler=scaler):
                    run()
            before_step()
            optimizer.step()
        after_step()
    return losses


# ---- the same numbers


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("form", ["closure", "blocks"])
@pytest.mark.parametrize("name", ["mlp", "conv-batchnorm", "dropout"])
def test_fabric_equals_a_loop_without_it_bit_for_bit(name: str, form: Form, inner_iter: int, device: str) -> None:
    """BatchNorm's statistics and dropout's masks too, which the losses of all passes show."""
    plain, model = network(name).to(device), network(name).to(device)
    expected = train(plain, amp(plain, inner_iter=inner_iter), form, device=device)
    fabric = Fabric(accelerator=device, devices=1)
    prepared, optimizer = fabric.setup(model, amp(model, inner_iter=inner_iter))
    assert train(prepared, optimizer, form, backward=fabric.backward, device=device) == expected
    assert same(model.parameters(), plain.parameters())
    assert same(model.buffers(), plain.buffers())
    assert float(optimizer.last.delta_norm) > 0


@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_an_optimizer_that_is_set_up_after_its_model_trains_the_same(form: Form) -> None:
    plain, model = network("dropout"), network("dropout")
    expected = train(plain, amp(plain), form)
    fabric = fabric_on_cpu()
    prepared = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(amp(prepared))
    assert train(prepared, optimizer, form, backward=fabric.backward) == expected
    assert same(model.parameters(), plain.parameters())


def test_blocks_of_the_optimizer_inside_draw_the_masks_of_the_clean_pass() -> None:
    """zero_grad() on the proxy, perturbed() on the optimizer: one step all the same."""
    fabric = fabric_on_cpu()
    model = network("dropout")
    optimizer = amp(model)
    optimizer.param_groups[0]["epsilon"] = 1e-9
    prepared, proxy = fabric.setup(model, optimizer)
    for x, y in batches():
        losses = []
        proxy.zero_grad()
        losses.append(functional.cross_entropy(prepared(x), y))
        fabric.backward(losses[-1])
        with optimizer.perturbed():
            losses.append(functional.cross_entropy(prepared(x), y))
            fabric.backward(losses[-1])
        proxy.step()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)


def test_rmp_in_blocks_equals_a_loop_without_fabric_bit_for_bit() -> None:
    ended = []
    for with_fabric in (False, True):
        model = network("conv-batchnorm")
        generator = torch.Generator().manual_seed(7)
        optimizer: Any = flatmin.RMP(SGD(model.parameters(), lr=0.1), epsilon=0.1, generator=generator, model=model)
        fabric = fabric_on_cpu()
        prepared, optimizer = fabric.setup(model, optimizer) if with_fabric else (model, optimizer)
        for x, y in batches():
            optimizer.zero_grad()
            with optimizer.perturbed():
                functional.cross_entropy(prepared(x), y).backward()
            optimizer.step()
        ended.append([*model.parameters(), *model.buffers()])
    assert same(*ended)


def test_clipping_and_schedulers_act_on_the_step_bit_for_bit() -> None:
    plain, model = network("mlp"), network("mlp")
    alone = amp(plain)
    clip = partial(nn.utils.clip_grad_norm_, list(plain.parameters()), 0.05)
    expected = train(plain, alone, "blocks", before_step=clip, after_step=StepLR(alone, 2, 0.5).step)
    fabric = fabric_on_cpu()
    prepared, optimizer = fabric.setup(model, amp(model))
    got = train(
        prepared,
        optimizer,
        "blocks",
        backward=fabric.backward,
        before_step=lambda: fabric.clip_gradients(prepared, optimizer, max_norm=0.05),
        after_step=StepLR(optimizer, 2, 0.5).step,
    )
    assert got == expected
    assert same(model.parameters(), plain.parameters())


def test_bf16_equals_autocast_without_fabric_bit_for_bit() -> None:
    plain, model = network("dropout"), network("dropout")
    forward = plain.forward
    plain.forward = torch.autocast("cpu", dtype=torch.bfloat16)(forward)
    expected = train(plain, amp(plain), "blocks")
    fabric = fabric_on_cpu(precision="bf16-mixed")
    prepared, optimizer = fabric.setup(model, amp(model))
    assert train(prepared, optimizer, "blocks", backward=fabric.backward) == expected
    assert same(model.parameters(), plain.parameters())


def fp16() -> MixedPrecision:
    """Fabric's own plugin; given "16-mixed" on a CPU, it would take bf16 instead."""
    return MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=2.0**12))


def test_fp16_takes_fabrics_scaler_in_blocks() -> None:
    plain, model = network("mlp"), network("mlp")
    expected = train(plain, amp(plain), "blocks")
    fabric = fabric_on_cpu(plugins=[fp16()])
    scaler = fabric.strategy.precision.scaler  # type: ignore[attr-defined]
    prepared, optimizer = fabric.setup(model, amp(model))
    assert train(prepared, optimizer, "blocks", backward=fabric.backward, scaler=scaler) == pytest.approx(
        expected, rel=1e-2
    )
    assert float(optimizer.last.grad_norm) < 100  # not times the scale
    with pytest.raises(RuntimeError, match=r"write `with optimizer.perturbed\(scaler=scaler\):`"):
        train(prepared, optimizer, "blocks", backward=fabric.backward)


# ---- checkpoints, settings, the other doors


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    fabric = fabric_on_cpu()
    first, second = network("dropout"), network("dropout")
    prepared, optimizer = fabric.setup(first, amp(first))
    again, restored = fabric.setup(second, amp(second))
    train(prepared, optimizer, "blocks", backward=fabric.backward)
    fabric.save(tmp_path / "saved", {"model": prepared, "optimizer": optimizer})
    fabric.load(tmp_path / "saved", {"model": again, "optimizer": restored})
    expected = train(prepared, optimizer, "blocks", backward=fabric.backward)
    assert train(again, restored, "blocks", backward=fabric.backward) == expected
    assert same(second.parameters(), first.parameters())


def test_a_model_set_on_the_proxy_is_the_optimizers() -> None:
    model = network("dropout")
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1), epsilon=0.1)
    prepared, proxy = fabric_on_cpu().setup(model, optimizer)
    proxy.model = prepared
    assert optimizer.model is prepared
    assert optimizer.shares_clean_state


@pytest.mark.parametrize("form", ["closure", "blocks"])
def test_a_setting_on_the_proxy_which_no_step_would_see_is_refused(form: Form) -> None:
    fabric = fabric_on_cpu()
    model = network("mlp")
    prepared, optimizer = fabric.setup(model, amp(model))
    optimizer.inner_iter = 2
    with pytest.raises(RuntimeError, match=r"got 2 on the FabricAMP around it; set optimizer.optimizer.inner_iter"):
        train(prepared, optimizer, form, backward=fabric.backward)
    assert same(model.parameters(), network("mlp").parameters())


def test_the_proxy_misuses_blocks_as_the_optimizer_does() -> None:
    fabric = fabric_on_cpu()
    model = network("mlp")
    prepared, optimizer = fabric.setup(model, amp(model))
    with pytest.raises(RuntimeError, match="perturbed\\(\\) follows the gradient"), optimizer.perturbed():
        pass
    fabric.backward(prepared(batches()[0][0]).sum())
    with pytest.raises(KeyError), optimizer.perturbed():
        raise KeyError("in the block")
    assert same(model.parameters(), network("mlp").parameters())
    with pytest.raises(TypeError, match=r"AMP.step needs a closure"):
        optimizer.step()


def test_a_captured_step_and_the_doctor_take_the_proxy() -> None:
    ended = []
    for with_fabric in (False, True):
        model = network("mlp")
        optimizer: Any = amp(model)
        prepared, optimizer = fabric_on_cpu().setup(model, optimizer) if with_fabric else (model, optimizer)
        step = flatmin.captured_step(prepared, lambda net, x, y: functional.cross_entropy(net(x), y), optimizer)
        for x, y in batches():
            step(x, y)
        assert optimizer.last.delta_norm is not None
        ended.append(list(model.parameters()))
    assert same(*ended)

    def make_training() -> tuple[nn.Module, Any, Callable[[], Tensor]]:
        fabric, model, (x, y) = fabric_on_cpu(), network("dropout"), batches()[0]
        prepared, optimizer = fabric.setup(model, amp(model))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(prepared(x), y)
            fabric.backward(loss)
            return loss

        return prepared, optimizer, closure

    assert not [finding for finding in flatmin.doctor.examine(make_training) if finding.verdict == "error"]


# ---- what is shown to users


@pytest.mark.parametrize("text", [text for text in code(PAGE) if "fabric.setup" in text])
def test_the_loops_of_the_page_equal_a_loop_without_fabric_bit_for_bit(text: str) -> None:
    plain, model = network("dropout"), network("dropout")
    names: dict[str, Any] = {"torch": torch, "flatmin": flatmin, "Fabric": fabric_on_cpu, "loader": batches()}
    torch.manual_seed(1)
    exec(compile(text, str(PAGE), "exec"), names | {"model": model, "loss_fn": functional.cross_entropy})
    optimizer = flatmin.AMP(SGD(plain.parameters(), lr=0.1), epsilon=0.1, model=plain)
    train(plain, optimizer, "blocks")
    assert same(model.parameters(), plain.parameters())
    assert not same(model.parameters(), network("dropout").parameters())
