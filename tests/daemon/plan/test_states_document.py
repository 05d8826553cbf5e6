from __future__ import annotations

from pathlib import Path

from cacheloader_daemon.plan.states import MOVES, Cause, ShardState

DOCUMENT = Path(__file__).parents[3] / "docs" / "states.md"


def rows_below(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    text = DOCUMENT.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_document_describes_each_state_in_one_sentence() -> None:
    rows = rows_below("States")
    assert [row[0] for row in rows] == [state.value for state in ShardState]
    for _, sentence, *_ in rows:
        assert sentence.endswith(".")
        assert sentence.count(".") == 1


def test_document_has_the_moves_of_the_code() -> None:
    moves = {(start.value, cause.value): stop.value for (start, cause), stop in MOVES.items()}
    assert {(start, cause): stop for start, cause, stop in rows_below("Moves")} == moves
    assert len(rows_below("Moves")) == len(moves)


def test_each_cause_leads_somewhere_and_each_state_can_be_left() -> None:
    assert {cause for _, cause in MOVES} == set(Cause)
    assert {state for state, _ in MOVES} == set(ShardState)
