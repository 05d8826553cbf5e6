from collections.abc import Iterator

import pytest

from cacheloader.goodput import recorder


@pytest.fixture(autouse=True)
def nothing_recorded_early() -> Iterator[None]:
    """What other tests did before any run began would else count for the first run that begins here."""
    recorder._early.clear()
    yield
    recorder._early.clear()
