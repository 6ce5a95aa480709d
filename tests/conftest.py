from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cases import METHODS, MODELS, OPTIMIZERS, MakeBase, Method
from tests.support.covering import mark_full_products


@pytest.fixture(autouse=True, scope="session")
def one_thread_a_process() -> Iterator[None]:
    """Also in the processes that tests start, and for what the tests of a file share.

    With a thread a core each of them waits for the others of the suite, and burns the cores meanwhile: nine tests that
    start processes took 134 core-seconds, and 78 so.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield


@pytest.fixture(autouse=True)
def one_thread(one_thread_a_process: None) -> Iterator[None]:
    """Tiny tensors: threads cost more than they give, and the suite runs a process a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=OPTIMIZERS)
def make_base(request: pytest.FixtureRequest) -> MakeBase:
    """A base optimizer for some parameters: every row of the table."""
    return OPTIMIZERS[request.param]


@pytest.fixture(params=MODELS)
def model_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    """AMP or RMP around a base: every row of the table."""
    return METHODS[request.param]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What needs trainers, or processes that meet or are killed, runs when asked for: `make test-integrations`."""
    asked = any("integrations" in argument for argument in config.args)
    return True if collection_path.name == "integrations" and not asked else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_full_products(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
