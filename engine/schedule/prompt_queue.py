"""Who gets a step's prompt tokens: the order of the prompts, and those that wait in it. Pure Python, no torch.

Within a priority the prompt with the fewest tokens left goes first, so that a short chat is not held up by long
documents: first come, first served kept it for as long as all of them took. The prompts of one call count together: a
chat goes before an embeddings call of a thousand short texts. Where clients are told apart by their keys, the key with
the fewest tokens of prompts waiting goes first, and size decides within it: one key with a hundred clients does not
shut the others out.

So that nobody starves, a fourth of each step belongs to the oldest prompt; of steps of one token, each fourth. With
that, whoever waits is computed, at worst, as if first come, first served ran at a fourth of the speed.

Rejected: equal shares for all, under which sixteen long prompts are all done at the end of the time that they take
together; ageing by time waited, whose factor nobody can set; a step in four for the oldest instead of a fourth of each,
which holds a short prompt up for that step.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from operator import attrgetter

from ringserve.engine.schedule.request import Request

OLDEST_SHARE = 4  # one part in so many of a step's prompt tokens is the oldest prompt's
MAX_UNDER_WAY = 4  # prompts of which a part is computed: they hold blocks and give nothing yet
_MAX_SCORED_TOKENS = 512  # of prompts whose logprobs are wanted, a step: their logits are held all at once
_LOOK_UPS = 16  # of waiting prompts in the prefix cache, a step: thousands may wait

BY_AGE = attrgetter("rank")


def by_size(request: Request) -> tuple[int, int, int]:
    """Return the key by which prompts go first that have little left: priority, tokens, arrival."""
    return request.params.priority, request.num_sibling_tokens + request.num_tokens_left, request.arrival


class PromptQueue:
    """Requests that wait to be admitted, by age and by size.

    Sorted lists: an insertion or removal among some thousands is cheaper than a heap's upkeep.

    Args:
        count_found: Returns how many of a request's tokens the prefix cache has.
    """

    def __init__(self, count_found: Callable[[Request], int]) -> None:
        self._count_found = count_found
        self._by_age: list[Request] = []
        self._by_size: dict[tuple[int, int], list[Request]] = {}  # by priority and the number of the client's key
        self._num_tokens: Counter[int] = Counter()  # of all prompts of a key
        self._next_look_up = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Request]:
        """Oldest first, within a priority."""
        return iter(self._by_age)

    @property
    def oldest(self) -> Request | None:
        """Who came first of the best priority."""
        return self._by_age[0] if self._by_age else None

    def order(self, under_way: list[Request], count: int) -> list[Request]:
        """Return prompts under way and `count` of those that wait in the order in which they get tokens.

        If any, the first of each key and priority is there too, in case that those before it find no room.
        """
        num_tokens = self._num_tokens.copy()
        for request in under_way:
            num_tokens[request.params.key_number] += request.num_tokens_left

        def turn(line: tuple[int, int]) -> tuple[int, int]:
            return line[0], num_tokens[line[1]]

        lines = [self._by_size[line] for line in sorted(self._by_size, key=turn)] if count else []
        waiting = dict.fromkeys((*islice(chain.from_iterable(lines), count), *(line[0] for line in lines)))
        return sorted((*under_way, *waiting), key=lambda one: (turn(_line(one)), by_size(one)))

    def add(self, request: Request) -> None:
        """Let a request wait that holds no blocks."""
        request.num_computed_tokens = self._count_found(request)
        insort(self._by_age, request, key=BY_AGE)
        insort(self._by_size.setdefault(_line(request), []), request, key=by_size)
        self._num_tokens[request.params.key_number] += request.num_tokens

    def try_remove(self, request: Request) -> bool:
        """Take a request out; False if it is not here."""
        index = bisect_left(self._by_age, request.rank, key=BY_AGE)
        if index == len(self._by_age) or self._by_age[index] is not request:
            return False
        del self._by_age[index]
        line, key_number = self._by_size[_line(request)], request.params.key_number
        del line[bisect_left(line, by_size(request), key=by_size)]
        if not line:
            del self._by_size[_line(request)]
        self._num_tokens[key_number] -= request.num_tokens
        if not self._num_tokens[key_number]:
            del self._num_tokens[key_number]
        return True

    def look_up(self) -> None:
        """Look the next few up in the prefix cache, whose content has changed since: in turn, so that all come up."""
        for _ in range(min(_LOOK_UPS, len(self._by_age))):
            self._next_look_up = (self._next_look_up + 1) % len(self._by_age)
            request = self._by_age[self._next_look_up]
            num_found = self._count_found(request)
            if num_found != request.num_computed_tokens:
                line = self._by_size[_line(request)]
                del line[bisect_left(line, by_size(request), key=by_size)]
                request.num_computed_tokens = num_found
                insort(line, request, key=by_size)


def _line(request: Request) -> tuple[int, int]:
    return request.params.priority, request.params.key_number


class Shares:
    """How a step's prompt tokens are given out.

    Args:
        budget: How many there are.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_tokens: dict[Request, int] = {}  # who gets how many
        self._num_left = budget
        self._num_scored_left = _MAX_SCORED_TOKENS

    def room(self, request: Request, limit: int) -> int:
        """Return how many tokens a request could get now, at most `limit`."""
        if request.params.num_prompt_logprobs >= 0:
            limit = min(limit, self._num_scored_left)
        return min(limit, self._num_left)

    def give(self, request: Request, limit: int) -> None:
        """Give a request what it has left of its prompt, at most `limit` more tokens."""
        given = self.num_tokens.get(request, 0)
        num_tokens = min(self.room(request, limit), request.num_tokens_left - given)
        if num_tokens > 0:
            self.num_tokens[request] = given + num_tokens
            self._num_left -= num_tokens
            if request.params.num_prompt_logprobs >= 0:
                self._num_scored_left -= num_tokens
