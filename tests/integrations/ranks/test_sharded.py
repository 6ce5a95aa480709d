"""Weights spread over two and four gloo processes count whole, and are trained as in a single process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.ranks.processes import in_ranks
from tests.integrations.ranks.sharded_jobs import BASES, FAILURES, FORMS, jobs, load, uninterrupted

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

Seen = dict[int, list[dict[str, Any]]]  # number of ranks -> rank -> job -> what it saw


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def seen(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Two ranks, which also save; then four, which load that."""
    return {ranks: in_ranks(jobs(ranks, checkpoints), ranks, tmp_path_factory.mktemp("ranks")) for ranks in (2, 4)}


def all_of(seen: Seen, job: str) -> list[dict[str, Any]]:
    found = [results[job] for here in seen.values() for results in here if job in results]
    assert found
    return found


def test_tensors_spread_over_ranks_count_whole(seen: Seen) -> None:
    for job in all_of(seen, "measure"):
        for name, (spread, whole) in job.items():
            torch.testing.assert_close(spread, whole, rtol=1e-6, atol=1e-7, msg=name)


def test_a_list_is_measured_in_one_message(seen: Seen) -> None:
    assert {job["count"] for job in all_of(seen, "messages")} == {1}


def test_a_loss_that_is_spread_is_seen_whole(seen: Seen) -> None:
    for job in all_of(seen, "spread loss"):
        assert job["spread"] == pytest.approx(job["whole"], rel=1e-6)
        assert job["spread"][0] != 1


WAYS = [
    *(f"{how}-{form}-{n}" for how in ("sharded", "tensor-parallel") for form in FORMS for n in (1, 2)),
    *(f"sharded-{base}" for base in BASES),
    "sharded-tensor",
    "sharded-linf",
    "both-1",
    "both-2",
]


@pytest.mark.parametrize("way", WAYS)
def test_weights_spread_over_ranks_are_trained_as_whole_ones(seen: Seen, way: str) -> None:
    for job in all_of(seen, way):
        torch.testing.assert_close(job["spread"], job["single"], rtol=1e-6, atol=1e-9)
        single, spread = job["lengths"]
        assert spread == pytest.approx(single, rel=1e-6)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_shard_that_is_not_finite_is_skipped_everywhere(seen: Seen, base: str, scaled: bool) -> None:
    for job in all_of(seen, f"skip-{base}-{scaled}"):
        assert job["skipped"] == [False, True, False]
        assert job["moved"] == [True, False, True]
        assert all(weight.isfinite().all() for weight in job["weights"])
        assert job["scale"] == (2.0**9 if scaled else 1.0)


@pytest.mark.parametrize("how", ["sharded", "sharded at once"])
@pytest.mark.parametrize("within", FAILURES)
def test_after_an_exception_shards_are_back_in_place_and_training_goes_on(seen: Seen, how: str, within: str) -> None:
    for job in all_of(seen, f"restore-{how}-{within}"):
        assert job["back"]
        assert job["in_place"]
        torch.testing.assert_close(job["spread"], job["single"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("apart", "sharded across ranks; use sync_perturbation=True"),
        ("older", "use torch.distributed.fsdp.fully_shard instead"),
        ("flat", "use torch.distributed.fsdp.fully_shard instead"),
    ],
)
def test_what_cannot_be_perturbed_names_what_can(seen: Seen, what: str, words: str) -> None:
    assert all(words in job["message"] for job in all_of(seen, f"refuse-{what}"))


def test_ranks_of_a_mesh_that_disagree_all_get_an_error(seen: Seen) -> None:
    for job in all_of(seen, "disagree"):
        assert "the same epsilon, got [0.1] on rank 0 and [0.2] on rank 3" in job["message"]


def test_shards_get_noise_of_their_own_and_replicas_the_same(seen: Seen) -> None:
    jobs = all_of(seen, "draw")
    for job in jobs:
        for number, tensor in enumerate(job["noise"]):
            assert len(tensor.unique()) == tensor.numel()  # no shard repeats another's
            assert torch.equal(tensor, jobs[0]["noise"][number])
            assert not torch.equal(tensor, job["again"][number])
        assert torch.equal(job["here"], jobs[0]["here"])


@pytest.mark.parametrize(("ball", "bound"), [("global", 0.1), ("group", 0.1), ("tensor", 0.1 * 3**0.5)])
def test_a_random_point_of_sharded_weights_has_one_radius(seen: Seen, ball: str, bound: float) -> None:
    first, second = (job["lengths"] for job in all_of(seen, f"rmp-{ball}"))
    assert first == second
    assert 0.5 * bound < max(first) <= bound * (1 + 1e-6)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # as meant
@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_of_two_ranks_goes_on_with_one_two_or_four(seen: Seen, base: str, checkpoints: Path) -> None:
    expected = uninterrupted(base)
    for job in (*all_of(seen, f"load-{base}"), load(0, base, str(checkpoints), is_spread=False)):
        assert job["epsilon"] == 0.05
        torch.testing.assert_close(job["weights"], expected, rtol=1e-6, atol=1e-9)
