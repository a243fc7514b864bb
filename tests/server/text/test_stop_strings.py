"""The stop string checker against a reference that reads one character at a time and looks at the whole text."""

import time
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringserve.server.text.stop_strings import StopStringChecker


@dataclass
class Stopped:
    """How an output ended."""

    text: str
    stop: str | None
    num_tokens: int


def reference(pieces: list[str], stops: tuple[str, ...], include: bool, min_tokens: int) -> Stopped:
    text = ""
    for n, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            for stop in stops if n > min_tokens else ():
                if text.endswith(stop):
                    return Stopped(text if include else text.removesuffix(stop), stop, n)
    return Stopped(text, None, len(pieces))


def sent_by_checker(
    pieces: list[str], stops: tuple[str, ...], include: bool = False, min_tokens: int = 0
) -> tuple[list[str], Stopped]:
    """Return what was sent after each piece (the flush is part of the last) and how it ended."""
    checker = StopStringChecker(stops, include_stop_str=include, min_tokens=min_tokens)
    sent: list[str] = []
    for n, piece in enumerate(pieces, 1):
        released, stop = checker.push(piece, n)
        sent.append(released)
        if stop is not None:
            return sent, Stopped("".join(sent), stop, n)
    sent.append(checker.flush())
    return sent, Stopped("".join(sent), None, len(pieces))


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest tail of the text that is a proper beginning of a stop string."""
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


ALPHABETS = st.sampled_from(["a", "ab", "abc", "é🙂", "<>/ab\n"])


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[str], tuple[str, ...]]:
    alphabet = draw(ALPHABETS)
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=6), min_size=1, max_size=4))
    pieces = draw(st.lists(st.text(alphabet, max_size=5), max_size=12))
    if draw(st.booleans()):  # make a stop, or most of one, come up
        pieces.insert(draw(st.integers(0, len(pieces))), draw(st.sampled_from(stops))[draw(st.integers(0, 2)) :])
    return pieces, tuple(stops)


@settings(deadline=None, derandomize=True, max_examples=600)
@given(outputs(), st.booleans(), st.sampled_from([0, 0, 1, 2, 5, 99]))
@example((["a", "a", "a", "b"], ("aab",)), False, 0)
@example((["aaab"], ("aab",)), False, 0)
@example((["a", "a", "a"], ("aa",)), False, 2)
def test_the_stop_that_completes_first_ends_the_text(
    output: tuple[list[str], tuple[str, ...]], include: bool, min_tokens: int
) -> None:
    pieces, stops = output
    _, ended = sent_by_checker(pieces, stops, include, min_tokens)
    assert ended == reference(pieces, stops, include, min_tokens)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(outputs(), st.sampled_from([0, 0, 1, 3]))
def test_only_the_longest_beginning_of_a_stop_is_held_back(
    output: tuple[list[str], tuple[str, ...]], min_tokens: int
) -> None:
    pieces, stops = output
    sent, ended = sent_by_checker(pieces, stops, min_tokens=min_tokens)
    for n in range(1, ended.num_tokens + (ended.stop is None)):
        text = "".join(pieces[:n])
        assert "".join(sent[:n]) == text[: len(text) - longest_beginning(text, stops)]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(outputs())
def test_nothing_is_held_back_when_the_stop_string_is_included(output: tuple[list[str], tuple[str, ...]]) -> None:
    pieces, stops = output
    sent, ended = sent_by_checker(pieces, stops, include=True)
    for n in range(1, ended.num_tokens + (ended.stop is None)):
        assert "".join(sent[:n]) == "".join(pieces[:n])


@settings(deadline=None, derandomize=True, max_examples=150)
@given(outputs(), st.booleans(), st.data())
def test_the_grouping_of_the_text_does_not_matter(
    output: tuple[list[str], tuple[str, ...]], include: bool, data: st.DataObject
) -> None:
    pieces, stops = output
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    regrouped = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    _, one = sent_by_checker(pieces, stops, include)
    _, other = sent_by_checker(regrouped, stops, include)
    assert (one.text, one.stop) == (other.text, other.stop)


def test_at_the_same_end_the_earlier_in_the_list_wins() -> None:
    assert sent_by_checker(["xabc"], ("bc", "abc"))[1] == Stopped("xa", "bc", 1)
    assert sent_by_checker(["xabc"], ("abc", "bc"))[1] == Stopped("x", "abc", 1)


def test_an_occurrence_within_min_tokens_is_never_found_later() -> None:
    assert sent_by_checker(["a\n", "b", "c", "\n"], ("\n",), min_tokens=2)[1] == Stopped("a\nbc", "\n", 4)
    assert sent_by_checker(["a\n", "b", "c"], ("\n",), min_tokens=1)[1] == Stopped("a\nbc", None, 3)


def test_a_stop_that_begins_within_min_tokens_and_completes_after_it_counts() -> None:
    assert sent_by_checker(["xE", "N", "D"], ("END",), min_tokens=2)[1] == Stopped("x", "END", 3)
    assert sent_by_checker(["xE", "N", "D"], ("END",), include=True, min_tokens=2)[1] == Stopped("xEND", "END", 3)


def test_text_that_keeps_almost_matching_long_stops_costs_linear_time() -> None:
    stops = tuple("a" * 1000 + end for end in "wxyz")
    pieces = ["a"] * 5000 + ["b"] + (["a"] * 999 + ["b"]) * 3
    began = time.perf_counter()
    _, ended = sent_by_checker(pieces, stops)
    print(f"{len(pieces)} pieces against four stops of 1,001 characters: {time.perf_counter() - began:.3f} s")
    assert (ended.text, ended.stop) == ("".join(pieces), None)


def test_a_flush_gives_the_held_back_text_once() -> None:
    checker = StopStringChecker(("END",), include_stop_str=False, min_tokens=0)
    assert checker.push("xEN", 1) == ("x", None)
    assert checker.flush() == "EN"
    assert checker.flush() == ""
