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
    """The first line of a library's message, or the kind of the exception where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
