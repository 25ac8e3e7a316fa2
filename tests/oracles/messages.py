"""What every error message has: one line, plain words, and a next step."""

import re

_STEP = re.compile(
    r"expected |did you mean|[Rr]un `|[Cc]heck |correct|omit|"
    r"(?<!forward )\b(?:add|make|pass|name|choose|build) |"
    r"\b(?:raise|remove|restore) |that works is "
)
_INTERNAL = re.compile(
    r"NoneType|Traceback|0x[0-9a-f]{6}|\ba (?:int|Adam|OrderedDict)\b|<class |torch\._|\bs\d+\b"
)


def judged(message):
    """Return a message after it was judged."""
    assert message and "\n" not in message and message.isprintable(), message
    assert len(message) <= 480, message
    assert _STEP.search(message), message
    assert not _INTERNAL.search(message), message
    return message
