"""The one exception that users see: a sentence about what is wrong and what is accepted, and exit code 2."""


class SpecqError(Exception):
    """Bad input or an impossible request; the message is shown as is, without a traceback."""
