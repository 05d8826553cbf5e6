"""From a batch of raw samples to what the training loop gets: the user's transform, its randomness, and what it drops.

Each call of the transform finds the random generators of python, numpy and torch in a state that depends on the place
of the sample alone, so that a crop is the same after any resume and under any number of workers. Afterwards the
generators are as they were: a transform in the main process does not disturb the model's dropout.
"""

from __future__ import annotations

import enum
import inspect
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch

from cacheloader.errors import BadSample, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from cacheloader.formats.base import Sample


class Skip(enum.Enum):
    """The type of ``SKIP``."""

    SKIP = "skip"


SKIP: Final = Skip.SKIP
"""What a transform returns to leave a sample out. The batch gets shorter; the position stays exact."""

OnBadSample = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What became of one batch.

    Attributes:
        samples: What the transform returned, in place order, without what was left out.
        num_skipped: Samples that the transform left out on purpose.
        num_bad: Samples that were left out since the transform failed on them.
        epoch: The epoch that it was read in.
        row: First row of its step.
        number: int64 [n]; which sample of the data set each one is, those that were left out included.
    """

    samples: list[Any]
    num_skipped: int = 0
    num_bad: int = 0
    epoch: int = 0
    row: int = 0
    number: NDArray[np.int64] | None = None


class Delivery:
    """Applies a transform.

    Args:
        transform: Called with a sample, or with a sample and a ``numpy.random.Generator`` if it takes a second
            positional argument or one named ``rng``; ``None`` delivers samples as they are.
        on_bad_sample: What happens when the transform raises: ``"raise"`` an error that names the sample, or
            ``"skip"`` it and count.
        max_bad_samples: How many may be skipped in one process before it is an error after all.
    """

    def __init__(
        self,
        transform: Callable[..., Any] | None,
        *,
        on_bad_sample: OnBadSample = "raise",
        max_bad_samples: int = 100,
    ) -> None:
        if on_bad_sample not in ("raise", "skip"):
            raise ConfigError(f'on_bad_sample={on_bad_sample!r} is unknown; pass "raise" or "skip"')
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform={transform!r} cannot be called; pass a function of a sample, or leave it out")
        if max_bad_samples < 0:
            raise ConfigError(f"max_bad_samples={max_bad_samples} is below 0")
        self._transform = transform
        self._wants_rng = transform is not None and _wants_rng(transform)
        self._on_bad_sample = on_bad_sample
        self._max_bad_samples = max_bad_samples
        self._num_bad = 0

    @property
    def has_transform(self) -> bool:
        """Whether samples are changed, or left out, at all."""
        return self._transform is not None

    def deliver(self, samples: list[Sample], words: NDArray[np.uint64]) -> Delivered:
        """Transform one batch.

        Args:
            samples: Raw samples in place order.
            words: uint64 [n]; the random word of each sample's place, see ``order.draws``.
        """
        results, num_bad = self.apply(samples, words)
        kept = [result for result in results if result is not SKIP]
        return Delivered(samples=kept, num_skipped=len(results) - len(kept) - num_bad, num_bad=num_bad)

    def apply(self, samples: list[Sample], words: NDArray[np.uint64]) -> tuple[list[Any], int]:
        """What becomes of each sample, ``SKIP`` where it is left out, and how many of those have failed.

        Args:
            samples: As in ``deliver``.
            words: As in ``deliver``.
        """
        if self._transform is None:
            return list(samples), 0
        bad_before = self._num_bad
        results = []
        with _generators_put_back():
            for sample, word in zip(samples, words.tolist(), strict=True):
                _seed_generators(word)
                results.append(self._transformed(sample, word))
        return results, self._num_bad - bad_before

    def _transformed(self, sample: Sample, word: int) -> Any:
        assert self._transform is not None
        try:
            if self._wants_rng:
                return self._transform(sample, np.random.Generator(np.random.Philox(_Word(word))))  # type: ignore[arg-type]
            return self._transform(sample)
        except Exception as error:
            name = _name(sample)
            if self._on_bad_sample == "raise":
                error.add_note(f"while the transform ran on {name}")
                raise
            self._num_bad += 1
            if self._num_bad > self._max_bad_samples:
                raise BadSample(
                    f"the transform has failed on {self._num_bad} samples in this process, the last was {name} with "
                    f"{type(error).__name__}: {error}; mend the data or the transform, or raise "
                    f"max_bad_samples={self._max_bad_samples}"
                ) from error
            return SKIP


def _name(sample: Any) -> str:
    # What a mixture transforms may be what the transform of a member has made.
    return f"sample {sample.get('__key__')!r}" if isinstance(sample, dict) else f"a {type(sample).__name__}"


def _wants_rng(transform: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False  # built in C without a signature: called with the sample alone
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) == 2 or (len(positional) == 1 and any(p.name == "rng" for p in parameters))


class _Word(np.random.bit_generator.ISeedSequence):
    """Seeds a bit generator with one word: no entropy of the system is asked for, which costs more than the rest."""

    def __init__(self, word: int) -> None:
        self._word = word

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.full(n_words, self._word & np.iinfo(dtype).max, dtype=dtype)


def _seed_generators(word: int) -> None:
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    # The CPU generator alone: torch.manual_seed would seed every CUDA device of a main process, too.
    torch.default_generator.manual_seed(word & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def _generators_put_back() -> Iterator[None]:
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
