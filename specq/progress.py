"""Progress on standard error: a bar with time left for people, silence with --quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specq.terminal import Terminal


class Reporter:
    """Hands out progress bars and prints notes; with `quiet` it does neither."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Terminal(stderr=True, quiet=quiet)

    def note(self, text: str) -> None:
        """One line for the person who waits."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, what: str, total: float) -> Iterator[Callable[[float], None]]:
        """A bar for `total` units of work; yields a function that reports units done."""
        columns = (
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, disable=self.quiet) as bar:
            task = bar.add_task(escape(what), total=total)
            yield lambda done: bar.advance(task, done)
            bar.update(task, completed=total)  # texts that end early leave work undone
