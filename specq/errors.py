"""The exceptions that users see: a sentence about what is wrong and what is accepted, and an exit code."""


class SpecqError(Exception):
    """Bad input or an impossible request; the message is shown as is, without a traceback."""

    exit_code = 2


class Interrupted(SpecqError):
    """Ctrl-C in the middle of work; the message says what is kept."""

    exit_code = 130


def printable(text: str) -> str:
    """`text` with control characters written as escapes, so that names from files cannot steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """The first line of a library's message (the first two where one ends with a colon), or the exception's kind if none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, KeyError):
        return f"{lines[0]} is missing or unknown"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
