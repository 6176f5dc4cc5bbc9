"""What each window is told of the text before it."""

from __future__ import annotations

from engine.prompts import PromptHistory


def history(initial: list[int] | None = None, carry: bool = False, condition: bool = True) -> PromptHistory:
    return PromptHistory(initial or [], carry, condition, 6)


def test_text_so_far_goes_before_a_window_its_end_where_it_is_long() -> None:
    told = history()
    assert told.prompt() == []
    told.add([1, 2, 3, 4], helps=True)
    told.add([5, 6, 7], helps=True)
    assert told.prompt() == [2, 3, 4, 5, 6, 7]


def test_what_would_mislead_makes_all_be_forgotten_the_initial_prompt_too() -> None:
    told = history([8, 9])
    told.add([1], helps=True)
    assert told.prompt() == [8, 9, 1]
    told.add([2], helps=False)
    assert told.prompt() == []
    told.add([3], helps=True)
    assert told.prompt() == [3]


def test_whether_the_initial_prompt_is_still_told() -> None:
    told = history([8, 9])
    assert told.tells_initial
    told.add([1, 2, 3], helps=True)
    assert told.tells_initial
    told.add([4, 5, 6], helps=True)  # its place is taken
    assert not told.tells_initial
    for told in (history([8, 9], carry=True), history([8, 9])):
        told.add([1], helps=False)
    assert not told.tells_initial
    assert not history().tells_initial
    carried = history([8, 9], carry=True)
    carried.add([1, 2, 3, 4, 5, 6], helps=False)
    assert carried.tells_initial


def test_unconditioned_the_initial_prompt_goes_before_the_first_window_alone() -> None:
    told = history([8, 9], condition=False)
    assert told.prompt() == [8, 9]
    told.add([1], helps=True)
    assert told.prompt() == []


def test_a_carried_prompt_stays_in_front_and_shortens_the_rest() -> None:
    told = history([8, 9], carry=True)
    told.add([1, 2, 3, 4, 5], helps=True)
    assert told.prompt() == [8, 9, 2, 3, 4, 5]
    told.add([6], helps=False)
    assert told.prompt() == [8, 9]


def test_a17_an_initial_prompt_that_fills_all_leaves_no_room_and_its_end_counts() -> None:
    for carry in (False, True):
        told = history(list(range(10)), carry)
        assert told.prompt() == [4, 5, 6, 7, 8, 9]
        told.add([77], helps=True)
        assert told.prompt() == ([4, 5, 6, 7, 8, 9] if carry else [5, 6, 7, 8, 9, 77])
