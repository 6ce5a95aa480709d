"""A real Ray cluster of several nodes on this machine, one for each file of tests.

The head has no CPUs, so nothing is trained there; each test adds the nodes that it needs.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.integrations.cluster.command import SOURCE

SIZE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100_000_000}
# A node counts as dead after five checks that fail. One that was killed refuses them at once, so that this is the time
# between them; one that is alive has ten seconds for each, however busy the machine is.
CHECK_MILLISECONDS = 500


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {**SIZE, "num_cpus": 0, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SOURCE)  # of the nodes
        patch.setenv("RAY_health_check_period_ms", str(CHECK_MILLISECONDS))
        there = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        yield there
        there.shutdown()


@pytest.fixture
def add(cluster: Any) -> Iterator[Callable[..., Any]]:
    """A function that adds a node, for this test alone."""
    added: list[Any] = []

    def new(**changes: Any) -> Any:
        added.append(cluster.add_node(**{**SIZE, **changes}))
        return added[-1]

    yield new
    for node in added:
        with suppress(Exception):  # one that the test has killed
            cluster.remove_node(node)
