"""AMPTrainer before TRL's trainers: AMP written by hand, with their losses, metrics and adapters.

The models are in float64, so that AdamW's steps, which rounding may turn around, are compared too.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from flatmin.integrations.transformers import AMPTrainer  # noqa: E402
from tests import ROOT  # noqa: E402
from tests.integrations.trainers.small_transformer import Seeds, weights  # noqa: E402
from tests.support.cases import same  # noqa: E402
from tests.support.doc_blocks import after, before, blocks  # noqa: E402

CHANGE = next(
    block.text for block in blocks(ROOT / "docs" / "trainers_huggingface.md", "diff") if "SFTTrainer" in block.text
)
EPSILON, STEPS = 0.1, 3
SPECIAL, WORDS = ["<pad>", "<eos>", "<unk>"], [f"w{number}" for number in range(20)]


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings in one place for all of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)


def llama(kind: str = "LlamaForCausalLM", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS), attention_dropout=0.1, pad_token_id=0, eos_token_id=1, **sizes, **settings
    )
    model: nn.Module = getattr(transformers, kind)(config).double()
    return model


def rows(*columns: str) -> Any:
    generator = torch.Generator().manual_seed(1)

    def sentence(length: int) -> str:
        return " ".join(WORDS[int(word)] for word in torch.randint(0, len(WORDS), (length,), generator=generator))

    made = [{name: " " + sentence(3 + (row + place) % 4) for place, name in enumerate(columns)} for row in range(12)]
    liked = [{"label": row % 2 == 0} if "completion" in columns else {} for row in range(12)]
    return datasets.Dataset.from_list([{**row, **label} for row, label in zip(made, liked, strict=True)])


def lora(task: str, **settings: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type=task, **settings)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "SFT": lambda: {"model": llama(), "train_dataset": rows("text")},
    "DPO": lambda: {
        "model": llama(),
        "ref_model": llama(),
        "train_dataset": rows("prompt", "chosen", "rejected"),
    },
    "KTO": lambda: {"model": llama(), "ref_model": llama(), "train_dataset": rows("prompt", "completion")},
    "Reward": lambda: {
        "model": llama("LlamaForSequenceClassification", num_labels=1),
        "train_dataset": rows("prompt", "chosen", "rejected"),
    },
    "SFT, adapters": lambda: {
        "model": llama(),
        "train_dataset": rows("text"),
        "peft_config": lora("CAUSAL_LM"),
    },
    "DPO, adapters": lambda: {
        "model": llama(),
        "train_dataset": rows("prompt", "chosen", "rejected"),
        "peft_config": lora("CAUSAL_LM"),
    },
}


def by_hand(kind: Any) -> Any:
    """The trainer, with AMP written out: the micro-batches of a step run again at θ + Δ, and θ comes back."""

    class ByHand(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.window: list[tuple[Any, Any, Tensor]] = []

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            state = torch.get_rng_state()
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            self.window.append((inputs, num_items_in_batch, state))
            if self.accelerator.sync_gradients:
                self.perturbed_passes(model)
            return loss

        def perturbed_passes(self, model: nn.Module) -> None:
            drawn = torch.get_rng_state()
            params = [param for param in model.parameters() if param.grad is not None]
            theta = [param.detach().clone() for param in params]
            length = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
            for param in params:
                param.data.add_(param.grad * min(1.0, EPSILON / float(length)))  # type: ignore[operator]
                param.grad = None
            for inputs, items, state in self.window:
                torch.set_rng_state(state)
                loss = self.compute_loss(model, dict(inputs), num_items_in_batch=items)
                shares = 1 if self.model_accepts_loss_kwargs and items is not None else len(self.window)
                (loss / shares).backward()
            for param, kept in zip(params, theta, strict=True):
                param.data.copy_(kept)
            torch.set_rng_state(drawn)
            self.window = []

    return ByHand


def trained(name: str, folder: Path, how: Callable[[Any], Any], *, own: dict[str, Any], **settings: Any) -> Any:
    kind, *_ = name.split(", ")
    plain: Any = getattr(trl, f"{kind}Trainer")
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    torch.manual_seed(0)
    trainer = how(plain)(args=args, processing_class=tokenizer(), callbacks=[Seeds()], **CASES[name](), **own)
    trainer.train()
    return trainer


def perturbed(kind: Any) -> Any:
    return type("Perturbed", (AMPTrainer, kind), {})


def logged(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_it_is_amp_written_by_hand(tmp_path: Path, name: str, accumulation: int) -> None:
    """With dropout, and with activations that are recomputed, as is TRL's default."""
    settings = {"gradient_accumulation_steps": accumulation}
    expected = trained(name, tmp_path, by_hand, own={}, **settings)
    trainer = trained(name, tmp_path, perturbed, own={"epsilon": EPSILON}, **settings)
    for one, other in zip(weights(trainer.model), weights(expected.model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert [line["loss"] for line in logged(trainer)] == pytest.approx([line["loss"] for line in logged(expected)])


@pytest.mark.parametrize("name", CASES)
def test_its_metrics_are_those_of_the_clean_passes(tmp_path: Path, name: str) -> None:
    plain = trained(name, tmp_path, lambda kind: kind, own={}, gradient_accumulation_steps=2)
    trainer = trained(name, tmp_path, perturbed, own={"epsilon": EPSILON}, gradient_accumulation_steps=2)
    assert not same(weights(trainer.model), weights(plain.model))
    first, expected = logged(trainer)[0], logged(plain)[0]
    assert {**first, "grad_norm": 0} == {**expected, "grad_norm": 0}  # before the first step, at the same weights
    assert [line["num_tokens"] for line in logged(trainer)] == [line["num_tokens"] for line in logged(plain)]


def test_the_page_s_code_trains_before_and_after_the_change(tmp_path: Path) -> None:
    ended = []
    for text in (before(CHANGE), after(CHANGE), after(CHANGE).replace("epsilon=0.1", "epsilon=0.0")):
        args = trl.SFTConfig(output_dir=str(tmp_path), max_steps=2, use_cpu=True, bf16=False, report_to=[])
        names = {"model": llama(), "args": args, "dataset": rows("text"), "tokenizer": tokenizer()}
        torch.manual_seed(0)
        exec(compile(text, "page", "exec"), names)
        ended.append(weights(names["model"]))
    plain, changed, idle = ended
    assert same(plain, idle)
    assert not same(plain, changed)
