import asyncio
import functools

from ringserve.server.http.turns import _PIECES, _PIECES_BESIDE_NEWCOMERS, Turns


async def turn() -> None:
    """Wait for the loop's next turn."""
    await asyncio.sleep(0)


async def test_a_turn_takes_so_many_and_the_others_follow_in_order() -> None:
    turns, taken = Turns(), list[int]()
    for n in range(3 * _PIECES + 1):
        if turns.try_take():
            taken.append(n)
        else:
            turns.wait(functools.partial(taken.append, n))
    assert taken == [*range(_PIECES)]
    for num_turns in (2, 3, 4):
        await turn()
        assert taken == [*range(min(num_turns * _PIECES, 3 * _PIECES + 1))]


async def test_what_comes_while_others_wait_goes_behind_them() -> None:
    turns, taken = Turns(), list[str]()
    while turns.try_take():
        pass
    for _ in range(2 * _PIECES):
        turns.wait(functools.partial(taken.append, "old"))
    await turn()
    assert not turns.try_take()
    turns.wait(functools.partial(taken.append, "new"))
    await turn()
    assert taken == ["old"] * 2 * _PIECES
    await turn()
    assert taken[-1] == "new"


async def test_each_turn_has_room_again() -> None:
    turns = Turns()
    for _ in range(3):
        assert [turns.try_take() for _ in range(_PIECES + 1)] == [True] * _PIECES + [False]
        await turn()
        await turn()


async def test_while_connections_come_in_a_turn_takes_less() -> None:
    turns, taken = Turns(), list[int]()
    for n in range(2 * _PIECES):
        turns.wait(functools.partial(taken.append, n))
    for num_turns in (1, 2):
        turns.note_newcomer()
        await turn()
        assert taken == [*range(num_turns * _PIECES_BESIDE_NEWCOMERS)]
    assert not turns.try_take()
    await turn()
    assert len(taken) == 2 * _PIECES_BESIDE_NEWCOMERS + _PIECES
