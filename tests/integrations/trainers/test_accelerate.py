"""Accelerate: a window of micro-batches is a loop written by hand around flatmin.AMP, to the last bit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

import flatmin  # noqa: E402
from flatmin.integrations.accelerate import Window, check_strategy  # noqa: E402
from tests.support.cases import MODELS, same  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings in one place for all of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def batches(size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    """14 rows: batches of 4, of which the last is short; windows of 3, of which the last is short too."""
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(14, 6, generator=generator), torch.randint(0, 3, (14,), generator=generator))
    return DataLoader(rows, batch_size=size)


@dataclass
class Seen:
    """What a training leaves behind."""

    losses: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    model: nn.Module = field(default_factory=nn.Module)
    optimizer: Any = None
    accelerator: Any = None

    def weights(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.model.state_dict().values()]


def new_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def wrapped(model: nn.Module, **settings: Any) -> flatmin.AMP:
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return flatmin.AMP(base, **{"epsilon": 0.1, "model": model, **settings})


def accelerated(
    name: str = "dropout",
    *,
    steps: int = 3,
    epochs: int = 2,
    size: int = 4,
    clip: float = 0.5,
    perturbed: bool = True,
    scaler: GradScaler | None = None,
    spoilt: int | None = None,
    **settings: Any,
) -> Seen:
    """A loop as Accelerate's guide has it; `spoilt` is the number of a forward pass whose loss overflows."""
    in_float32 = accelerate.utils.AutocastKwargs(enabled=False)  # so that scaled numbers can be compared
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=steps, cpu=True, kwargs_handlers=[in_float32])
    if scaler is not None:  # what Accelerate makes for fp16 on a GPU, on the CPU: its own code from here on
        accelerator.scaler, accelerator.native_amp = scaler, True
        accelerator.state._mixed_precision = "fp16"
    model = new_model(name)
    optimizer: Optimizer = wrapped(model, **settings) if perturbed else SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, batches(size), schedule)
    window = Window(accelerator, model, optimizer) if perturbed else None
    seen = Seen(model=model, optimizer=optimizer, accelerator=accelerator)
    passes = 0

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return cross_entropy(model(x), y) * (float("inf") if passes - 1 == spoilt else 1)

    model.train()
    torch.manual_seed(1)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                if window is None:
                    loss = loss_of(x, y)
                    accelerator.backward(loss)
                else:
                    loss = window.backward(loss_of, x, y)
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.losses.append(loss.detach())
            seen.rates.append(optimizer.param_groups[0]["lr"])
    return seen


def by_hand(name: str = "dropout", *, steps: int = 3, clip: float = 0.5, **settings: Any) -> Seen:
    model = new_model(name)
    optimizer = wrapped(model, **settings)
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    seen = Seen(model=model, optimizer=optimizer)
    loader = batches()

    def run(window: list[Any]) -> list[Tensor]:
        losses = []
        for x, y in window:
            loss = cross_entropy(model(x), y)
            (loss / steps).backward()
            losses.append(loss.detach())
        return losses

    torch.manual_seed(1)
    for _ in range(2):
        epoch = list(loader)
        for at in range(0, len(epoch), steps):
            window = epoch[at : at + steps]
            optimizer.zero_grad()
            seen.losses += run(window)
            for _ in range(optimizer.inner_iter):
                with optimizer.perturbed():
                    run(window)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
    return seen


@pytest.mark.parametrize("name", ["dropout", "conv-batchnorm", "tied", "frozen"])
@pytest.mark.parametrize(("steps", "inner_iter"), [(1, 1), (3, 1), (3, 2)])
def test_a_window_is_a_loop_by_hand_to_the_last_bit(name: str, steps: int, inner_iter: int) -> None:
    expected = by_hand(name, steps=steps, inner_iter=inner_iter)
    seen = accelerated(name, steps=steps, inner_iter=inner_iter)
    assert same(seen.weights(), expected.weights())
    assert same(seen.losses, expected.losses)  # of the clean passes


