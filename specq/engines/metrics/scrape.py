"""Scrape a live server's /metrics into files, and come through its restarts."""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

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
    """Write a file per answer for `span` seconds, one `every` so many; returns the files and how often nothing came.

    Raises SpecqError for an address that is none, and when the server never answered.
    """
    if not url.startswith(("http://", "https://")):
        raise SpecqError(f"--url takes an address like http://localhost:8000/metrics, not {url!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecqError(f"{folder} exists already; choose another --out for the scrapes")
    folder.mkdir(parents=True, exist_ok=True)
    written, missed, why, start = [], 0, "", clock()
    with reporter.task("scraping", span) as done:
        shown = 0.0
        for n in range(int(span / every + 1e-9) + 1):
            wait = start + n * every - clock()
            if wait > 0:
                sleep(wait)
            try:
                text = get(url)
            except (OSError, ValueError) as error:  # a server that restarts refuses connections or answers half
                missed, why = missed + 1, str(getattr(error, "reason", error))
            else:
                path = folder / f"{n:05d}.prom"
                path.write_text(text, encoding="utf-8")
                written.append(path)
            done(n * every - shown)
            shown = n * every
    if not written:
        raise SpecqError(f"{url} never answered in {span:.0f} s ({why})")
    return written, missed
