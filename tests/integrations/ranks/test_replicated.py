"""Data-parallel training in two and four gloo processes: replicas stay equal, whatever happens on one of them."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.ranks.processes import in_ranks
from tests.integrations.ranks.replicated_jobs import JOBS
from tests.support.cases import METHODS, same

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What every job of replicated_jobs.py returned, for each rank."""
    return in_ranks(JOBS, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("job", [job for job in JOBS if job != "statistics"])  # BatchNorm's are each rank's own
def test_replicas_stay_equal_to_the_last_bit(seen: Seen, job: str) -> None:
    first = seen[0][job]
    compared = {"weights", "momentum", "plain", "amp"} & first.keys()
    assert compared
    for results in seen[1:]:
        assert all(same(first[key], results[job][key]) for key in compared)


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(seen: Seen, method: str) -> None:
    for results in seen:
        assert results[f"ddp-{method}"]["skipped"] == [False] * 5
        spoilt = results[f"spoilt-{method}"]
        assert spoilt["skipped"] == [False, False, True, False, False]
        assert all(tensor.isfinite().all() for tensor in (*spoilt["weights"], *spoilt["momentum"]))


@pytest.mark.parametrize("job", [job for job in JOBS if job.startswith(("as-one", "apart", "micro-apart"))])
def test_ranks_train_as_one_process_would(seen: Seen, job: str) -> None:
    """With one perturbation for all: on the whole batch. With one a rank: by hand, each from its own gradient."""
    for results in seen:
        torch.testing.assert_close(results[job]["weights"], results[job]["expected"], rtol=1e-9, atol=1e-12)


def test_ranks_with_perturbations_of_their_own_differ_in_them(seen: Seen) -> None:
    lengths = [float(results["apart-1-closure"]["grad_norm"]) for results in seen]
    assert len(set(lengths)) == len(seen)
    apart, as_one = (seen[0][job]["weights"] for job in ("micro-apart", "micro-as-one"))
    assert not torch.allclose(apart[0], as_one[0], rtol=1e-9)


@pytest.mark.parametrize("job", [job for job in JOBS if job.startswith("skip")])
def test_an_ascent_that_overflows_on_one_rank_is_skipped_on_all(seen: Seen, job: str) -> None:
    for results in seen:
        assert results[job]["skipped"] == [False, True, False]
        assert results[job]["moved"] == [True, False, True]
        assert results[job]["scale"] == (2.0**9 if job.endswith("True") else 1.0)


def test_a_checkpoint_of_zero_goes_on_bit_for_bit_with_its_epsilon(seen: Seen) -> None:
    for results in seen:
        job = results["zero-resumes"]
        assert same(job["expected"], job["weights"])
        assert job["epsilon"] == 0.25


def test_zero_that_steps_within_the_backward_pass_is_refused(seen: Seen) -> None:
    for results in seen:
        with pytest.raises(
            ValueError, match=r"steps within every backward pass.*got epsilon=0\.1; leave out overlap_with"
        ):
            raise ValueError(results["zero-overlaps"]["message"])


def test_ranks_with_models_of_their_own_adjust_their_own_radii(seen: Seen) -> None:
    assert [results["matched-own"]["radius"] for results in seen] == pytest.approx(
        [0.1 * 3.0 ** (1 + rank) for rank in range(len(seen))]
    )
    assert all(results["matched-unseen-plain"]["radius"] != 0.1 for results in seen)
    assert [results["matched-early"]["factor"] for results in seen] == [3.0] + [2 / 3] * (len(seen) - 1)


def test_ranks_of_which_only_some_share_a_model_must_say_so(seen: Seen) -> None:
    for results in seen:
        assert results["matched-pairs"]["factor"] == 3
        message = results["matched-pairs"]["message"]
        assert ("got 2 different models on 4 ranks; give flatmin.AMP the Distr" in message) == (len(seen) == 4)


def test_losses_that_one_rank_lacks_are_missed_on_all(seen: Seen) -> None:
    for results in seen:
        assert "has not seen all losses at θ and at θ + Δ" in results["matched-without-losses"]["message"]


def test_batchnorm_counts_as_without_a_perturbation(seen: Seen) -> None:
    for results in seen:
        assert same(results["statistics"]["plain"], results["statistics"]["amp"])


def test_epsilon_zero_is_the_base_optimizer_with_synchronised_gradients(seen: Seen) -> None:
    for results in seen:
        for job in (job for job in JOBS if job.startswith("idle")):
            assert same(results[job]["plain"], results[job]["amp"]), job


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("epsilon", r"all ranks must have the same epsilon, got \[0.1\] on rank 0 and \[0.2\] on rank 1; give every"),
        ("idle", r"the same epsilon, got \[0.0\] on rank 0 and \[0.1\] on rank 1"),
        ("inner_iter", "the same inner_iter, got 1 on rank 0 and 2 on rank 1"),
        ("gradients", r"without a gradient, got \[\] on rank 0 and \['number 0'\] on rank 1; use the same parameters"),
        ("replicas", "got a model with none in it; pass model=ddp_model"),
        ("outside", "the same ‖∇J‖, got .* and only parameters of the DistributedDataParallel model"),
        ("local", r"the same ‖∇J‖, got .* run the last pass outside no_sync\(\).*LocalSGD.* model=ddp_model\.module"),
        ("join", r"under join\(\) .* got sync_perturbation=False, .* use sync_perturbation=True"),
        ("join-zero", r"one pass for each step of ZeroRedundancyOptimizer, got .* as many batches"),
        ("static", "cannot do with static_graph=True; leave that out, or use sync_perturbation=True"),
    ],
)
def test_ranks_that_disagree_all_get_an_error_at_every_try_and_keep_their_weights(
    seen: Seen, on: str, words: str
) -> None:
    for results in seen:
        job = results[f"disagree-{on}"]
        assert job["stayed"]
        assert len(job["messages"]) == 2
        for message in job["messages"]:
            assert re.search(words, message)
