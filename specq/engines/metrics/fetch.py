"""One answer over HTTP, within a time and a size whatever the server does; no message shows a password of the address."""

import base64
import http.client
import queue
import threading
import time
import urllib.request
import zlib
from urllib.parse import unquote, urlsplit, urlunsplit

from specq.errors import SpecqError

LIMIT = 5.0  # seconds for a whole answer
LARGEST = 1 << 26  # bytes; a page of metrics has 1 MB at most
AUTO = 47  # zlib's window bits for gzip and zlib alike


def shown(url: str) -> str:
    """An http(s) address without its user and password. Raises SpecqError, which does not print them, where it is none."""
    told = "" if "@" in url else f", not {url!r}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        usable = False
    if not usable or "@" in url.replace(parts.netloc, "", 1):
        hint = "; in a password / is %2F, ? is %3F and # is %23" if "@" in url else ""
        raise SpecqError(f"--url takes an address like http://localhost:8000/metrics{told}{hint}")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def request_of(url: str) -> urllib.request.Request:
    """The request of an address; user and password in it become basic authentication, which no redirect passes on."""
    made, user = urllib.request.Request(shown(url)), urlsplit(url).netloc.rpartition("@")[0]
    if user:
        made.add_unredirected_header("Authorization", "Basic " + base64.b64encode(unquote(user).encode()).decode())
    return made


def fetch(url: str, limit: float = LIMIT) -> bytes:
    """What is behind an http(s) address, decompressed. Raises OSError or HTTPException where no whole answer comes in time.

    Timeouts of a socket are per read, and none bounds the look-up of a name: a thread reads, and is left alone when late.
    """
    box: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()

    def put() -> None:
        try:
            box.put(_read(url, limit))
        except Exception as error:
            box.put(error)

    threading.Thread(target=put, daemon=True).start()
    try:
        made = box.get(timeout=limit)
    except queue.Empty:
        made = TimeoutError()
    if isinstance(made, TimeoutError):  # of the whole, of one read, or seen by the thread first
        raise TimeoutError(f"no whole answer within {limit:g} s")
    if isinstance(made, Exception):
        raise made
    return made


def _read(url: str, limit: float) -> bytes:
    end = time.monotonic() + limit
    with urllib.request.urlopen(request_of(url), timeout=limit) as answer:
        wanted, parts, size = answer.length, [], 0
        while chunk := answer.read1(1 << 16):
            parts.append(chunk)
            size += len(chunk)
            if size > LARGEST:
                raise OSError(f"an answer of more than {LARGEST >> 20} MiB")
            if time.monotonic() > end:
                raise TimeoutError
        body, packed = b"".join(parts), answer.headers.get("Content-Encoding", "identity") != "identity"
    if wanted is not None and size < wanted:
        raise http.client.IncompleteRead(body, wanted - size)
    return _unpacked(body) if packed else body


def _unpacked(body: bytes) -> bytes:
    unpack = zlib.decompressobj(AUTO)
    try:
        text = unpack.decompress(body, LARGEST)
    except zlib.error:
        return body  # in another encoding, though none was asked for: no text, as the reader will find
    if not unpack.eof:
        raise http.client.IncompleteRead(text)
    return text
