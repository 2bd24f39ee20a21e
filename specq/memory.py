"""What to do when memory runs out: take fewer things at once, and say so."""

from collections.abc import Callable
from typing import TypeVar

from specq.errors import SpecqError
from specq.progress import Reporter

T = TypeVar("T")


class OutOfMemory(SpecqError):
    """Nothing is left to halve."""


class Fits:
    """A size that is halved, down to `least`, when memory runs out, and then stays so. One may run inside another."""

    def __init__(self, size: int, what: str, reporter: Reporter, least: int = 1) -> None:
        self.size, self.what, self.reporter, self.least = size, what, reporter, least
        self.notes: list[str] = []

    def run(self, work: Callable[[int], T]) -> T:
        """`work(size)`, again with half the size as often as memory runs out. Raises OutOfMemory at the least."""
        while True:
            result = _unless_out_of_memory(work, self.size)
            if result is not None:
                return result[0]
            if self.size <= self.least:
                many = "a single one" if self.size == 1 else f"{self.size:,}"
                raise OutOfMemory(
                    f"out of memory with {many} of the {self.what}; give shorter --prompt-tokens or --output-tokens, or use a"
                    " machine with more memory"
                )
            self.size = (self.size + 1) // 2
            self.notes.append(f"out of memory: {self.what} are taken {self.size} at a time from here on")
            self.reporter.note(self.notes[-1])


def _unless_out_of_memory(work: Callable[[int], T], size: int) -> tuple[T] | None:
    """(result,), or None when memory ran out; by then the failed attempt's tensors are free."""
    try:
        return (work(size),)
    except (MemoryError, RuntimeError, OutOfMemory) as error:
        if not is_out_of_memory(error):
            raise
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the CPU."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    # the CPU's allocator; CUDA's own calls and Triton's; cuBLAS, which wants a workspace of its own
    said = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)
