"""Scrape a live server's /metrics into files, and come through its restarts."""

import http.client
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specq import files
from specq.engines.metrics.text import Engine, parse
from specq.errors import Interrupted, SpecqError
from specq.progress import Reporter

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, option: str) -> float:
    """10s, 5m, 1h or plain seconds. Raises SpecqError for anything else and for 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    value = float(found[1]) * UNITS[found[2] or "s"] if found else 0.0
    if value <= 0:
        raise SpecqError(f"{option} takes a time like 10s, 5m or 1h, not {text!r}")
    return value


def fetch(url: str, timeout: float = 5.0) -> str:
    """The text behind an http(s) address. Raises OSError when the server does not answer."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode("utf-8", errors="replace")


def scrape(
    url: str,
    every: float,
    span: float,
    folder: Path,
    reporter: Reporter,
    *,
    check: Callable[[Iterable[Engine]], object] = lambda engines: None,
    get: Callable[[str], str] = fetch,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Path], int]:
    """Write a file per answer for `span` seconds, one `every` so many; returns the files that hold counters and how often
    none came. An answer without counters (of a proxy, or cut off) is kept beside them as NNNNN.unusable.

    `check` sees the engines of the first answer with counters and may refuse them by raising SpecqError, before time is
    spent on more. Raises SpecqError for an address that is none, and when the server never answered with counters. Every
    error of a scrape under way, and Ctrl-C, name the folder where something is kept; without a file none is left.
    """
    if not url.startswith(("http://", "https://")):
        raise SpecqError(f"--url takes an address like http://localhost:8000/metrics, not {url!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecqError(f"{folder} exists already; choose another --out for the scrapes")
    with _keeping(folder):
        files.make_directory(folder)
        written, missed, why, start = [], 0, "", clock()
        with reporter.task("scraping", span) as done:
            shown, n = 0.0, 0
            while n <= int(span / every + 1e-9):
                wait = start + n * every - clock()
                if wait > 0:
                    sleep(wait)
                text, why = _answer(url, get)
                if text is not None:
                    engines, why = _engines(text, url)
                    if engines and not written:
                        check(engines)
                    path = folder / f"{n:05d}.{'prom' if engines else 'unusable'}"
                    path.write_text(text, encoding="utf-8")
                    written += [path] if engines else []
                missed += bool(why)
                done(n * every - shown)
                shown = n * every
                # what slow answers missed is not made up for
                n = max(n + 1, math.ceil((clock() - start) / every - 1e-9))
        if not written:
            raise SpecqError(f"{url} never answered with counters in {span:g} s: {why}")
    return written, missed


def _answer(url: str, get: Callable[[str], str]) -> tuple[str | None, str]:
    """(what the server answers, "") or (None, why nothing came)."""
    try:
        return get(url), ""
    except (OSError, ValueError, http.client.HTTPException) as error:  # a server that restarts refuses or breaks off
        return None, str(getattr(error, "reason", error)) or type(error).__name__


def _engines(text: str, url: str) -> tuple[list[Engine], str]:
    """(engines with counters in an answer, "") or ([], why it holds none)."""
    try:
        return list(parse(text, url)), ""
    except SpecqError as error:
        return [], str(error)


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
