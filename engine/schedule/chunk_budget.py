"""How many prompt tokens a step takes. Pure Python; learns from every step what tokens and decodes cost.

Every token that a step takes of prompts lengthens the gap of the streams beside it, and shortens the wait of all whose
prompts are not computed. So a step's time is divided by how many wait: with 3 prompts beside one stream, three fourths
of it go to prompts. Streams count by the square root of their number, because a step of 16 takes about 4 times one of
1: counted by heads, a burst of 32 chats took 24 steps, each slower for those who were done. Two limits hold that:

- `target_gap_s`: no step is planned to take longer. It is the gap that streams see while many prompts wait, and, where
  nothing decodes, what a prompt that has just come waits for the step under way.
- `min_prefill_share`: prompts get no less of a step's time, whatever the target. A bound on one stream's gap alone gave
  every other user a fourth of the prefill speed.
"""

_KEEP = 0.8  # of the past, in the averages
_EFFICIENT_TOKENS = 64  # of such a chunk a token costs hardly more than of a long one; half of it for half the share
# At least, of a step without decodes: each chunk reads all keys and values before it. A prompt of 2,000 tokens on a CPU
# took 5.2 s in chunks of 512 tokens, 5.5 of 96, 6.1 of 60 to 90.
_LEAST_ALONE_TOKENS = 96
_FIRST_TOKENS = 128  # of a step without decodes while no cost is known
_REMEASURE_AFTER = 32  # steps; then one takes no prompt tokens, or a growing context of the decodes would go unseen


class ChunkBudget:
    """Sizes the prompt share of each step from what the steps before have cost.

    Args:
        max_tokens: Never more.
        target_gap_s: How long a step with prompt tokens should take at most.
        min_prefill_share: Of the time of a step beside decodes, 0 to less than 1.
    """

    def __init__(self, max_tokens: int, *, target_gap_s: float = 0.25, min_prefill_share: float = 0.5) -> None:
        self._max_tokens = max_tokens
        self._target_ns = target_gap_s * 1e9
        self._min_share = min_prefill_share
        self._quiet = _QuietSteps()
        self._prompt_ns = 0.0  # what the prompt tokens of the last steps have cost, fading
        self._prompt_tokens = 0.0  # and how many they were, fading alike

    def tokens(self, *, num_decodes: int, num_prompts: int) -> int:
        """Return how many prompt tokens the next step may take.

        Args:
            num_decodes: Rows of the step that decode.
            num_prompts: Prompts that are not computed yet, under way or waiting.
        """
        if not num_decodes:
            num_tokens = self._tokens_in(self._target_ns) if self._prompt_ns else _FIRST_TOKENS
            return min(max(num_tokens, _LEAST_ALONE_TOKENS), self._max_tokens)
        if self._quiet.is_stale(num_decodes):
            return 0
        quiet_ns = self._quiet.ns(num_decodes)
        share = num_prompts / (num_prompts + num_decodes**0.5)
        spare_ns = min(_beside(quiet_ns, share) if quiet_ns else share * self._target_ns, self._target_ns - quiet_ns)
        spare_ns = max(spare_ns, _beside(quiet_ns, self._min_share))
        least = max(int(self._min_share * _EFFICIENT_TOKENS), 1)
        return min(max(self._tokens_in(spare_ns), least), self._max_tokens)

    def note(self, *, num_decodes: int, num_tokens: int, elapsed_ns: int) -> None:
        """Learn from a step with `num_decodes` decodes that took `num_tokens` prompt tokens."""
        if num_tokens and num_decodes and self._prompt_ns and not self._quiet.is_known(num_decodes):
            # In a burst the number of decodes grows with each step, and none is without prompts.
            prompt_ns = num_tokens * self._prompt_ns / self._prompt_tokens
            self._quiet.note(num_decodes, max(elapsed_ns - prompt_ns, 1.0))
        elif num_tokens:
            quiet_ns = self._quiet.ns(num_decodes) if num_decodes else 0.0
            self._prompt_ns = _KEEP * self._prompt_ns + max(elapsed_ns - quiet_ns, 0.0)
            self._prompt_tokens = _KEEP * self._prompt_tokens + num_tokens
            self._quiet.note_mixed(num_decodes)
        elif num_decodes:
            self._quiet.note(num_decodes, elapsed_ns)

    def _tokens_in(self, time_ns: float) -> int:
        return int(time_ns * self._prompt_tokens / self._prompt_ns) if self._prompt_ns else 0


def _beside(quiet_ns: float, share: float) -> float:
    """Return the time that is `share` of a step whose rest takes `quiet_ns`."""
    return quiet_ns * share / (1 - share)


class _QuietSteps:
    """What steps without prompt tokens take, by the number of their decodes to the next power of two."""

    def __init__(self) -> None:
        self._times_ns: dict[int, float] = {}  # by the bit length of the number of decodes
        self._num_mixed: dict[int, int] = {}  # steps with prompt tokens since that was measured, likewise

    def ns(self, num_decodes: int) -> float:
        """Return the time of as many decodes, judged by the nearest number that has been measured; 0: none has."""
        size = num_decodes.bit_length()
        if not self._times_ns:
            return 0.0
        known = min(self._times_ns, key=lambda other: abs(other - size))
        # Between a step that only reads the weights and one whose time is that of its rows.
        return float(self._times_ns[known] * 2 ** ((size - known) / 2))

    def is_known(self, num_decodes: int) -> bool:
        """Whether as many decodes have been measured, or judged by what a step with prompt tokens has taken."""
        return num_decodes.bit_length() in self._times_ns

    def is_stale(self, num_decodes: int) -> bool:
        """Whether such a step should be measured again."""
        return self._num_mixed.get(num_decodes.bit_length(), 0) >= _REMEASURE_AFTER

    def note(self, num_decodes: int, elapsed_ns: float) -> None:
        """Learn from a step without prompt tokens."""
        size = num_decodes.bit_length()
        keep = _KEEP ** (1 + self._num_mixed.get(size, 0)) if size in self._times_ns else 0.0  # old figures count less
        self._times_ns[size] = keep * self._times_ns.get(size, 0.0) + (1 - keep) * elapsed_ns
        self._num_mixed[size] = 0

    def note_mixed(self, num_decodes: int) -> None:
        """Count a step with prompt tokens."""
        if num_decodes:
            size = num_decodes.bit_length()
            self._num_mixed[size] = self._num_mixed.get(size, 0) + 1
