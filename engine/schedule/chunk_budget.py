"""How many prompt tokens a step may take without keeping those who decode waiting. Pure Python; learns from every step.

A step is taken to cost what its decodes cost, plus a fixed time for each prompt token: measured on CPUs, that time is
flat from 32 to 512 tokens, so the size of a chunk trades nothing but the gap between the others' tokens.
"""

_KEEP = 0.8  # of the past, in the averages
_STRETCH = 1.8  # how long a step with prompt tokens may be, in steps without any; the worst of them comes out at 2
_MIN_TOKENS = 16  # so that no prompt starves
_REMEASURE_AFTER = 32  # steps; then one takes no prompt tokens, or a growing number of decodes would go unseen


class ChunkBudget:
    """Sizes the prompt share of each step from what the steps before have cost."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._decode_ns = 0.0  # of a step without prompt tokens; 0: not known yet
        self._prompt_ns = 0.0  # what the prompt tokens of the last steps have cost, fading
        self._prompt_tokens = 0.0  # and how many they were, fading alike
        self._num_mixed = 0  # steps since `_decode_ns` was measured

    def tokens(self, *, has_decodes: bool) -> int:
        """Return how many prompt tokens the next step may take."""
        if not has_decodes:
            return self._max_tokens
        if self._num_mixed >= _REMEASURE_AFTER:
            return 0
        if not self._decode_ns or not self._prompt_ns:
            return min(_MIN_TOKENS, self._max_tokens)
        spare_ns = (_STRETCH - 1) * self._decode_ns
        return min(max(int(spare_ns * self._prompt_tokens / self._prompt_ns), _MIN_TOKENS), self._max_tokens)

    def note(self, *, has_decodes: bool, num_tokens: int, elapsed_ns: int) -> None:
        """Learn from a step that took `num_tokens` prompt tokens."""
        if num_tokens:
            decode_ns = self._decode_ns if has_decodes else 0.0
            self._prompt_ns = _KEEP * self._prompt_ns + max(elapsed_ns - decode_ns, 0.0)
            self._prompt_tokens = _KEEP * self._prompt_tokens + num_tokens
            self._num_mixed += has_decodes
        elif has_decodes:
            keep = _KEEP ** (1 + self._num_mixed) if self._decode_ns else 0.0  # an old figure counts the less
            self._decode_ns = keep * self._decode_ns + (1 - keep) * elapsed_ns
            self._num_mixed = 0
