"""Scrape a live server's /metrics into files, and come through its restarts."""

import http.client
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from specq import files
from specq.engines.metrics.text import parse
from specq.errors import SpecqError
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


def _unusable(text: str, url: str) -> str:
    """Why an answer holds no counters; empty where it does."""
    try:
        parse(text, url)
    except SpecqError as error:
        return str(error)
    return ""


def scrape(
    url: str,
    every: float,
    span: float,
    folder: Path,
    reporter: Reporter,
    *,
    get: Callable[[str], str] = fetch,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Path], int]:
    """Write a file per answer for `span` seconds, one `every` so many; returns the files that hold counters and how often
    none came. An answer without counters (of a proxy, or cut off) is kept beside them as NNNNN.unusable.

    Raises SpecqError for an address that is none, and when the server never answered with counters.
    """
    if not url.startswith(("http://", "https://")):
        raise SpecqError(f"--url takes an address like http://localhost:8000/metrics, not {url!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecqError(f"{folder} exists already; choose another --out for the scrapes")
    files.make_directory(folder)
    written, missed, why, start = [], 0, "", clock()
    with reporter.task("scraping", span) as done:
        shown, n = 0.0, 0
        while n <= int(span / every + 1e-9):
            wait = start + n * every - clock()
            if wait > 0:
                sleep(wait)
            try:
                text = get(url)
                why = _unusable(text, url)
                path = folder / f"{n:05d}.{'unusable' if why else 'prom'}"
                path.write_text(text, encoding="utf-8")
                written += [] if why else [path]
            except (
                OSError,
                ValueError,
                http.client.HTTPException,
            ) as error:  # a server that restarts refuses or breaks off
                why = str(getattr(error, "reason", error)) or type(error).__name__
            missed += bool(why)
            done(n * every - shown)
            shown = n * every
            n = max(n + 1, math.ceil((clock() - start) / every - 1e-9))  # what slow answers missed is not made up for
    if not written:
        raise SpecqError(f"{url} never answered with counters in {span:g} s: {why}")
    return written, missed
