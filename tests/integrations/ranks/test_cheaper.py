"""An ascent on less data, and steps that are not perturbed, in two and four gloo processes: as one process would."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.ranks.cheaper_jobs import EVERY_STEP, JOBS, OTHER, PERTURBED, SAVED_AFTER, STEPS
from tests.integrations.ranks.processes import in_ranks
from tests.support.cases import same

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What every job of cheaper_jobs.py returned, for each rank."""
    return in_ranks(JOBS, request.param, tmp_path_factory.mktemp("ranks"))


def named(*starts: str) -> list[str]:
    return [job for job in JOBS if job.startswith(starts)]


@pytest.mark.parametrize("job", [job for job in JOBS if not job.startswith(("statistics", "turns"))])
def test_replicas_stay_equal_to_the_last_bit(seen: Seen, job: str) -> None:
    assert all(same(seen[0][job]["weights"], results[job]["weights"]) for results in seen[1:])


@pytest.mark.parametrize("job", named("as-one", "apart"))
def test_ranks_train_as_by_hand_in_one_process(seen: Seen, job: str) -> None:
    for results in seen:
        torch.testing.assert_close(results[job]["weights"], results[job]["expected"], rtol=1e-9, atol=1e-12)
        assert results[job]["scale"] == (2.0**10 if job.endswith("scaled") else 1.0)


def test_what_a_rank_ascends_on_matters(seen: Seen) -> None:
    ends = [seen[0][job]["weights"][0] for job in named("as-one", "apart") if job.endswith("-1")]
    assert len(ends) == 6
    assert not any(torch.allclose(a, b, rtol=1e-6) for place, a in enumerate(ends) for b in ends[:place])


@pytest.mark.parametrize("job", [job for job in named("as-one", "apart") if not job.endswith(("views", "static"))])
def test_gradients_are_sent_once_in_an_idle_step_and_after_an_ascent_of_its_own_on_every_rank(
    seen: Seen, job: str
) -> None:
    """One perturbation for all: once in each pass."""
    perturbed = PERTURBED if "late" in job else EVERY_STEP
    passes = (3 if job.endswith("-2") else 2) if job.startswith("as-one") else 1
    for results in seen:
        assert results[job]["sent"] == [passes if step in perturbed else 1 for step in range(STEPS)]


@pytest.mark.parametrize("job", named("turns"))
def test_idle_steps_are_the_base_s_own_bit_for_bit(seen: Seen, job: str) -> None:
    for results in seen:
        assert same(results[job]["plain"], results[job]["amp"])
        assert same(results[job]["amp"], seen[0][job]["amp"])


@pytest.mark.parametrize("job", named("resume"))
def test_a_checkpoint_between_two_perturbed_steps_goes_on_bit_for_bit(seen: Seen, job: str) -> None:
    for results in seen:
        assert same(results[job]["expected"], results[job]["weights"])
        assert [radius > 0 for radius in results[job]["radii"]] == [n in PERTURBED for n in range(SAVED_AFTER, STEPS)]


@pytest.mark.parametrize("job", named("skip"))
def test_an_ascent_on_less_that_overflows_on_one_rank_is_skipped_on_all(seen: Seen, job: str) -> None:
    for results in seen:
        assert results[job]["skipped"] == [False, True, False]
        assert results[job]["moved"] == [True, False, True]
        assert results[job]["scale"] == (2.0**9 if job.endswith("True") else 1.0)


@pytest.mark.parametrize("job", named("statistics"))
def test_batchnorm_counts_what_the_ascent_sees(seen: Seen, job: str) -> None:
    for results in seen:
        assert same(results[job]["plain"], results[job]["amp"])


@pytest.mark.parametrize("job", named("match"))
def test_an_automatic_radius_asks_all_ranks_for_losses_that_one_lacks_and_takes_their_mean(
    seen: Seen, job: str
) -> None:
    for results in seen:
        with pytest.raises(ValueError, match=r"with ascent=, .* give their means since the last call"):
            raise ValueError(results[job]["message"])
        assert results[job]["stayed"]
        assert results[job]["factors"] == pytest.approx(results[job]["expected"], rel=1e-12)
        assert results[job]["grows_to"] == pytest.approx(0.1 * results[job]["expected"][1], rel=1e-12)


@pytest.mark.parametrize("on", [*OTHER, "absent", "radius"])
def test_ranks_with_other_schedules_all_get_an_error_in_the_first_step(seen: Seen, on: str) -> None:
    last = len(seen) - 1
    for results in seen:
        job = results[f"disagree-{on}"]
        assert job["stayed"]
        assert job["step"] == 0
        with pytest.raises(
            ValueError, match=rf"the same radius_schedule, got .* on rank 0 and .* on rank {last}; give"
        ):
            raise ValueError(job["message"])


def test_an_ascent_that_is_not_synchronised_is_an_error_on_all_ranks_in_the_first_perturbed_step(seen: Seen) -> None:
    for results in seen:
        job = results["disagree-local ascent"]
        assert job["stayed"]
        assert job["step"] == PERTURBED[0]
        with pytest.raises(ValueError, match=r"the same ‖∇J‖, got .* run the passes outside no_sync\(\)"):
            raise ValueError(job["message"])
