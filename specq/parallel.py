"""A target split over processes by transformers' tensor parallel plan: one runs specq, the others keep their shares of it.

    torchrun --nproc-per-node 8 --no-python specq study --pair llama70b-1b --dtype fp8 --device cuda

Rank 0 reads, samples, decides, prints and writes, as if it were alone; the draft is its own and whole. Before it loads the
target, makes a cache for it or passes tokens through it, it tells the other ranks, which then do the same to their shares:
KV heads are shared out evenly, and logits come back whole. So nothing that is random, timed, or on a disk has to be equal
in several places. What a rank alone cannot go on from (memory that ran out in the middle of a pass) ends all of them.
"""

import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from specq.errors import SpecqError, first_line
from specq.kv.cache import LayerScales, QuantizedCache, QuantizedLayer

TIMEOUT = timedelta(days=7)  # rank 0 may think for hours between two passes; a dead rank is noticed by its connection
_share: "Share | None" = None


def share() -> "Share | None":
    """This process's part in a run under torchrun, None where it runs alone."""
    return _share


def run(program: Callable[[], None]) -> None:
    """Run `program` on rank 0 and serve it on the others; every process ends with the exit code of rank 0, or with 2."""
    global _share
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    _share = Share(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    code: Any = SpecqError.exit_code
    try:
        if _share.rank:
            code = _share.serve()
        else:
            program()
            code = 0
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    finally:
        _share.stop(code)
    if not code:
        dist.destroy_process_group()
    sys.exit(code)


@dataclass
class Share:
    """One process of `size`; on rank 0 its methods have the same done on the others first, which call it for that."""

    rank: int
    size: int
    local_size: int
    known: dict[int, Any] = field(default_factory=dict)  # on ranks above 0: what rank 0 knows by these numbers
    gone: list[int] = field(default_factory=list)  # on rank 0: what it has dropped since its last word
    last: int = 0
    broken: bool = False  # a pass ended here that the others may still be in: they hear no more words

    def __post_init__(self) -> None:
        # apart from the collectives of the models, so that a word of rank 0 never meets half a pass
        self.control = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def tell(self, command: str, *arguments: Any) -> None:  # noqa: ANN401
        """Rank 0: have `command` done by the others."""
        if self.rank:
            return
        gone = [self.gone.pop() for _ in range(len(self.gone))]
        try:
            dist.broadcast_object_list([(gone, command, arguments)], src=0, group=self.control)
        except RuntimeError as error:
            raise SpecqError(f"another process of this run has ended: {first_line(error)}") from error

    def number(self) -> int:
        """Rank 0: the next number to tell the others of something new."""
        self.last += 1
        return self.last

    def forget_with(self, thing: Any, number: int) -> None:  # noqa: ANN401
        """Rank 0: let the others drop what they know by `number` once `thing` is gone here."""
        if not self.rank:
            weakref.finalize(thing, self.gone.append, number).atexit = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do at the same time. One that ends early leaves the others in the middle, deaf to the next
        word: what ends them then is that this process does."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def serve(self) -> int:
        """Ranks above 0: do what rank 0 says until it stops; its exit code."""
        while True:
            box: list[Any] = [None]
            try:
                dist.broadcast_object_list(box, src=0, group=self.control)
            except RuntimeError:  # rank 0 is gone, and has said why
                return SpecqError.exit_code
            gone, command, arguments = box[0]
            for number in gone:
                self.known.pop(number, None)
            if command == "stop":
                return arguments[0]
            try:
                getattr(self, f"_{command}")(*arguments)
            except Exception as error:
                if isinstance(error, (SpecqError, MemoryError, RuntimeError)):
                    print(f"specq: process {self.rank}: {first_line(error)}", file=sys.stderr)
                else:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(SpecqError.exit_code)  # the others may wait for this one in a pass: no orderly end

    def stop(self, code: Any) -> None:  # noqa: ANN401
        """Rank 0: let the others end."""
        if self.broken:
            return
        try:
            self.tell("stop", code if isinstance(code, int) else int(bool(code)))
        except SpecqError:
            pass

    def agreed(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        """The result of `work`, done on every rank; SpecqError on all of them when it fails on one."""
        try:
            with self.together():
                result, failure = work(), None
        except SpecqError as error:
            result, failure, self.broken = None, error, False
        said: list[str | None] = [None] * self.size
        with self.together():
            dist.all_gather_object(said, None if failure is None else str(failure), group=self.control)
        if failure is not None:
            raise failure
        if other := next((s for s in said if s is not None), None):
            raise SpecqError(other)
        return result

    def load(self, make: Callable[..., Any], arguments: tuple) -> Any:  # noqa: ANN401
        """This rank's share of the model that `make` (`loading.load` or `load_random`) gives for `arguments`."""
        number = self.number()
        self.tell("load", number, make, arguments)
        model = self.agreed(lambda: make(*arguments, share=self))
        model.number = number
        self.forget_with(model, number)
        return model

    def _load(self, number: int, make: Callable[..., Any], arguments: tuple) -> None:
        try:
            self.known[number] = self.load(make, arguments)
        except SpecqError:  # rank 0 has raised it as well, and says it
            return
        self.known[number].number = number

    def new_cache(self, model: Any, arguments: tuple, layer: type[QuantizedLayer]) -> "SharedCache":  # noqa: ANN401
        """A cache for this rank's heads; `arguments` are QuantizedCache's, with the scales of all heads."""
        fmt, scales, *rest = arguments
        number = self.number()
        self.tell("new_cache", number, model.number, arguments, layer)
        cache = SharedCache(self, number, fmt, [self.mine(s) for s in scales], *rest, layer)
        self.forget_with(cache, number)
        return cache

    def _new_cache(self, number: int, model: int, arguments: tuple, layer: type[QuantizedLayer]) -> None:
        self.known[number] = self.new_cache(self.known[model], arguments, layer)

    def mine(self, scales: LayerScales) -> LayerScales:
        """Static scales of this rank's heads; one for all heads is every rank's."""
        heads = (x if x.shape[1] == 1 else x.chunk(self.size, dim=1)[self.rank] for x in (scales.k, scales.v, scales.q))
        return LayerScales(*heads, scales.source)

    @contextmanager
    def one_pass(self, model: Any, cache: "SharedCache", *arguments: Any) -> Iterator[None]:  # noqa: ANN401
        """Around this rank's part of a pass; `arguments` are those of LoadedModel.forward behind the cache.

        A pass that fails on one rank leaves the others waiting, so it cannot be tried again: raises SpecqError.
        """
        self.tell("forward", model.number, cache.number, cache.lengths, arguments)
        try:
            with self.together():
                yield
        except (MemoryError, RuntimeError) as error:
            raise SpecqError(
                f"a pass over {self.size} processes failed: {first_line(error)}; where memory ran out, give more processes or"
                " shorter prompts (--resume keeps what is done)"
            ) from error

    def _forward(self, model: int, cache: int, lengths: torch.Tensor, arguments: tuple) -> None:
        tokens, *rest = arguments
        self.known[cache].rows.set(lengths)  # rank 0 may have rolled back since
        self.known[model].forward(tokens, self.known[cache], *rest)

    def _on_cache(self, cache: int, method: str, *arguments: Any) -> None:  # noqa: ANN401
        getattr(self.known[cache], method)(*arguments)

    def _range(self, cache: int, lengths: torch.Tensor) -> None:
        from specq.kv.calibration import KVRange

        self.known[cache].rows.set(lengths)
        KVRange.of(self.known[cache])


class SharedCache(QuantizedCache):
    """This rank's heads of a cache; sizes, counts and ranges are those of the whole."""

    def __init__(self, share: Share, number: int, *arguments: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments)
        self.share, self.number = share, number

    def select(self, rows: torch.Tensor) -> None:
        """See QuantizedCache."""
        self.share.tell("on_cache", self.number, "select", rows)
        super().select(rows)

    @property
    def nbytes(self) -> int:
        """See QuantizedCache; every rank holds as many heads."""
        return self.share.size * super().nbytes

    @property
    def bytes_per_token(self) -> float:
        """See QuantizedCache."""
        return self.share.size * super().bytes_per_token

    def saturated_per_layer(self) -> list[int]:
        """See QuantizedCache."""
        self.share.tell("on_cache", self.number, "saturated_per_layer")
        return self._summed(super().saturated_per_layer())

    def nonfinite(self) -> int:
        """See QuantizedCache."""
        self.share.tell("on_cache", self.number, "nonfinite")
        return self._summed([super().nonfinite()])[0]

    def whole(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """See QuantizedCache."""
        self.share.tell("range", self.number, self.lengths)
        found: list[Any] = [None] * self.share.size
        with self.share.together():
            dist.all_gather_object(found, [x.cpu() for x in parts], group=self.share.control)
        return [torch.cat(heads, dim=1) for heads in zip(*found, strict=True)]

    def _summed(self, counts: list[int]) -> list[int]:
        total = torch.tensor(counts)
        with self.share.together():
            dist.all_reduce(total, group=self.share.control)
        return total.tolist()
