"""Text of models on its way to a terminal."""

import re
from typing import TextIO

# Control characters but newline and tab, marks that turn the direction of what follows, halves of characters.
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def for_stream(text: str, stream: TextIO) -> str:
    """`text` as `stream` can take it: on a terminal with harmful characters as escapes (\\x1b), elsewhere as it is.

    A character that the stream's encoding lacks becomes an escape too.
    """
    if stream.isatty():
        text = HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
