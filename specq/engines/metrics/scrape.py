"""Scrape a live server's /metrics into files, and come through its restarts."""

import http.client
import math
import re
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from specq import files
from specq.engines.metrics.difference import difference
from specq.engines.metrics.fetch import fetch, shown
from specq.engines.metrics.text import Counters, Engine, NotThere, parse
from specq.errors import Interrupted, SpecqError
from specq.progress import Reporter

TRANSIENT = (408, 425, 429)  # of the HTTP statuses 4xx, those that ask to try again
HINT = (
    "vLLM's counters are at http://HOST:8000/metrics, llama.cpp's at http://HOST:8080/metrics where it was started with"
    " --metrics; http://USER:PASSWORD@HOST/... logs in"
)
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, option: str) -> float:
    """10s, 5m, 1h or plain seconds. Raises SpecqError for anything else and for 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    value = float(found[1]) * UNITS[found[2] or "s"] if found else 0.0
    if value <= 0:
        raise SpecqError(f"{option} takes a time like 10s, 5m or 1h, not {text!r}")
    return value


def scrape(
    url: str,
    every: float,
    span: float,
    folder: Path,
    reporter: Reporter,
    *,
    check: Callable[[Iterable[Engine]], object] = lambda engines: None,
    get: Callable[[str], bytes] = fetch,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Path], list[str]]:
    """Write a file per answer for `span` seconds, one `every` so many; returns the files that hold counters, and for every
    other scrape why it has none. An answer without counters (of a proxy, or cut off), or with counters that contradict
    themselves or the last ones, is kept beside them as NNNNN.unusable, and costs only itself.

    Until the first counters came, an answer that waiting does not mend (a 404, a web page, a server that does not speculate)
    ends it at once. `check` sees the engines of the first counters and may refuse them by raising SpecqError. Raises SpecqError
    for these, for an address that is none, and when the server never answered with counters. Every error of a scrape under way,
    and Ctrl-C, name the folder where something is kept; without a file none is left.
    """
    address = shown(url)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecqError(f"{folder} exists already; choose another --out for the scrapes")
    with _keeping(folder):
        files.make_directory(folder)
        written, missed, last, start = [], [], {}, clock()
        with reporter.task("scraping", span) as done:
            at, n = 0.0, 0
            while n <= int(span / every + 1e-9):
                wait = start + n * every - clock()
                if wait > 0:
                    sleep(wait)
                body, found = b"", {}
                try:
                    body = _answer(url, get)
                    found = _counters(body, f"scrape {n:05d}", last)
                except NotThere as error:
                    if not written:
                        raise SpecqError(f"{address}: {error}; {HINT}") from error
                    missed.append(str(error))
                except SpecqError as error:
                    missed.append(str(error))
                if found and not written:
                    check(found)
                if body:
                    path = folder / f"{n:05d}.{'prom' if found else 'unusable'}"
                    path.write_bytes(body)
                    written += [path] if found else []
                last |= found
                done(n * every - at)
                at = n * every
                # what slow answers missed is not made up for
                n = max(n + 1, math.ceil((clock() - start) / every - 1e-9))
        if not written:
            raise SpecqError(f"{address} never answered with counters in {span:g} s: {missed[-1]}")
    return written, missed


def _answer(url: str, get: Callable[[str], bytes]) -> bytes:
    """What the server answers. Raises SpecqError with the reason where nothing came, NotThere where nothing will."""
    try:
        return get(url)
    except urllib.error.HTTPError as error:
        final = error.code == 501 or (400 <= error.code < 500 and error.code not in TRANSIENT)
        raise (NotThere if final else SpecqError)(f"HTTP status {error.code} ({error.reason})") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # a server that restarts refuses or breaks off
        raise SpecqError(str(getattr(error, "reason", error)) or type(error).__name__) from error


def _counters(body: bytes, name: str, last: Mapping[Engine, Counters]) -> dict[Engine, Counters]:
    """Counters of an answer that agree with themselves and the `last` ones. Raises SpecqError, NotThere as `_answer`."""
    try:
        found = parse(body.decode("utf-8"), name)
    except UnicodeDecodeError as error:
        raise NotThere(f"{name} is not UTF-8 text (byte {error.start})") from None
    difference(([("the last good one", last)] if last else []) + [(name, found)])
    return found


@contextmanager
def _keeping(folder: Path) -> Iterator[None]:
    """Say on every way out but the planned one what is kept, and leave no empty folder."""
    try:
        yield
    except (SpecqError, OSError, KeyboardInterrupt) as error:
        kept = len(list(folder.glob("*.prom"))), len(list(folder.glob("*.unusable")))
        told = f"; {kept[0]} scrapes and {kept[1]} unusable answers are kept in {folder}" if any(kept) else ""
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"interrupted{told}") from None
        if isinstance(error, OSError):
            raise SpecqError(f"cannot write to {folder}: {error.strerror or error}{told}") from error
        raise SpecqError(f"{error}{told}") from error
    finally:
        with suppress(OSError):
            folder.rmdir()  # only where it is empty
