"""Data-parallel training with torchrun: one perturbation for all ranks, or one per rank.

    torchrun --nproc-per-node 2 examples/several_gpus.py            # add --apart for one perturbation per rank

It runs on GPUs if there are any, else on the CPU. flatmin changes two lines of the ordinary program.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import flatmin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apart", action="store_true", help="one perturbation per rank")
    apart = parser.parse_args().apart

    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same data and initial weights on every rank
    x, y = torch.randn(512, 20), torch.randint(0, 4, (512,))
    x[torch.arange(512), y] += 2.0
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = flatmin.AMP(optimizer, epsilon=0.1, model=model, sync_perturbation=not apart)

    torch.manual_seed(rank)  # its own dropout masks
    for epoch in range(5):
        order = torch.randperm(512, generator=torch.Generator().manual_seed(epoch))[rank::ranks]
        for chosen in order.split(32):
            here, labels = x[chosen].to(device), y[chosen].to(device)

            def closure(here: Tensor = here, labels: Tensor = labels) -> Tensor:
                amp.zero_grad()
                loss = cross_entropy(model(here), labels)
                loss.backward()
                return loss

            amp.step(closure)

    model.eval()
    with torch.no_grad():
        error = (model(x.to(device)).argmax(1).cpu() != y).float().mean()
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    text = f"rank {rank} of {ranks}: error {error:.1%}, weights add up to {total.item():.17g}\n"
    print(text, end="", flush=True)  # in one piece: other ranks write at the same time
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
