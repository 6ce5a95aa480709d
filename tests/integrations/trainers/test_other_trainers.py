"""The page about Ignite and skorch: its code runs before and after each change, and equals a plain loop bit for bit."""

import ast
import logging
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import flatmin
from tests import ROOT
from tests.support.cases import same
from tests.support.doc_blocks import after, before, blocks, code

pytest.importorskip("ignite", reason="needs Ignite: pip install pytorch-ignite")
pytest.importorskip("skorch", reason="needs skorch: pip install skorch")

from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, ModelCheckpoint
from skorch.callbacks import GradientNormClipping

PAGE = ROOT / "docs" / "trainers_others.md"
IGNITE, SKORCH = (block.text for block in blocks(PAGE, "diff"))
CLOSURE, HANDLERS, SEARCH = (block.text for block in blocks(PAGE, "python"))
EPOCHS = 2

Names = dict[str, Any]


class Network(nn.Sequential):
    """With BatchNorm and dropout, and the same weights every time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        torch.manual_seed(1)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignite logs the errors that it raises."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(48) % 3
    return torch.randn(48, 4, generator=generator) + y[:, None], y


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=16)


def amp(model: nn.Module, **settings: Any) -> flatmin.AMP:
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return flatmin.AMP(base, **{"epsilon": 0.1, "model": model, **settings})


def reader() -> Names:
    """What the reader of the page has at hand; `train_step` and `net` are those of earlier blocks."""
    model = Network()
    names: Names = {"torch": torch, "flatmin": flatmin, "model": model, "loss_fn": nn.CrossEntropyLoss()}
    names |= {"optimizer": amp(model), "loader": batches(), "Network": Network}
    x, y = data()
    return {**names, "X": x.numpy(), "y": y.numpy()}


def run(text: str, names: Names) -> Names:
    exec(compile(text, str(PAGE), "exec"), names)
    return names


def state(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def plain_loop(optimizer_settings: Names | None, *, epochs: int = EPOCHS) -> tuple[nn.Module, list[float]]:
    """A loop without a trainer: the model, and the mean clean loss of every epoch. None: SGD without flatmin."""
    model = Network()
    if optimizer_settings is None:
        optimizer: Any = SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = amp(model, **optimizer_settings)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for x, y in batches():

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            total += optimizer.step(closure).item() / 3
        losses.append(total)
    return model, losses


def test_there_are_blocks_and_the_others_are_python() -> None:
    assert len(code(PAGE)) == 3 + 2 * 2
    changes = blocks(PAGE, "text")
    assert len(changes) == 6
    for change in changes:
        is_diff = change.text.startswith(("+", " "))
        for text in (before(change.text), after(change.text)) if is_diff else (change.text,):
            ast.parse(textwrap.dedent(text + " " * 20 + "pass\n" if text.endswith(":\n") else text))


# ---- Ignite


@pytest.mark.parametrize("text", [after(IGNITE), CLOSURE], ids=["blocks", "closure"])
def test_ignite_equals_a_plain_loop_bit_for_bit(text: str) -> None:
    names = run(text, reader())
    expected, _ = plain_loop({})
    assert same(state(names["model"]), state(expected))


def test_ignite_with_epsilon_zero_is_ignite_without_flatmin() -> None:
    plain = run(before(IGNITE), reader())
    idle = run(after(IGNITE).replace("epsilon=0.1", "epsilon=0.0"), reader())
    assert same(state(plain["model"]), state(idle["model"]))
    assert plain["trainer"].state.output == idle["trainer"].state.output


def untrained() -> Names:
    """The objects of the page before `trainer.run`."""
    return run(after(IGNITE).replace("trainer.run(loader, max_epochs=2)\n", ""), reader())


def test_ignite_has_the_clean_loss_as_its_output() -> None:
    names, seen = untrained(), []
    names["trainer"].add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
    names["trainer"].run(names["loader"], max_epochs=1)
    _, (clean,) = plain_loop({}, epochs=1)
    assert len(seen) == 3
    assert sum(seen) / 3 == pytest.approx(clean, rel=1e-12)


def test_a_scheduler_of_ignite_moves_epsilon() -> None:
    names = untrained()
    radii: list[float] = []
    names["optimizer"].register_step_post_hook(lambda o, *_: radii.append(o.param_groups[0]["epsilon"]))
    run(HANDLERS, names)
    assert radii == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_an_ignite_checkpoint_goes_on_bit_for_bit() -> None:
    """The same objects made anew, with another ε: the checkpoint's counts."""
    ended = []
    for stop in (True, False):
        names = untrained()
        saved = {key: names[key] for key in ("model", "optimizer", "trainer")}
        checkpoint = ModelCheckpoint(f"stop-{stop}", n_saved=2)
        names["trainer"].add_event_handler(Events.EPOCH_COMPLETED, checkpoint, saved)
        names["trainer"].add_event_handler(Events.EPOCH_STARTED, lambda engine: torch.manual_seed(engine.state.epoch))
        names["trainer"].run(list(batches()), max_epochs=2 if stop else 4)
        if stop:
            names = untrained()
            names["optimizer"].param_groups[0]["epsilon"] = 0.5
            again = {key: names[key] for key in ("model", "optimizer", "trainer")}
            Checkpoint.load_objects(to_load=again, checkpoint=checkpoint.last_checkpoint)
            names["trainer"].add_event_handler(
                Events.EPOCH_STARTED, lambda engine: torch.manual_seed(engine.state.epoch)
            )
            names["trainer"].run(list(batches()), max_epochs=4)
        assert names["optimizer"].param_groups[0]["epsilon"] == 0.1
        ended.append(state(names["model"]))
    assert same(*ended)


