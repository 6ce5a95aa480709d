"""AMPTrainer before SentenceTransformerTrainer, as its page shows it: a loop by hand, to the last bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers: pip install 'sentence-transformers[train]'"
)
datasets = pytest.importorskip("datasets")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

import flatmin  # noqa: E402
from flatmin.integrations.transformers import AMPTrainer  # noqa: E402
from tests import ROOT  # noqa: E402
from tests.integrations.trainers.small_transformer import Seeds, arguments, weights  # noqa: E402
from tests.support.cases import same  # noqa: E402
from tests.support.doc_blocks import after, before, blocks  # noqa: E402

CHANGE = next(
    block.text
    for block in blocks(ROOT / "docs" / "trainers_huggingface.md", "diff")
    if "sentence_transformers" in block.text
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
ROWS = 14  # of batches of 4, the last one has 2
Plain: Any = sentence_transformers.SentenceTransformerTrainer


class Flat(AMPTrainer, Plain):  # type: ignore[misc]
    pass


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings in one place for all of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module", autouse=True)
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one with dropout, and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    return folder


def encoder(bert: Path) -> nn.Module:
    parts = [modules.Transformer(str(bert)), modules.Pooling(8)]
    model: nn.Module = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    return model


def pairs() -> Any:
    generator = torch.Generator().manual_seed(1)

    def sentence(length: int) -> str:
        return " ".join(WORDS[5 + int(word)] for word in torch.randint(0, 10, (length,), generator=generator))

    columns = {name: [sentence(2 + row % 4) for row in range(ROWS)] for name in ("anchor", "positive")}
    return datasets.Dataset.from_dict(columns)


def training_arguments(folder: Path, **settings: Any) -> Any:
    known = arguments(folder, **settings).to_dict()
    kept = {key: value for key, value in known.items() if key not in ("accelerator_config", "train_sampling_strategy")}
    return sentence_transformers.SentenceTransformerTrainingArguments(
        **{**kept, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    )


def trained(bert: Path, folder: Path, *, epsilon: float | None, loss: Any = None, **settings: Any) -> Any:
    """A trainer that has trained; with ε = None it is used without AMP."""
    model = encoder(bert)
    own = {} if epsilon is None else {"epsilon": epsilon, "inner_iter": settings.pop("inner_iter", 1)}
    trainer = (Plain if epsilon is None else Flat)(
        model=model,
        args=training_arguments(folder, **settings),
        train_dataset=pairs(),
        loss=(loss or losses.MultipleNegativesRankingLoss)(model),
        callbacks=[Seeds()],
        **own,
    )
    trainer.train()
    return trainer


def by_hand(bert: Path, folder: Path, *, inner_iter: int) -> tuple[list[Tensor], list[float]]:
    """The same training without a trainer: weights at the end, and the losses of the clean passes."""
    model = encoder(bert)
    loss = losses.MultipleNegativesRankingLoss(model)
    maker = Plain(model=model, args=training_arguments(folder), train_dataset=pairs(), loss=loss)
    loader = maker.get_train_dataloader()
    optimizer = flatmin.AMP(maker.create_optimizer(), epsilon=0.1, inner_iter=inner_iter, model=model)
    schedule = maker.create_scheduler(2 * len(loader), optimizer)
    clean: list[float] = []
    model.train()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            features, labels = maker.collect_features(batch)
            torch.manual_seed(len(clean))
            optimizer.zero_grad()
            value = loss(features, labels)
            value.backward()
            clean.append(value.item())
            for _ in range(inner_iter):
                with optimizer.perturbed():
                    loss(features, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return weights(model), clean


def logged(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


def test_the_page_s_code_trains_before_and_after_the_change(bert: Path, tmp_path: Path) -> None:
    ended = []
    for text in (before(CHANGE), after(CHANGE), after(CHANGE).replace("epsilon=0.1", "epsilon=0.0")):
        names = {"model": encoder(bert), "args": training_arguments(tmp_path), "pairs": pairs()}
        torch.manual_seed(0)
        exec(compile(text, "page", "exec"), names)
        ended.append(weights(names["model"]))
    plain, perturbed, idle = ended
    assert same(plain, idle)
    assert not same(plain, perturbed)


@pytest.mark.parametrize("inner_iter", [1, 2])
def test_it_is_a_loop_by_hand_to_the_last_bit(bert: Path, tmp_path: Path, inner_iter: int) -> None:
    trainer = trained(bert, tmp_path, epsilon=0.1, inner_iter=inner_iter)
    expected, clean = by_hand(bert, tmp_path, inner_iter=inner_iter)
    assert same(weights(trainer.model), expected)
    assert logged(trainer, "loss") == pytest.approx(clean, rel=1e-12)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_a_radius_it_is_the_plain_trainer_to_the_last_bit(
    bert: Path, tmp_path: Path, accumulation: int
) -> None:
    plain = trained(bert, tmp_path, epsilon=None, gradient_accumulation_steps=accumulation)
    idle = trained(bert, tmp_path, epsilon=0.0, gradient_accumulation_steps=accumulation)
    assert same(weights(plain.model), weights(idle.model))
    assert logged(plain, "loss") == logged(idle, "loss")


class Noting(losses.MultipleNegativesRankingLoss):  # type: ignore[misc]
    """Notes the batch and the random state of each call; the global list is outside what the trainer puts back."""

    seen: list[tuple[list[Tensor], Tensor]]

    def forward(self, features: Any, labels: Any) -> Any:
        features = list(features)
        self.seen.append(([each["input_ids"].clone() for each in features], torch.get_rng_state()))
        return super().forward(features, labels)


def test_a_perturbed_pass_has_the_batch_and_the_masks_of_the_clean_one(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noting, "seen", [], raising=False)
    trained(bert, tmp_path, epsilon=0.1, loss=Noting)
    clean, perturbed = Noting.seen[::2], Noting.seen[1::2]
    assert len(clean) == len(perturbed) == 2 * 4
    for (batch, random), (again, random_again) in zip(clean, perturbed, strict=True):
        assert same(batch, again)
        assert torch.equal(random, random_again)
    assert not same(clean[0][0], clean[1][0])


def test_a_cached_loss_is_the_loss_itself(bert: Path, tmp_path: Path) -> None:
    """It runs the model in parts, and a second time in the backward pass, at θ + Δ too."""
    whole = trained(bert, tmp_path, epsilon=0.1)
    cached = trained(bert, tmp_path, epsilon=0.1, loss=losses.CachedMultipleNegativesRankingLoss)
    assert same(weights(whole.model), weights(cached.model))


class Halves(losses.MultipleNegativesRankingLoss):  # type: ignore[misc]
    """A loss of two parts, which the trainer logs with their mean since the last line."""

    def forward(self, features: Any, labels: Any) -> Any:
        half = super().forward(features, labels) / 2
        return {"first": half, "second": half}


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_the_parts_of_a_loss_are_logged_once(bert: Path, tmp_path: Path, epsilon: float | None) -> None:
    trainer = trained(bert, tmp_path, epsilon=epsilon, loss=Halves, logging_steps=2)
    for part in ("first", "second"):
        halves = [value / 2 for value in logged(trainer, "loss")]
        assert logged(trainer, part) == pytest.approx(halves, abs=1e-4)  # the trainer rounds them


def test_weights_of_the_loss_are_perturbed_too(bert: Path, tmp_path: Path) -> None:
    model = encoder(bert)
    loss = losses.SoftmaxLoss(model, 8, 3)
    rows = pairs().add_column("label", [row % 3 for row in range(ROWS)])
    trainer: Any = Flat(model=model, args=training_arguments(tmp_path), train_dataset=rows, loss=loss, epsilon=0.1)
    before_training = loss.classifier.weight.detach().clone()
    seen: list[Tensor] = []
    loss.classifier.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    trainer.train()
    assert torch.equal(seen[0], before_training)
    assert not torch.equal(seen[0], seen[1])
