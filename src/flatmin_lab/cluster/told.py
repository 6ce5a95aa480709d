"""What Ray says of a worker that is gone, in a few words: its messages are long, coloured and full of its own names."""

import re

LONGEST = 300  # letters
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def told(error: Exception) -> str:
    """What happened.

    >>> told(RuntimeError("The actor died. Worker exit detail: Worker exits with code 1. Some common causes ..."))
    'its process ended (Worker exits with code 1)'
    """
    if type(error).__name__ == "ActorUnavailableError":
        return "the connection to it broke"
    if (cause := getattr(error, "cause", None)) is not None:  # an error in what it did
        return f"{type(cause).__name__}: {cause}"[:LONGEST]
    text = COLOURS.sub("", str(error)).strip()
    detail = re.search(r"exit detail: ([^.\n]+)", text)
    first = text.partition("\n")[0][:LONGEST] or type(error).__name__
    return f"its process ended ({detail[1] if detail else first})"
