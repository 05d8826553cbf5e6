"""What may be deleted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.checkpoint.commit import Name
from cacheloader.checkpoint.retention import Retention, removable
from cacheloader.errors import ConfigError

names = st.lists(
    st.builds(Name, serial=st.integers(1, 40), step=st.integers(0, 100), attempt=st.just("00000000")), unique=True
)
retentions = st.builds(Retention, keep_last=st.none() | st.integers(1, 5), keep_every=st.none() | st.integers(1, 30))


@given(names, st.data(), retentions)
def test_the_newest_good_checkpoint_and_all_that_is_newer_stay(
    all_names: list[Name], data: st.DataObject, retention: Retention
) -> None:
    committed = data.draw(st.lists(st.sampled_from(all_names), unique=True)) if all_names else []
    uncommitted = [name for name in all_names if name not in committed]
    bad = data.draw(st.sets(st.sampled_from(committed))) if committed else set()
    going = removable(committed, uncommitted, bad=bad, retention=retention)
    good = sorted(set(committed) - bad)
    assert going == sorted(set(going))
    if not good or retention.keeps_all:
        assert going == []
        return
    assert all(name < good[-1] for name in going)
    kept = [name for name in good if name not in going]
    assert kept[-(retention.keep_last or 1) :] == good[-(retention.keep_last or 1) :]
    assert all(name in kept for name in good if retention.keep_every and name.step % retention.keep_every == 0)


def test_a_checkpoint_known_to_be_bad_is_not_counted_as_kept() -> None:
    old, bad, new = (Name(serial=s, step=s, attempt="00000000") for s in (1, 2, 3))
    assert removable([old, bad, new], [], bad={bad}, retention=Retention(keep_last=2)) == [bad]


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_last=0"):
        Retention(keep_last=0)
