"""How much a grammar may ask of llguidance: both processes' limits, so that what the server lets through the engine
can follow. Plain numbers: `LLParserLimits(**GRAMMAR_LIMITS)`.
"""

from typing import TypedDict


class GrammarLimits(TypedDict):
    """LLParserLimits' arguments."""

    max_lexer_states: int
    max_items_in_row: int
    verbose_errors: bool


GRAMMAR_LIMITS: GrammarLimits = {
    # A lexer state takes 1 to 2 kB: the default, 250,000 of them, would be half a gigabyte for one hostile grammar.
    "max_lexer_states": 20_000,
    # An object takes four for each of its optional properties: 1,000 of them, with masks of 5 ms where any may come.
    "max_items_in_row": 4_100,
    "verbose_errors": False,
}
