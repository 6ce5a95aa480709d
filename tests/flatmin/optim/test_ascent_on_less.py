"""step(closure, ascent=closure_on_less): Δ from the gradient on less, the step's gradient on everything, at θ + Δ."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import flatmin
from tests.support.cases import same

COUNT = 4


class Training:
    """Float64, twelve rows, of which the ascent has the first `less`."""

    def __init__(self, *, less: int = 3, device: str = "cpu", dropout: float = 0.0, **settings: Any) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3)
        self.model = nn.Sequential(*layers).double().to(device)
        self.x = torch.randn(12, 5, dtype=torch.float64, device=device)
        self.y = torch.randint(0, 3, (12,), device=device)
        self.less = less
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = flatmin.AMP(base, model=self.model, **{"epsilon": 0.2, **settings})
        self.seen: list[int] = []
        self.model.register_forward_hook(lambda _, inputs, __: self.seen.append(len(inputs[0])))

    def closure(self, rows: int | None = None, scaler: GradScaler | None = None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = nn.functional.cross_entropy(self.model(self.x[:rows]), self.y[:rows])
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss.detach()

        return run

    def run(self, steps: int = COUNT, **more: Any) -> list[Tensor]:
        return [self.optimizer.step(self.closure(), ascent=self.closure(self.less), **more) for _ in range(steps)]

    def by_hand(self, steps: int = COUNT, inner_iter: int = 1, epsilon: float = 0.2) -> list[Tensor]:
        """The same without a line of flatmin: Δ = Π(ζ∇J_less) and the base's step with ∇J(θ + Δ)."""
        params, base, results = list(self.model.parameters()), self.optimizer.base, []
        for _ in range(steps):
            base.zero_grad()
            self.closure(self.less)()
            buffers = copy.deepcopy(list(self.model.buffers()))
            theta = [p.detach().clone() for p in params]
            delta = [torch.zeros_like(p) for p in params]
            for n in range(inner_iter):
                delta = [d + p.grad for d, p in zip(delta, params, strict=True)]  # type: ignore[operator]
                length = torch.stack([d.norm() for d in delta]).norm()
                delta = [d * min(1.0, epsilon / float(length)) for d in delta]
                with torch.no_grad():
                    for p, t, d in zip(params, theta, delta, strict=True):
                        p.copy_(t + d)
                result = self.closure(None if n + 1 == inner_iter else self.less)()
            with torch.no_grad():
                for p, t in zip(params, theta, strict=True):
                    p.copy_(t)
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            base.step()
            results.append(result)
        return results

    def state(self) -> list[Tensor]:
        return list(self.model.state_dict().values())


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_it_is_the_algorithm_with_two_batches(inner_iter: int) -> None:
    ours, theirs = Training(inner_iter=inner_iter), Training()
    losses, expected = ours.run(), theirs.by_hand(inner_iter=inner_iter)
    for mine, other in zip([*ours.state(), *losses], [*theirs.state(), *expected], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    assert ours.seen == ([3] * inner_iter + [12]) * COUNT


def test_on_the_whole_batch_it_is_amp_bit_for_bit() -> None:
    ours, usual = Training(less=12), Training()
    ours.run()
    for _ in range(COUNT):
        usual.optimizer.step(usual.closure())
    assert same(ours.state(), usual.state())


def test_it_returns_the_loss_of_everything_which_nothing_measured_at_theta() -> None:
    training = Training()
    (loss,) = training.run(1)
    last = training.optimizer.last
    assert last.loss is None
    assert last.loss_perturbed is not None
    assert torch.equal(loss, last.loss_perturbed)


def test_without_a_radius_the_ascent_is_not_called_and_it_is_the_base_alone() -> None:
    training, plain = Training(epsilon=0.0), Training(epsilon=0.0)
    training.run()
    assert training.seen == [12] * COUNT
    for _ in range(COUNT):
        plain.optimizer.base.step(plain.closure())  # type: ignore[arg-type]
    assert same(training.state(), plain.state())


def test_each_pass_draws_random_numbers_of_its_own() -> None:
    training = Training(dropout=0.5)
    masks: list[Tensor] = []
    training.model[3].register_forward_hook(lambda _, __, out: masks.append(out == 0))
    torch.manual_seed(3)
    training.run(2)
    torch.manual_seed(3)
    for rows, mask in zip((3, 12, 3, 12), masks, strict=True):
        expected = nn.functional.dropout(torch.ones(rows, 7, dtype=torch.float64), 0.5) == 0
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("spoilt", [3, 12])
def test_an_exception_in_either_pass_leaves_no_trace(spoilt: int) -> None:
    training = Training(dropout=0.5)
    training.run(1)
    before = copy.deepcopy(training.state())

    def failing(rows: int | None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            loss = training.closure(rows)()
            if training.seen[-1] == spoilt:
                raise KeyboardInterrupt
            return loss

        return run

    drawn = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step(failing(None), ascent=failing(3))
    assert same(training.state(), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    training.run(1)


@pytest.mark.parametrize("spoilt", [3, 12])
def test_a_gradient_that_is_not_finite_in_either_pass_skips_the_step(spoilt: int) -> None:
    training = Training()
    training.run(1)
    before = copy.deepcopy(list(training.model.parameters()))

    def overflowing(rows: int | None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            loss = training.closure(rows)()
            if training.seen[-1] == spoilt:
                next(training.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            return loss

        return run

    training.optimizer.step(overflowing(None), ascent=overflowing(3))
    assert bool(training.optimizer.last.skipped)
    assert same(training.model.parameters(), before)


def test_scaled_losses_give_the_same_step() -> None:
    scaled, usual = Training(), Training()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for _ in range(COUNT):
        scaled.optimizer.step(scaled.closure(scaler=scaler), ascent=scaled.closure(3, scaler), scaler=scaler)
        scaler.update()
    usual.run()
    for mine, other in zip(scaled.state(), usual.state(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    training = Training()
    for closure in (None, [training.closure()]):
        with pytest.raises(TypeError, match=r"step\(closure, ascent=closure_on_less\)"):
            training.optimizer.step(closure, ascent=training.closure(3))
    with pytest.raises(TypeError, match="closure_on_less"):
        training.optimizer.step(training.closure(), ascent=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no parameter got a gradient in the ascent"):
        training.optimizer.step(training.closure(), ascent=lambda: None)
    rmp = flatmin.RMP(training.optimizer.base, epsilon=0.1)
    with pytest.raises(TypeError, match=r"RMP draws Δ at random and has no ascent"):
        rmp.step(training.closure(), ascent=training.closure(3))
    with pytest.raises(TypeError, match=r"ascent needs a flatmin.AMP"):
        flatmin.captured_step(training.model, lambda model, x: model(x).sum(), rmp, ascent=lambda x: (x[:3],))
    with pytest.raises(TypeError, match="ascent must be a function"):
        flatmin.captured_step(training.model, lambda model, x: model(x).sum(), training.optimizer, ascent=3)  # type: ignore[arg-type]


def test_a_captured_step_checks_what_an_ascent_returns_and_knows_its_modules() -> None:
    class Less(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return (x[:3],)

    seen: list[bool] = []
    training = Training()
    step = flatmin.captured_step(training.model, lambda model, x: model(x).sum(), training.optimizer, ascent=Less())
    step(training.x)
    assert any(isinstance(module, Less) for module in step.spec.modules())
    half = flatmin.captured_step(
        nn.Linear(5, 1), lambda model, x: model(x).sum(), training.optimizer, ascent=Less(), autocast=torch.bfloat16
    )
    half.spec.make_ascent([training.x])
    assert seen == [False, True]
    wrong = flatmin.captured_step(
        training.model, lambda model, x: model(x).sum(), training.optimizer, ascent=lambda x: x[:3]
    )
    with pytest.raises(
        TypeError, match=r"ascent must return the inputs of loss_fn as a tuple, got a tensor of shape \(3, 5\)"
    ):
        wrong(training.x)


def captured(training: Training, **settings: Any) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    return flatmin.captured_step(
        training.model, loss, training.optimizer, ascent=lambda x, y: (x[:3], y[:3]), **settings
    )


def test_an_uncaptured_step_has_it_too() -> None:
    ours, usual = Training(), Training()
    step = captured(ours)
    losses = [step(ours.x, ours.y) for _ in range(COUNT)]
    assert same([*losses, *ours.state()], [*usual.run(), *usual.state()])


@pytest.mark.cuda
@pytest.mark.parametrize("inner_iter", [1, 2])
@pytest.mark.parametrize("compile", [False, True])
def test_a_captured_step_has_it_too(inner_iter: int, compile: bool) -> None:  # noqa: A002
    settings: dict[str, Any] = {"device": "cuda", "inner_iter": inner_iter}
    ours, usual = Training(**settings), Training(**settings)
    step = captured(ours, compile=compile)
    losses = [step(ours.x, ours.y) for _ in range(COUNT)]
    assert step.captured
    expected = usual.run()
    for mine, other in zip([*losses, *ours.state()], [*expected, *usual.state()], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.cuda
def test_a_captured_step_draws_for_each_pass_anew() -> None:
    ours, usual = Training(device="cuda", dropout=0.5), Training(device="cuda", dropout=0.5)
    step = captured(ours, compile=False)
    torch.manual_seed(5)
    losses = [step(ours.x, ours.y) for _ in range(COUNT)]
    torch.manual_seed(5)
    expected = usual.run()
    for mine, other in zip([*losses, *ours.state()], [*expected, *usual.state()], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
