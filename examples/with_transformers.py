"""Hugging Face's Trainer with AMP: a small transformer learns to count, with the one change that it takes.

python examples/with_transformers.py [--epsilon 0.05] [--epochs 12]
"""

import argparse
import math
import tempfile

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from flatmin.integrations.transformers import AMPTrainer

WORDS = 16


def counting(rows: int, *, seed: int) -> list[dict[str, Tensor]]:
    """Sentences such as 3 5 7 9 11: a start and a stride, and from the third word on the next one is known."""
    generator = torch.Generator().manual_seed(seed)
    starts, strides = torch.randint(1, WORDS, (2, rows, 1), generator=generator)
    words = (starts + strides * torch.arange(8)) % WORDS
    labels = words.clone()
    labels[:, :2] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is small: threads would only wait for one another
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            weight_decay=0.01,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = AMPTrainer(  # was: Trainer(
            model=model,
            args=args,
            train_dataset=counting(512, seed=0),
            eval_dataset=counting(128, seed=1),
            epsilon=options.epsilon,  # was not there
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    print(f"loss on new sentences {loss:.3f} (of one who guesses: {math.log(WORDS):.3f})")


if __name__ == "__main__":
    main()
