"""Puts the sequences of one prompt together again, once all have ended: what is told of requests, not of sequences."""

from ringserve.server.telemetry.finished_sequence import FinishedSequence


class Siblings:
    """The ended sequences of prompts of which others go on. Loop thread only."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, int], list[FinishedSequence]] = {}

    def add(self, sequence: FinishedSequence) -> list[FinishedSequence]:
        """Take a sequence in; return all of its prompt's, in the order of their ends, if it was the last; else none."""
        if sequence.n == 1:
            return [sequence]
        key = (sequence.request_id, id(sequence.prompt_token_ids))  # the sequences share the list, and keep it alive
        self._ended.setdefault(key, []).append(sequence)
        return [] if sequence.num_siblings_left else self._ended.pop(key)

    def __len__(self) -> int:
        """Prompts of which sequences go on."""
        return len(self._ended)
