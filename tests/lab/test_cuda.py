"""The laboratory on a GPU: the same images as on the CPU, inside a CUDA graph, and every pair in full size."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flatmin.attacks import pgd
from flatmin.regularisers import adversarial, mixup
from flatmin_lab import models
from flatmin_lab.data import Batches, Dataset, Normalisation, Split, augmentation
from flatmin_lab.data.augment.transforms import Kind
from flatmin_lab.methods import METHODS
from flatmin_lab.models import MODELS
from tests.lab.test_methods import losses_of
from tests.support.host_sync import run_without_host_sync
from tests.support.images import various
from tests.support.official_files import made

pytestmark = pytest.mark.cuda
kinds = pytest.mark.parametrize("kind", get_args(Kind))
data_sets = pytest.mark.parametrize("data", ["cifar10", "cifar100", "svhn"])


def images(device: str = "cuda", count: int = 250) -> Dataset:
    data = Dataset("made", Split(*made(count, 10, seed=0)), Split(*made(20, 10, seed=1)), [str(n) for n in range(10)])
    return data.to(device)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@kinds
@data_sets
def test_images_are_the_cpus_to_the_bit(kind: Kind, data: str) -> None:
    augment = augmentation(kind, data)
    x = torch.cat([various(seed=seed) for seed in range(8)])
    u = augment.draw(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(augment(x.cuda(), u.cuda()).cpu(), augment(x, u))


@kinds
def test_images_are_the_same_under_deterministic_settings(kind: Kind, deterministic: None) -> None:
    augment = augmentation(kind, "cifar10")
    x = various()
    u = augment.draw(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(augment(x.cuda(), u.cuda()).cpu(), augment(x, u))


@kinds
@data_sets
def test_a_batch_fits_into_a_cuda_graph(kind: Kind, data: str) -> None:
    """Captured once, replayed with the plans of other epochs: the batches of the uncaptured way, bit for bit."""
    pets = images()
    batches = Batches(
        split=pets.train, batch_size=50, normalise=Normalisation.of(pets.train), augment=augmentation(kind, data)
    )
    plan = batches.plan(0)
    index, u = plan.order[:50].clone(), plan.u[:50].clone()
    batches.at(index, u)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = batches.at(index, u)
    for epoch in range(1, 4):
        plan = batches.plan(epoch)
        for begin in range(0, 250, 50):
            index.copy_(plan.order[begin : begin + 50])
            u.copy_(plan.u[begin : begin + 50])
            graph.replay()
            expected = batches.at(index, u)
            assert torch.equal(x, expected[0])
            assert torch.equal(y, expected[1])


def test_no_batch_makes_the_host_wait() -> None:
    pets = images()
    for kind in get_args(Kind):
        augment = augmentation(kind, "cifar10")
        batches = Batches(split=pets.train, batch_size=50, normalise=Normalisation.of(pets.train), augment=augment)
        plan = batches.plan(0)
        index, u = plan.order[:50], plan.u[:50]
        x, y = run_without_host_sync(lambda batches=batches, index=index, u=u: batches.at(index, u))  # type: ignore[misc]
        assert x.shape == (50, 3, 32, 32)
        assert torch.equal(y, pets.train.y[index])


def test_batches_and_statistics_are_the_cpus() -> None:
    here, there = images("cpu"), images("cuda")
    for one, two in (
        (Normalisation.of(here.train).mean, Normalisation.of(there.train).mean),
        (Normalisation.of(here.train).std, Normalisation.of(there.train).std),
        (here.held_out(3).test.x, there.held_out(3).test.x),
    ):
        assert torch.equal(one, two.cpu())
    assert here.checksum == there.checksum

    def batches(data: Dataset) -> list[tuple[Tensor, Tensor]]:
        augment = augmentation("autoaugment", "cifar10")
        normalise = Normalisation.of(data.train)
        return list(Batches(split=data.train, batch_size=60, normalise=normalise, augment=augment).epoch(1))

    for (x, y), (x_there, y_there) in zip(batches(here), batches(there), strict=True):
        torch.testing.assert_close(x, x_there.cpu(), rtol=1e-6, atol=1e-6)
        assert torch.equal(y, y_there.cpu())


def test_mixup_and_adversarial_examples_fit_into_a_cuda_graph() -> None:
    torch.manual_seed(0)
    model = models.build("convnet").cuda()
    x, y = torch.rand(8, 3, 16, 16, device="cuda"), torch.arange(8, device="cuda")
    plain = adversarial(1 / 255)
    mean, std = torch.full((3,), 0.5, device="cuda"), torch.full((3,), 0.5, device="cuda")
    on_device = adversarial(1 / 255, mean=mean, std=std)
    from_lists = adversarial(1 / 255, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])
    mixing = mixup(1.0)
    for regulariser in (mixing, plain, on_device, from_lists):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            regulariser.batch(model, x, y)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            changed, _ = regulariser.batch(model, x, y)
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append(changed.clone())
        assert not torch.equal(seen[0], x)
        assert torch.equal(seen[0], seen[1]) == (regulariser is not mixing)  # new shares in every replay
        run_without_host_sync(lambda regulariser=regulariser: regulariser.batch(model, x, y))  # type: ignore[misc]
    run_without_host_sync(lambda: pgd(model, x, y, epsilon=0.1, step_size=0.05, steps=3))


def test_mixup_takes_a_generator_of_the_device() -> None:
    x, y = torch.rand(8, 3, device="cuda"), torch.arange(8, device="cuda")
    drawn = [
        mixup(0.5, generator=torch.Generator("cuda").manual_seed(1)).batch(models.build("mlp"), x, y)[0]
        for _ in range(2)
    ]
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("network", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_few_steps_lower_the_loss_in_full_size(method: str, network: str) -> None:
    steps = 120 if network == "vit" else 40  # a transformer learns slowly with SGD
    before, after = losses_of(method, network, device="cuda", steps=steps, lr=0.005)
    assert after < before


@pytest.mark.parametrize("network", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_gradient_is_finite(network: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    settings = {"side": 32} if network == "mlp" else {}
    model = models.build(network, **settings).cuda()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        loss = cross_entropy(model(x), torch.arange(16, device="cuda") % 10)
    loss.backward()
    assert all(bool(param.grad.isfinite().all()) for param in model.parameters() if param.grad is not None)
