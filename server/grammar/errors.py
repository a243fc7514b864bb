"""What llguidance says of a grammar that it refuses, in the words of those who wrote it: what is wrong, and what to do.

Knows the library's messages (1.9), not its calls. What is not in the table is told as the library tells it.
"""

import re

_MAX_CHARS = 400
_TOO_COMPLEX = (
    "it is too complex: use shorter repetitions, fewer alternatives, at most 1,000 optional properties in an object"
)
_SYNTAX = "must be in the syntax of Rust's regex, without look-around and backreferences"
_KINDS = {
    "positive integer": "an integer of at least 0", "f64": "a number", "string": "a string", "object": "an object",
}  # fmt: skip

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_REGEX_ALONE = re.compile(r"\n +1 \| start: /.*/\n +\^\n$")
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # of the grammar, with a mark
_BAD_REGEX = re.compile(r"regex parse error:\n    (?P<line>.*)\n(?P<mark> *)\^+\nerror: (?P<reason>.*)")
_OTHER_BAD_REGEX = re.compile(r"regex parse error:.*error: (?P<reason>[^\n]*)", re.DOTALL)  # of several lines
_ANCHOR = re.compile(r"lookarounds not supported yet")
_EXPECTED = re.compile(r"Expected (.*) for '(\w+)'(?: item)?, got (.*)")
_TABLE = tuple(
    (re.compile(pattern, re.DOTALL), told)
    for pattern, told in (
        (r"NoExtension.*", "no text is in this form, or none that ends: take out the part that admits nothing"),
        (r"Token range end too large: (\d+)", r"the model has no token \1: write text in quotes"),
        (r".*(?:[Tt]oo many |too big|too large|too complex|fuel|Current row has \d+ items).*", _TOO_COMPLEX),
        (r"failed to compile JSON schema: (.*)", r"\1"),
        (
            r"Invalid type: (.*)",
            r"the schema has the type \1: must be null, boolean, integer, number, string, array or object",
        ),
        (r"Unimplemented keys: \[(.*)\]", r"the schema has \1: not supported, leave that out"),
        (
            r"Unsatisfiable schema: Regex is empty: .*",
            "the schema has a pattern, format, enum or length that exclude each other: relax one of them",
        ),
        (r"Unsatisfiable schema: (.*)", r"nothing satisfies the schema, relax it: \1"),
        (
            r"Failed to generate regex for (?:integer|float) range: .*",
            "the schema has a minimum and a maximum that no number lies between, or beyond 1e15: change them",
        ),
        (
            r"patternProperty regexes (/.*/) and (/.*/) are not disjoint",
            r"the schema has the patternProperties \1 and \2, which may match one name: make them exclude each other",
        ),
        (r"invalid multiple of", "the schema has a multipleOf that is not above 0: make it so"),
        (
            r"oneOf constraints are not supported.*",
            "the schema has a oneOf whose alternatives may overlap: make them differ by a const, or use anyOf",
        ),
        (
            r"Resource '(?:json-schema:///)?(.*?)' is not present.*",
            r"the schema refers to \1, which is not in it: write it out under $defs",
        ),
        (r"Pointer '(.*)' does not exist", r"the schema refers to #\1, which it does not have: define it"),
        (r"Unknown format: (.*)", r"the schema has the format \1: not supported, leave it out or use a pattern"),
        (r"schema must be an object or boolean", "a schema inside the schema is neither object nor boolean: must be"),
        (r"[Ee]mpty grammar.*", "it is empty: name a rule start"),
        (r"no start rule found", "there is no rule start, with which a Lark grammar begins: name one so"),
        (r"lexer error", "this is no Lark: look at quotes and slashes that are not closed"),
        (r"unknown name: (.*)", r"there is no rule or terminal \1: define it"),
        (r"unknown grammar (.*)", r"there is no grammar \1: name rules of this one"),
        (r'unknown special token: (".*?");.*', r"the model has no special token \1: write text in quotes"),
        (r"Unknown common regex: (\S+);.*", r"\1 is nothing that can be imported: write it out"),
        (r"invalid digit found in string", "there is no number in <[ ]>: must be a token id"),
        (
            r"Failed to convert the grammar from GBNF to Lark: No 'root' rule found",
            "there is no rule root, with which a GBNF grammar begins: name one so",
        ),
        (
            r"Failed to convert the grammar from GBNF to Lark: (string index out of range|list index.*|pop from.*)",
            "the GBNF grammar ends in the middle of a rule: complete it",
        ),
        (
            r"Failed to convert the grammar from GBNF to Lark: maximum recursion depth.*",
            "the GBNF grammar nests too deep: use rules in place of parentheses",
        ),
        (r"Failed to convert the grammar from GBNF to Lark: (.*)", r"the GBNF grammar is wrong: \1"),
    )
)  # fmt: skip


def explain(error: str) -> str:
    """Return what is wrong with a grammar, on one line, from the library's message."""
    error = error.removesuffix("\n<non-verbose/>")
    place = _PLACE.match(error)
    where = f"line {place[1]}, column {place[2]}: " if place and not _is_generated(error) else ""
    rest = _EXCERPT.sub("", error[place.end() :] if place else error)
    return " ".join(f"{where}{_told(rest)}".split())[:_MAX_CHARS]


def _is_generated(error: str) -> bool:
    """Whether the excerpt is of a grammar that nobody wrote: made from a regex alone, or from GBNF."""
    return bool(_REGEX_ALONE.search(error)) or "| %llguidance {}" in error


def _told(error: str) -> str:
    if (found := _BAD_REGEX.search(error)) is not None:
        near = found["line"][len(found["mark"]) - 4 :][:20]
        where = f"at {near!r}" if near else "at its end"
        return f"the regular expression is wrong {where}, {found['reason']}: {_SYNTAX}"
    if (found := _OTHER_BAD_REGEX.search(error)) is not None:
        return f"the regular expression is wrong, {found['reason']}: {_SYNTAX}"
    if _ANCHOR.search(error):
        return (
            r"the regular expression has \b, or ^ or $ inside: not supported, leave them out, all of the output matches"
        )
    if (found := _EXPECTED.fullmatch(error)) is not None:
        return f"the schema has {found[2]} {found[3]}: must be {_KINDS.get(found[1], found[1])}"
    for pattern, told in _TABLE:
        if (found := pattern.fullmatch(error)) is not None:
            return _told(found.expand(told)) if told == r"\1" else found.expand(told)
    return error
