"""Text as a JSON string on one line, whatever a client takes for the end of a line."""

import msgspec

_encode = msgspec.json.encode
# JSON may hold these raw, but they end lines for clients that split with str.splitlines.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_string(text: str) -> bytes:
    """Return a text as a JSON string, quotes included."""
    data = _encode(text)
    return data if text.isascii() else one_line(data)


def one_line(data: bytes) -> bytes:
    """Escape what ends a line in JSON that is encoded already."""
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data
