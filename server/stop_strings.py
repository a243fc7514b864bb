"""Stop strings over a stream of text pieces: which one completes first, and what may be sent meanwhile."""


class StopStringChecker:
    """Finds the first stop string that completes after `min_tokens` tokens.

    Only the longest tail that is a beginning of some stop string is held back: at most the longest stop less one
    character, usually nothing. That tail is also all the context that a later match can need.

    Args:
        stops: Not empty, no empty string.
        include_stop_str: Keep the stop string in the text; then nothing is held back.
        min_tokens: Stops that complete within the first `min_tokens` tokens are ignored, for good.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop_str: bool, min_tokens: int) -> None:
        self._stops = stops
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._tail = ""

    def push(self, piece: str, num_tokens: int) -> tuple[str, str | None]:
        """Take the text of token number `num_tokens` (from 1).

        Returns:
            The text that may be sent now, and the stop string that ended the output or None. Of the stops that this
            piece completes the one that ends first wins; at the same end, the earlier in the list.
        """
        tail, text = self._tail, self._tail + piece
        if num_tokens > self._min_tokens:
            start, end, stop = self._first_match(text, len(tail))
            if stop is not None:
                self._tail = ""
                cut = text[: end if self._include_stop_str else start]
                return (cut[len(tail) :] if self._include_stop_str else cut), stop
        hold = self._num_held(text)
        self._tail = text[len(text) - hold :]
        if self._include_stop_str:
            return piece, None
        return text[: len(text) - hold], None

    def flush(self) -> str:
        """Return the held-back text: the output has ended without a stop string."""
        held, self._tail = self._tail, ""
        return "" if self._include_stop_str else held

    def _first_match(self, text: str, num_seen: int) -> tuple[int, int, str | None]:
        best: tuple[int, int, str | None] = (0, len(text) + 1, None)
        for stop in self._stops:
            # Matches that end within the seen characters were looked at, or ignored for min_tokens, before.
            start = text.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0 and start + len(stop) < best[1]:
                best = start, start + len(stop), stop
        return best

    def _num_held(self, text: str) -> int:
        return max(_num_begun(text, stop) for stop in self._stops)


def _num_begun(text: str, stop: str) -> int:
    """Return the length of the longest tail of `text` that is a proper beginning of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
