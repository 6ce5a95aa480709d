"""What fails in a process of its own is stored, and the other runs continue."""

import json
from pathlib import Path

from flatmin_lab.recipes.recipe import Job
from flatmin_lab.runs.events import Failed, Finished
from flatmin_lab.runs.result_store import ResultStore
from tests.lab.execution.test_runner import DIVERGING, QUICK, in_workers


def test_a_failure_is_stored_and_the_others_continue(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "results", tmp_path / "runs")
    jobs = [Job(DIVERGING, 0), Job(QUICK, 0)]
    ends = in_workers(jobs, store, workers=2)
    assert isinstance(ends[0], Failed)
    assert isinstance(ends[1], Finished)
    assert [store.state(job) for job in jobs] == ["failed", "done"]
    failure = json.loads(store.failure(jobs[0]).read_text())
    assert "training stops" in failure["error"]
    assert (failure["seed"], failure["method"], failure["data"]) == (0, "label_smoothing", "cifar10-made")
    store.write(jobs[0], {"anything": 1})
    assert not store.failure(jobs[0]).exists()  # it has succeeded since
