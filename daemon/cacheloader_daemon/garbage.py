"""When the search for garbage may wait: while all that is made lives as long as the daemon."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_collection() -> Iterator[None]:
    """No search for garbage while modules are imported, or a hundred thousand records made.

    It would cost a tenth of the imports' time and a third of the records', and later ones would look at all of them
    again.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
