import json

import pytest

from cacheloader.errors import StateMismatch
from cacheloader.state import Position, parse, reconcile

ORDER = {"seed": 1, "lanes": 4, "shuffle": True, "shuffle_window": 8, "tail": "drop", "redeal": 0.0}
SAVED = Position(manifest="a" * 32, order=ORDER, epoch=3, row=17)


def here(**changes: object) -> Position:
    order = {**ORDER, **{k: v for k, v in changes.items() if k != "manifest"}}
    return Position(manifest=str(changes.get("manifest", "a" * 32)), order=order)


def test_a_position_survives_json_and_comes_back_equal() -> None:
    assert parse(json.loads(json.dumps(SAVED.to_dict()))) == SAVED


def test_each_state_is_a_fresh_copy() -> None:
    first, second = SAVED.to_dict(), SAVED.to_dict()
    first["order"]["seed"] = 99
    assert second["order"]["seed"] == SAVED.order["seed"] == 1


def test_a_position_stays_below_one_kibibyte() -> None:
    assert len(json.dumps(Position(manifest="a" * 32, order=ORDER, epoch=10**6, row=10**12).to_dict())) < 1024


def test_the_same_order_goes_on_at_the_saved_row() -> None:
    assert reconcile(SAVED, here()) == SAVED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("manifest", "b" * 32), ("seed", 2), ("lanes", 8), ("shuffle", False),
        ("shuffle_window", 4), ("tail", "keep"), ("redeal", 0.5),
    ],
)  # fmt: skip
def test_every_field_that_changes_the_order_is_refused_with_old_and_new(field: str, value: object) -> None:
    with pytest.raises(StateMismatch, match=rf"{field}: saved .*, now {value!r}.*on_mismatch"):
        reconcile(SAVED, here(**{field: value}))


def test_a_difference_can_be_accepted_at_the_same_row_or_from_the_start_of_the_epoch() -> None:
    now = here(seed=2)
    assert reconcile(SAVED, now, on_mismatch={"seed": "accept"}).row == 17
    restarted = reconcile(SAVED, now, on_mismatch={"seed": "restart_epoch"})
    assert (restarted.epoch, restarted.row, restarted.order["seed"]) == (3, 0, 2)


def test_a_policy_for_a_field_that_does_not_differ_changes_nothing() -> None:
    assert reconcile(SAVED, here(), on_mismatch={"seed": "restart_epoch"}) == SAVED


def test_accepting_one_difference_does_not_accept_another() -> None:
    with pytest.raises(StateMismatch, match="lanes"):
        reconcile(SAVED, here(seed=2, lanes=8), on_mismatch={"seed": "accept"})


@pytest.mark.parametrize("policies", [{"sed": "accept"}, {"seed": "ignore"}])
def test_an_unknown_policy_or_field_is_refused(policies: dict[str, str]) -> None:
    with pytest.raises(StateMismatch, match="unknown"):
        reconcile(SAVED, here(), on_mismatch=policies)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [{"version": 2}, {"epoch": -1}, {"row": "17"}, {"row": True}, {"manifest": None}, {"order": []}, {"more": 1}],
)
def test_what_is_no_position_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(StateMismatch):
        parse(SAVED.to_dict() | damage)


def test_a_missing_field_is_refused() -> None:
    state = SAVED.to_dict()
    del state["row"]
    with pytest.raises(StateMismatch, match="row"):
        parse(state)
