"""What commands print for people. Text of files (names of models, groups and paths) cannot steer the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from specq.errors import printable


class Terminal(Console):
    """A rich console that writes control characters of the text it is given as escapes; its own colours stay."""

    def __init__(self, **how: Any) -> None:  # noqa: ANN401 - rich's own options
        super().__init__(highlight=False, **how)

    def render(self, *args: Any, **how: Any) -> Iterable[Segment]:  # noqa: ANN401
        """Rich's segments, their text made printable; a segment with `control` is rich's own, such as moving the cursor."""
        for segment in super().render(*args, **how):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
