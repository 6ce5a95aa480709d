"""What each of two gloo processes does for test_two_processes.py: a training by Trainer, one by Accelerate.

python hugging_ranks.py FOLDER         with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

import flatmin
from flatmin.integrations.accelerate import Window
from flatmin.integrations.transformers import AMPTrainer
from small_transformer import arguments, sentences, small_gpt, weights

ROWS = 16


def with_trainer(folder: Path, **settings: Any) -> dict[str, Any]:
    optim = {"optim": settings.pop("optim", "adamw_torch_fused"), "ddp_find_unused_parameters": False}
    args = arguments(folder, gradient_accumulation_steps=2, ddp_backend="gloo", **optim)
    model = small_gpt(dropout=settings.pop("dropout", 0.1))
    trainer = AMPTrainer(model=model, args=args, train_dataset=sentences(ROWS), epsilon=0.1, **settings)
    trainer.train()
    assert int(os.environ["WORLD_SIZE"]) == trainer.accelerator.num_processes
    last = trainer.optimizer.optimizer.last
    return {"weights": weights(model), "steps": trainer.state.global_step, "delta": float(last.delta_norm)}


def with_accelerate(**settings: Any) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_gpt()
    optimizer = flatmin.AMP(SGD(model.parameters(), lr=0.1, momentum=0.9), epsilon=0.1, model=model, **settings)
    loader: DataLoader[dict[str, Tensor]] = DataLoader(sentences(ROWS), batch_size=2)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    window = Window(accelerator, prepared, optimizer)
    prepared.train()
    steps = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(prepared):
                window.backward(prepared, **batch)
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
    return {"weights": weights(model), "steps": steps}


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    seen = {
        "trainer": with_trainer(folder / "trainer"),
        "trainer-n2": with_trainer(folder / "trainer", inner_iter=2),
        "accelerate": with_accelerate(),
        "trainer-sgd": with_trainer(folder / "trainer", dropout=0.0, optim="sgd"),
    }
    if "sync_perturbation" in flatmin.AMP.__init__.__annotations__:
        seen["trainer-apart"] = with_trainer(folder / "trainer", sync_perturbation=False)
        seen["accelerate-apart"] = with_accelerate(sync_perturbation=False)
    torch.save(seen, folder / f"rank{rank}of{os.environ['WORLD_SIZE']}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
