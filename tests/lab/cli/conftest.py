import pytest

from flatmin_lab.evaluation import measurements


@pytest.fixture(autouse=True)
def few_resamplings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intervals' own tests draw as many as users have; here it is about what the command does with them."""
    monkeypatch.setattr(measurements, "BOOTSTRAP_SAMPLES", 50)