def test_without_a_radius_it_is_the_plain_loop_to_the_last_bit() -> None:
    for settings in ({"epsilon": 0.0}, {"inner_iter": 0}):
        expected, seen = accelerated(perturbed=False), accelerated(**settings)
        assert same(seen.weights(), expected.weights())
        assert same(seen.losses, expected.losses)
        assert seen.rates == expected.rates


def test_micro_batches_are_one_large_batch() -> None:
    """A step with twelve rows, as three batches of four and as one."""
    first = []
    for steps, size in ((3, 4), (1, 12)):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=steps, cpu=True)
        model = new_model("mlp")
        model, optimizer = accelerator.prepare(model, wrapped(model))
        window = Window(accelerator, model, optimizer)
        for x, y in list(batches(size))[:steps]:
            with accelerator.accumulate(model):
                window.backward(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
                optimizer.step()
        first.append([param.detach().clone() for param in model.parameters()])
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    for one, other in zip(*first, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_schedule_steps_once_a_window() -> None:
    seen = accelerated(steps=3, inner_iter=2)
    assert seen.rates == [0.1, 0.1, 0.05, 0.025, 0.025, 0.025, 0.0125, 0.00625]


def test_clipping_is_of_the_last_gradient_alone() -> None:
    """A gradient that is clipped to next to nothing moves nothing; Δ has its length all the same."""
    for clip in (0.0, 1e-6):
        seen = accelerated("mlp", clip=clip, epochs=1)
        last = seen.optimizer.optimizer.last
        assert float(last.delta_norm) == pytest.approx(min(0.1, float(last.grad_norm)), rel=1e-5)
        pairs = zip(seen.model.parameters(), new_model("mlp").parameters(), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs) == bool(clip)


def test_draws_between_micro_batches_do_not_change_the_masks() -> None:
    """Augmentation in the loop draws from the generator that dropout draws from."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = new_model("dropout")
    masks: list[Tensor] = []
    model[2].register_forward_hook(lambda module, args, output: masks.append((output == 0) & (args[0] != 0)))  # type: ignore[index]
    model, optimizer = accelerator.prepare(model, wrapped(model, epsilon=1e-6))
    window = Window(accelerator, model, optimizer)
    for x, y in list(batches())[:2]:
        with accelerator.accumulate(model):
            window.backward(lambda x, y: cross_entropy(model(x), y), x + torch.randn(x.shape), y)
    after = torch.rand(())
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[1], masks[3])
    assert not torch.equal(masks[0], masks[1])
    torch.manual_seed(0)
    assert not torch.equal(torch.rand(()), after)


@pytest.mark.parametrize("form", ["alone", "by name", "inside"])
def test_a_loss_may_take_entries_out_of_its_batch(form: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model("mlp")
    model, optimizer = accelerator.prepare(model, wrapped(model, inner_iter=2))
    window, passes = Window(accelerator, model, optimizer), list[dict[str, Tensor]]()

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        passes.append(batch)
        return cross_entropy(model(batch.pop("x")), batch.pop("y"))

    for x, y in list(batches())[:2]:
        batch = {"x": x, "y": y}
        with accelerator.accumulate(model):
            if form == "alone":
                window.backward(loss_of, batch)
            elif form == "by name":
                window.backward(loss_of, batch=batch)
            else:
                window.backward(lambda pair: loss_of(pair[0]), (batch, None))
            optimizer.step()
        assert not batch  # at θ it is the loop's own
    assert len(passes) == 2 + 2 * 2


def test_a_closure_needs_no_window_where_nothing_is_accumulated_or_scaled() -> None:
    runs = []
    for prepared in (False, True):
        model = new_model("dropout")
        optimizer: Any = wrapped(model)
        if prepared:
            accelerator = accelerate.Accelerator(cpu=True)
            model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(1)
        for x, y in batches():

            def closure(x: Tensor = x, y: Tensor = y, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        runs.append([param.detach().clone() for param in model.parameters()])
    assert same(*runs)


def test_state_is_saved_and_loaded_to_the_last_bit(tmp_path: Path) -> None:
    """Two steps, save, load into fresh objects, two steps: as four."""
    ends, loader = [], list(batches())
    for interrupted in (False, True):
        for part in ([0, 1], [2, 3]) if interrupted else ([0, 1, 2, 3],):
            accelerator = accelerate.Accelerator(cpu=True)
            model = new_model("dropout")
            optimizer: Any = flatmin.AMP(AdamW(model.parameters(), lr=1e-2), epsilon=0.1, model=model)
            model, optimizer = accelerator.prepare(model, optimizer)
            window = Window(accelerator, model, optimizer)
            if part[0] == 2:
                accelerator.load_state(str(tmp_path))
            else:
                torch.manual_seed(1)
            for number in part:
                window.backward(lambda x, y, model=model: cross_entropy(model(x), y), *loader[number])
                optimizer.step()
                optimizer.zero_grad()
            if interrupted and part[0] == 0:
                accelerator.save_state(str(tmp_path))
        ends.append([param.detach().clone() for param in model.parameters()])
    assert same(*ends)


# ---- fp16


def new_scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("settings", [{}, {"inner_iter": 2}, {"epsilon": 0.0}, {"inner_iter": 0}])
def test_a_scaled_training_is_the_plain_one(clip: float, settings: dict[str, Any]) -> None:
    expected = accelerated("mlp", clip=clip, **settings)
    AcceleratorState._reset_state(reset_partial_state=True)
    seen = accelerated("mlp", clip=clip, scaler=new_scaler(), **settings)
    for one, other in zip(seen.weights(), expected.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert seen.rates == expected.rates


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("spoilt", range(6))
def test_an_overflow_in_any_pass_skips_step_and_schedule_and_lowers_the_scale(spoilt: int, clip: float) -> None:
    """The first window: three micro-batches at θ, three at θ + Δ."""
    scaler = new_scaler()
    seen = accelerated("mlp", epochs=1, clip=clip, scaler=scaler, spoilt=spoilt)
    assert scaler.get_scale() == 2.0**9
    assert seen.rates == [0.1, 0.1, 0.1, 0.05]  # the second window steps
    assert all(weight.isfinite().all() for weight in seen.weights())
    assert not seen.accelerator.optimizer_step_was_skipped


def test_an_overflow_without_a_radius_skips_too() -> None:
    for spoilt in range(3):
        scaler = new_scaler()
        seen = accelerated("mlp", epochs=1, epsilon=0.0, scaler=scaler, spoilt=spoilt)
        assert scaler.get_scale() == 2.0**9
        assert seen.rates == [0.1, 0.1, 0.1, 0.05]


# ---- what goes wrong


def test_an_exception_in_a_pass_leaves_the_weights_and_the_next_window_is_whole() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = new_model("mlp")
    theta = [param.detach().clone() for param in model.parameters()]
    model, optimizer = accelerator.prepare(model, wrapped(model))
    window = Window(accelerator, model, optimizer)
    x, y = next(iter(batches()))
    for failing in (1, 2):
        calls = 0

        def fails(x: Tensor, y: Tensor, failing: int = failing) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise RuntimeError("out of memory")
            return cross_entropy(model(x), y)

        with pytest.raises(RuntimeError, match="out of memory"):
            window.backward(fails, x, y)
        assert same(model.parameters(), theta)
        optimizer.zero_grad()
    window.backward(lambda x, y: cross_entropy(model(x), y), x, y)
    optimizer.step()
    straight = new_model("mlp")
    by_closure = wrapped(straight)
    by_closure.zero_grad()
    cross_entropy(straight(x), y).backward()
    with by_closure.perturbed():
        cross_entropy(straight(x), y).backward()
    by_closure.step()
    assert same(model.parameters(), straight.parameters())


def test_a_window_that_was_dropped_is_not_part_of_the_next() -> None:
    """Its last micro-batch fails, the loop zeroes the gradients and goes on, as after running out of memory."""
    ended = []
    for fails_first in (True, False):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = new_model("mlp")
        model, optimizer = accelerator.prepare(model, wrapped(model))
        window = Window(accelerator, model, optimizer)

        def loss_of(x: Tensor, y: Tensor, *, fails: bool = False, model: nn.Module = model) -> Tensor:
            if fails:
                raise RuntimeError("out of memory")
            return cross_entropy(model(x), y)

        rows = list(batches())[:2]
        for dropped in (True, False) if fails_first else (False,):
            for number, (x, y) in enumerate(rows):
                with accelerator.accumulate(model):
                    try:
                        window.backward(loss_of, x, y, fails=dropped and number == 1)
                        optimizer.step()
                    except RuntimeError:
                        pass
                    optimizer.zero_grad()
        ended.append(list(model.parameters()))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert same(*ended)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_a_step_has_the_mean_losses_of_its_window(epsilon: float) -> None:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = new_model("mlp")
    model, optimizer = accelerator.prepare(model, wrapped(model, epsilon=epsilon))
    window, seen = Window(accelerator, model, optimizer), list[float]()

    def loss_of(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = cross_entropy(model(x), y)
        seen.append(float(loss.detach()))
        return {"loss": loss}

    for x, y in list(batches())[:2]:
        with accelerator.accumulate(model):
            window.backward(loss_of, x, y)
            optimizer.step()
            optimizer.zero_grad()
    last = optimizer.optimizer.last
    assert float(last.loss) == pytest.approx(sum(seen[:2]) / 2, rel=1e-6)
    if epsilon:
        assert float(last.loss_perturbed) == pytest.approx(sum(seen[2:]) / 2, rel=1e-6)
        assert last.loss_perturbed > last.loss
    else:
        assert last.loss_perturbed is None


def test_what_is_wrong_is_told() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = new_model("mlp")
    plain = accelerator.prepare(SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"got an object of type SGD; write accelerator.prepare\(model, flatmin.AMP\("):
        Window(accelerator, model, plain)
    window = Window(accelerator, model, wrapped(model))
    with pytest.raises(TypeError, match=r"must return the loss as a tensor.* got an object of type NoneType"):
        window.backward(lambda: None)
    with pytest.raises(TypeError, match=r"got an object of type Tensor as the function; write window.backward\(model"):
        window.backward(torch.zeros(()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write Window\(accelerator, model, optimizer\), got an object of type"):
        Window(model, accelerator, plain)


@pytest.mark.parametrize("strategy", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
def test_strategies_that_hide_the_weights_are_refused(strategy: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = accelerate.DistributedType[strategy]
    if strategy == "FSDP":
        accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match="use DDP"):
        check_strategy(accelerator)


def test_rmp_draws_anew_in_every_step() -> None:
    """Also where nothing else draws: what was put back for the passes is not what Δ is drawn from."""
    accelerator, model, seen = accelerate.Accelerator(cpu=True), torch.nn.Linear(3, 2), list[torch.Tensor]()
    random = flatmin.RMP(SGD(model.parameters(), lr=0.0), epsilon=0.1, model=model)
    model, optimizer = accelerator.prepare(model, random)
    window = Window(accelerator, model, optimizer)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        seen.append(model.weight.detach().clone())
        loss: torch.Tensor = model(x).sum()
        return loss

    for _ in range(3):
        window.backward(loss_of, torch.ones(1, 3))
        optimizer.step()
        optimizer.zero_grad()
    clean, perturbed = seen[0::2], seen[1::2]
    assert all(torch.equal(weight, clean[0]) for weight in clean)
    assert len({float(weight.sum()) for weight in perturbed}) == 3


def test_accumulation_by_hand_is_told_how_to_accumulate() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = new_model("mlp")
    model, optimizer = accelerator.prepare(model, wrapped(model))
    window = Window(accelerator, model, optimizer)
    x, y = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    window.backward(loss_of, x, y)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"accelerator\.accumulate\(model\)"):
        window.backward(loss_of, x, y)
    assert same(before, list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()
    window.backward(loss_of, x, y)
    optimizer.step()
