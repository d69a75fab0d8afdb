"""`json.loads` and `json.dumps` for what a process without the daemon does for each pod.

Importing `json` takes longer than all that such a process reads and writes: it compiles regular
expressions. This module uses the same parts in C. Whatever they do not accept goes to `json`, so
results and errors are the same.
"""

from __future__ import annotations

from .record import TYPE_CHECKING

__all__ = ["dumps", "loads"]

if TYPE_CHECKING:
    from json import dumps, loads
else:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _BLANKS = " \t\n\r"
    # How UTF-16, UTF-32 or a byte order mark begin.
    _OTHER_ENCODINGS = (b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")

    class _Context:
        """What the scanner reads its settings from."""

        strict = True
        object_hook = None
        parse_float = float
        parse_int = int
        parse_constant = {
            "-Infinity": -float("inf"),
            "Infinity": float("inf"),
            "NaN": float("nan"),
        }.__getitem__

        def __init__(self, object_pairs_hook):
            self.object_pairs_hook = object_pairs_hook

    def loads(text, *, object_pairs_hook=None):
        try:
            body = text if isinstance(text, str) else _decoded(text)
            body = body.strip(_BLANKS)
            value, end = make_scanner(_Context(object_pairs_hook))(body, 0)
            if end == len(body):
                return value
        except (StopIteration, ValueError, SystemError):  # the last if json is not imported
            pass
        import json

        return json.loads(text, object_pairs_hook=object_pairs_hook)

    def _decoded(text):
        if text.startswith(_OTHER_ENCODINGS) or text[1:2] == b"\0":
            raise ValueError
        return text.decode("utf-8", "surrogatepass")

    def dumps(value, *, separators=(", ", ": "), sort_keys=False, default=None):
        item, key = separators
        other = default or _refuse
        encoder = make_encoder(
            {}, other, encode_basestring_ascii, None, key, item, sort_keys, False, True
        )
        try:
            return "".join(encoder(value, 0))
        except (TypeError, ValueError):
            import json

            return json.dumps(value, separators=separators, sort_keys=sort_keys, default=default)

    def _refuse(_value):
        raise TypeError
