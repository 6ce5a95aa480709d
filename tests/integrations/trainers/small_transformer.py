"""A transformer of a thousand weights, its data and the arguments of its training, for the tests of trainers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 11, 6


def small_gpt(*, dropout: float = 0.1) -> nn.Module:
    """With LayerNorm, dropout, and an output layer that is tied to the embedding."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def sentences(count: int) -> list[dict[str, Tensor]]:
    """Of one length, in which every sentence leaves out other labels: micro-batches do not weigh the same."""
    words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    for number, row in enumerate(labels):
        row[: 1 + number % 4] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def batch(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}


def windows(rows: Sequence[dict[str, Tensor]], size: int, accumulation: int) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of an epoch, those of a step together."""
    batches = [batch(rows[at : at + size]) for at in range(0, len(rows), size)]
    return [batches[at : at + accumulation] for at in range(0, len(batches), accumulation)]


def arguments(folder: Path, **settings: Any) -> Any:
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "log_level": "error"}
    training = {"use_cpu": True, "learning_rate": 1e-2, "num_train_epochs": 2, "weight_decay": 0.1}
    order = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    return transformers.TrainingArguments(output_dir=str(folder), **{**quiet, **training, **order, **settings})


class Seeds(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Before every step the random numbers begin anew, so that a loop by hand can draw the same."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]
