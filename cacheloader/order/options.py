"""What the sample order depends on besides the data set."""

from __future__ import annotations

from dataclasses import dataclass

from cacheloader.errors import ConfigError

ORDER_VERSION = 1
"""Raised whenever equal options would give another order; belongs into every saved position."""

TAILS = ("drop", "pad", "keep")

SMALLEST_REDEAL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """The options that fix the order; none of them may change in the middle of a run.

    Attributes:
        seed: Start of all randomness, ``[0, 2**64)``.
        lanes: Equal parts that the data set is cut into, 1 or more. Each row takes one sample of every lane, so a
            global batch must be a multiple of it.
        shuffle: ``False`` reads one lane in the order of the data set.
        shuffle_window: Consecutive shards of a lane whose samples are mixed, 1 or more. A rank holds that many
            shards at once for every lane that it reads.
        tail: What becomes of a last step that is not full: ``"drop"`` leaves it out, ``"pad"`` fills it from the
            epoch's own start and marks what was added, ``"keep"`` makes it smaller.
        redeal: Fraction of the shards that is dealt to the lanes anew in each epoch, 0 or ``[0.01, 1]``. More mixing,
            but a node finds only the rest in its cache.

    Raises:
        ConfigError: A value is out of its range, or ``shuffle=False`` comes with more than one lane or ``redeal``.
    """

    seed: int = 0
    lanes: int = 1
    shuffle: bool = True
    shuffle_window: int = 8
    tail: str = "drop"
    redeal: float = 0.0

    def __post_init__(self) -> None:
        if not _is_whole(self.seed) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed!r} is no whole number from 0 to 2**64 - 1; pass one, such as seed=17")
        if not _is_whole(self.lanes) or self.lanes < 1:
            raise ConfigError(
                f"lanes={self.lanes!r} is no whole number from 1; pass the world size the run starts with"
            )
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"shuffle={self.shuffle!r} is neither True nor False; pass one of them")
        if not _is_whole(self.shuffle_window) or self.shuffle_window < 1:
            raise ConfigError(
                f"shuffle_window={self.shuffle_window!r} is no whole number of shards from 1; pass 1 to mix samples "
                "inside single shards only"
            )
        if self.tail not in TAILS:
            raise ConfigError(f'tail={self.tail!r} is not one of "drop", "pad" and "keep"; pass one of them')
        is_number = isinstance(self.redeal, int | float) and not isinstance(self.redeal, bool)
        if not is_number or not (self.redeal == 0 or SMALLEST_REDEAL <= self.redeal <= 1):
            raise ConfigError(
                f"redeal={self.redeal!r} is neither 0 nor a fraction from {SMALLEST_REDEAL} to 1; pass 0 to keep every "
                "shard in its lane"
            )
        if not self.shuffle and self.lanes != 1:
            raise ConfigError(
                f"shuffle=False reads one lane in the order of the data set and got lanes={self.lanes}; pass lanes=1 "
                "(every world size can read it) or shuffle=True"
            )
        if not self.shuffle and self.redeal:
            raise ConfigError(
                f"redeal={self.redeal!r} moves shards between lanes and shuffle=False keeps the order of the data set; "
                "pass redeal=0 or shuffle=True"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