def test_ignites_own_step_is_refused() -> None:
    model = Network()
    trainer: Engine = create_supervised_trainer(model, amp(model), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match="needs a closure"):
        trainer.run(batches(), max_epochs=1)


# ---- skorch


def fitted(**settings: Any) -> Any:
    """The net of the page on all of the data, trained as `plain_loop` trains."""
    names = run(after(SKORCH).replace("net.fit(X, y)\n", ""), reader())
    net = names["net"].set_params(train_split=None, batch_size=16, verbose=0, **settings)
    return net.fit(names["X"], names["y"])


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_skorch_equals_a_plain_loop_bit_for_bit(inner_iter: int) -> None:
    net = fitted(optimizer__inner_iter=inner_iter)
    expected, losses = plain_loop({"inner_iter": inner_iter})
    assert same(state(net.module_), state(expected))
    assert net.history[:, "train_loss"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_skorch_runs_every_pass_and_its_history_has_the_clean_loss(inner_iter: int) -> None:
    net = fitted(max_epochs=1, optimizer__inner_iter=inner_iter)
    forward: list[bool] = []
    net.module_.register_forward_pre_hook(lambda *_: forward.append(True))
    clean: list[float] = []
    net.optimizer_.register_step_post_hook(lambda optimizer, *_: clean.append(float(optimizer.last.loss)))
    x, y = data()
    net.partial_fit(x.numpy(), y.numpy())
    assert len(forward) == 3 * (inner_iter + 1)
    assert [batch["train_loss"] for batch in net.history[-1]["batches"]] == pytest.approx(clean, rel=1e-12)


def test_skorch_with_epsilon_zero_is_skorch_without_flatmin() -> None:
    expected, _ = plain_loop(None)
    assert same(state(fitted(optimizer__epsilon=0.0).module_), state(expected))
    names = run(before(SKORCH).replace("net.fit(X, y)\n", ""), reader())
    net = names["net"].set_params(train_split=None, batch_size=16, verbose=0).fit(names["X"], names["y"])
    assert same(state(net.module_), state(expected))


def test_a_grid_search_trains_with_each_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(after(SKORCH).replace("net.fit(X, y)\n", ""), reader())
    longest: dict[float, float] = {}
    steps: dict[float, int] = {}

    def observed(params: Any, **settings: Any) -> flatmin.AMP:
        optimizer: flatmin.AMP = names["amp"](params, **settings)
        epsilon = optimizer.param_groups[0]["epsilon"]

        def note(stepped: flatmin.AMP, *_: Any) -> None:
            length = 0.0 if stepped.last.delta_norm is None else float(stepped.last.delta_norm)
            longest[epsilon] = max(longest.get(epsilon, 0.0), length)
            steps[epsilon] = steps.get(epsilon, 0) + 1

        optimizer.register_step_post_hook(note)
        return optimizer

    names["net"].set_params(optimizer=observed)
    run(SEARCH, names)
    assert "train_loss" in capsys.readouterr().out  # skorch prints a table of each fit
    assert longest == pytest.approx({0.0: 0.0, 0.05: 0.05, 0.1: 0.1, 0.2: 0.2})
    best = names["search"].best_params_["optimizer__epsilon"]
    assert steps.pop(best) > max(steps.values())  # fitted once more, on all of the data
    assert names["search"].best_estimator_.optimizer_.param_groups[0]["epsilon"] == best


def test_parameters_set_on_a_fitted_skorch_net_go_to_its_groups_alone() -> None:
    x, y = data()
    net = fitted().set_params(optimizer__epsilon=0.3, optimizer__inner_iter=2)
    net.partial_fit(x.numpy(), y.numpy())
    assert (net.optimizer_.param_groups[0]["epsilon"], net.optimizer_.inner_iter) == (0.3, 1)
    net.fit(x.numpy(), y.numpy())
    assert (net.optimizer_.param_groups[0]["epsilon"], net.optimizer_.inner_iter) == (0.1, 1)


def test_clipping_with_a_callback_of_skorch_clips_the_gradient_of_every_pass() -> None:
    net = fitted(max_epochs=1, callbacks=[GradientNormClipping(0.01)])
    assert float(net.optimizer_.last.grad_norm) == pytest.approx(0.01, rel=1e-3)
    assert float(net.optimizer_.last.delta_norm) == pytest.approx(0.01, rel=1e-3)  # ζ = 1: Δ is the gradient itself


def test_a_saved_skorch_net_goes_on_bit_for_bit() -> None:
    x, y = data()
    net = fitted()
    net.set_params(optimizer__epsilon=0.3)
    assert net.optimizer_.param_groups[0]["epsilon"] == 0.3
    net.save_params(f_params="params.pt", f_optimizer="optimizer.pt")
    loaded = type(net)(**net.get_params()).initialize()
    loaded.load_params(f_params="params.pt", f_optimizer="optimizer.pt")
    ended = []
    for each in (net, loaded):
        torch.manual_seed(7)
        each.partial_fit(x.numpy(), y.numpy())
        ended.append(state(each.module_))
    assert same(*ended)


def test_a_pickled_skorch_net_goes_on_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    net = fitted()
    for thing in (type(net), net.optimizer):  # pickle finds them by name
        thing.__module__ = __name__
        monkeypatch.setitem(globals(), thing.__name__, thing)
    ended = []
    for each in (pickle.loads(pickle.dumps(net)), net):
        assert each.optimizer_.model is each.module_
        torch.manual_seed(7)
        each.partial_fit(x.numpy(), y.numpy())
        ended.append(state(each.module_))
    assert same(*ended)


def test_groups_of_skorch_have_their_own_epsilon() -> None:
    net = fitted(optimizer__param_groups=[("*bias", {"epsilon": 0.0})])
    assert [group["epsilon"] for group in net.optimizer_.param_groups] == [0.0, 0.1]
