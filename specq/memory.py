"""What to do when memory runs out: take fewer things at once, and say so."""

from collections.abc import Callable
from typing import TypeVar

from specq.errors import SpecqError
from specq.progress import Reporter

T = TypeVar("T")


class Fits:
    """A batch size that is halved when memory runs out and then stays so."""

    def __init__(self, size: int, what: str, reporter: Reporter) -> None:
        self.size, self.what, self.reporter = size, what, reporter
        self.notes: list[str] = []

    def run(self, work: Callable[[int], T]) -> T:
        """`work(size)`, again with half the size as often as memory runs out. Raises SpecqError when 1 does not fit."""
        while True:
            result = _unless_out_of_memory(work, self.size)
            if result is not None:
                return result[0]
            if self.size == 1:
                raise SpecqError(
                    f"out of memory with a single one of the {self.what}; give shorter --prompt-tokens or --output-tokens, or"
                    " use a machine with more memory"
                )
            self.size = (self.size + 1) // 2
            self.notes.append(f"out of memory: {self.what} are taken {self.size} at a time from here on")
            self.reporter.note(self.notes[-1])


def _unless_out_of_memory(work: Callable[[int], T], size: int) -> tuple[T] | None:
    """(result,), or None when memory ran out; by then the failed attempt's tensors are free."""
    try:
        return (work(size),)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the CPU."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
