"""A transformer of a few hundred weights, its data and the arguments of its training: what the tests of trainers share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

WORDS, LENGTH = 11, 6


def small_gpt(*, dropout: float = 0.1) -> nn.Module:
    """With LayerNorm, dropout, and an output layer that is tied to the embedding."""
    torch.manual_seed(0)
    config = GPT2Config(
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
    model: nn.Module = GPT2LMHeadModel(config)
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


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "log_level": "error"}
    training = {"use_cpu": True, "learning_rate": 1e-2, "num_train_epochs": 2, "weight_decay": 0.1}
    order = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    return TrainingArguments(output_dir=str(folder), **{**quiet, **training, **order, **settings})


class Seeds(TrainerCallback):  # type: ignore[misc]
    """Before every step the random numbers begin anew, so that a loop by hand can draw the same."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]
