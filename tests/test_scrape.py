"""Scraping a live server: restarts, useless and slow answers, what an error or Ctrl-C leaves, and when a model is refused."""

import base64
import contextlib
import gzip
import http.client
import http.server
import json
import threading
import time
import urllib.error
from functools import partial
from pathlib import Path

import pytest
from test_import_metrics import page
from typer.testing import CliRunner

from specq.cli import app
from specq.engines.metrics import command
from specq.engines.metrics.command import read
from specq.engines.metrics.fetch import fetch
from specq.engines.metrics.scrape import scrape, seconds
from specq.errors import Interrupted, SpecqError
from specq.progress import Reporter


def scraped(answers, folder, *, took=0.0):
    """`scrape` every 10 s for 40 s on a clock of its own; an answer takes `took` seconds and may be an exception."""
    left, now = list(answers), [0.0]

    def get(url):
        now[0] += took
        answer = left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, bytes) else answer.encode()

    paths, missed = scrape(
        "http://x/metrics", 10, 40, folder, Reporter(quiet=True), get=get, clock=lambda: now[0],
        sleep=lambda s: now.__setitem__(0, now[0] + s),
    )  # fmt: skip
    return paths, missed, now[0]


def status(code):
    return urllib.error.HTTPError("http://x/metrics", code, http.client.responses[code], {}, None)


def test_scraping_survives_a_restart(tmp_path):
    """A server that vanishes for one scrape and comes back at zero still gives one answer, with both facts told."""
    answers = [page(100, 300, 150), page(200, 600, 300), OSError("refused"), page(30, 90, 40), page(80, 240, 110)]
    paths, missed, now = scraped(answers, tmp_path / "s")
    assert (len(paths), missed, now) == (4, ["refused"], 40.0)
    reading = read(paths)
    assert reading.total.drafts == 100 + 30 + 50
    assert any("counter reset" in n for n in reading.notes)


@pytest.mark.parametrize(
    "answer",
    ["<html>Bad gateway</html>", "", page(200, 600, 300)[:300], 'vllm:num_requests_running{engine="0"} 0\n',
     http.client.IncompleteRead(b"# HELP"), http.client.BadStatusLine(""), b"\x1f\x8b\xff\x00", status(404),
     page("NaN", 600, 300), page(200, 600, 301, (140, 926, 60))],
)  # fmt: skip
def test_one_useless_answer_costs_one_scrape(tmp_path, answer):
    """What a proxy or a server that starts or dies answers is kept aside, and the analysis can be repeated without it."""
    answers = [page(100, 300, 150), answer, page(200, 600, 300), page(300, 900, 450), page(400, 1200, 600)]
    paths, missed, _ = scraped(answers, tmp_path / "s")
    assert (len(paths), len(missed)) == (4, 1)
    for kept in (tmp_path / "s").glob("*.unusable"):
        assert kept.read_bytes() == (answer if isinstance(answer, bytes) else answer.encode())
    assert read(sorted((tmp_path / "s").glob("*.prom"))).total.drafts == 300


def test_slow_answers_do_not_stretch_the_time_asked_for(tmp_path):
    """Answers of 15 s at one scrape every 10 s: what was missed is not made up for."""
    paths, _, now = scraped([page(n, 3 * n, n) for n in (100, 200, 300)], tmp_path / "s", took=15.0)
    assert [p.name for p in paths] == ["00000.prom", "00002.prom", "00004.prom"]
    assert now == 55.0


def test_scraping_into_what_is_no_directory_ends_in_a_sentence():
    with pytest.raises(SpecqError, match="cannot write to the directory /proc/zz"):
        scraped([], Path("/proc/zz"))


def test_scraping_a_silent_server_or_no_address(tmp_path):
    def refuse(url):
        raise OSError("refused")

    still = dict(clock=lambda: 0.0, sleep=lambda s: None)
    with pytest.raises(SpecqError, match="never answered"):
        scrape("http://x/metrics", 1, 2, tmp_path / "a", Reporter(quiet=True), get=refuse, **still)
    with pytest.raises(SpecqError, match="takes an address"):
        scrape("file:///etc/passwd", 1, 2, tmp_path / "b", Reporter(quiet=True), get=refuse, **still)
    assert seconds("5m", "--for") == 300
    for bad in ("", "0s", "-1s", "1d", "x"):
        with pytest.raises(SpecqError):
            seconds(bad, "--for")


def live(monkeypatch, pages, *words):
    """`import-metrics --url` of a server that answers these pages, the last one over and over, on a clock of its own.

    Returns how often it was asked, and the error."""
    asked, now = [], [0.0]

    def get(url):
        asked.append(url)
        answer = pages[min(len(asked), len(pages)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer.encode()

    own = partial(scrape, get=get, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(command, "scrape", own)
    done = CliRunner().invoke(app, ["import-metrics", "--url", "http://x/metrics", *words])
    return len(asked), done.exception or done.output


@pytest.mark.parametrize(
    ("model", "said"), [(None, "choose one with --model: a, b"), ("c", "no counters of model 'c'")]
)
def test_a_wrong_model_is_refused_at_the_first_scrape(monkeypatch, tmp_path, model, said):
    """Not after the whole --for, and nothing is left behind; where an unusable answer came before it, its folder is named."""
    two, chosen = page(5, 15, 3, model="a") + page(7, 21, 4, model="b"), ["--model", model] * bool(model)
    asked, error = live(monkeypatch, [two], "--out", str(tmp_path / "a"), *chosen)
    assert asked == 1 and isinstance(error, SpecqError) and said in str(error) and "kept" not in str(error)
    assert not (tmp_path / "a").exists()
    asked, error = live(monkeypatch, [two[:300], two], "--out", str(tmp_path / "b"), *chosen)
    assert asked == 2 and said in str(error) and f"1 unusable answers are kept in {tmp_path / 'b'}" in str(error)
    assert [p.name for p in (tmp_path / "b").glob("*")] == ["00000.unusable"]


def test_errors_after_scraping_name_the_folder(monkeypatch, tmp_path):
    """A model that turns up later."""
    later = page(5, 15, 3) + page(7, 21, 4, model="b")
    asked, error = live(monkeypatch, [page(5, 15, 3), later], "--out", str(tmp_path / "s"))
    assert asked == 31 and isinstance(error, SpecqError) and len(list(tmp_path.glob("s/*.prom"))) == 31
    assert "several models" in str(error) and f"31 scrapes are kept in {tmp_path / 's'}" in str(error)


@pytest.mark.parametrize(
    "torn", [page(200, 600, 300, (140, 926, 60)), page(300, 900, 340, (140, 140, 60)), "", status(503)]
)
def test_a_torn_scrape_costs_only_itself(monkeypatch, tmp_path, torn):
    """By its own numbers or beside the last ones: the others give the answer, which says so and claims no restart."""
    at = [page(100 * n, 300 * n, 150 * n, (70 * n, 50 * n, 30 * n)) for n in range(1, 8)]
    monkeypatch.setenv("COLUMNS", "300")
    asked, told = live(
        monkeypatch, [*at[:2], torn, *at[3:]], "--every", "1s", "--for", "6s", "--out", str(tmp_path / "s")
    )
    assert asked == 7 and "600 drafts, 1,800 tokens drafted, 900 accepted" in told
    assert "1 further scrapes gave nothing to use; the last:" in told and "restart" not in told
    assert json.loads((tmp_path / "s" / "metrics.json").read_text())["clusters"] == 5


@pytest.mark.parametrize(
    ("answer", "said"),
    [(status(404), "HTTP status 404 (Not Found); vLLM's counters are at http://HOST:8000/metrics"),
     (status(401), "HTTP status 401 (Unauthorized)"), (status(501), "HTTP status 501"), ("starting", "no Prometheus text"),
     ("<!doctype html>\n<html><body>Sign in</body></html>", "no Prometheus text"),
     ('vllm:num_requests_running{engine="0"} 0\n', "exports it on /metrics when it speculates"),
     ("sglang:spec_accept_length 2.1\n", "SGLang counts verifications")],
)  # fmt: skip
def test_what_waiting_does_not_mend_is_told_at_once(monkeypatch, tmp_path, answer, said):
    """At the first scrape, or the first after some that nothing came of; nothing is left behind."""
    for before in ([], [OSError("refused"), status(503), status(429)]):
        asked, error = live(monkeypatch, [*before, answer], "--out", str(tmp_path / "s"))
        assert asked == len(before) + 1 and isinstance(error, SpecqError) and said in str(error)
        assert "http://x/metrics: " in str(error) and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "url", ["http://me:sesame@", "http://me:sesame@x:port/", "ftp://me:sesame@x/", "http://me:se/sesame@x/", "http://[me:sesame@x"]
)  # fmt: skip
def test_a_password_is_never_printed(tmp_path, url):
    def refuse(url):
        raise OSError("refused")

    with pytest.raises(SpecqError) as told:
        scrape(url, 1, 2, tmp_path / "a", Reporter(quiet=True), get=refuse)
    assert "takes an address" in str(told.value) and "sesame" not in str(told.value)
    still = dict(clock=lambda: 0.0, sleep=lambda s: None)
    with pytest.raises(SpecqError, match="http://x:9/metrics never answered") as told:
        scrape("http://me:sesame@x:9/metrics", 1, 2, tmp_path / "b", Reporter(quiet=True), get=refuse, **still)
    assert "sesame" not in str(told.value)


@contextlib.contextmanager
def served(answer):
    """The address of a server that lets `answer(handler)` answer, until the block ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://me:p%40ss@127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def test_an_answer_is_read_whole_unpacked_and_with_a_login():
    """Compressed without having been asked, or not: the same bytes; the user and password of the address as sent by curl -u."""
    seen = []

    def packed(handler):
        seen.append(handler.headers["Authorization"])
        body = gzip.compress(page(5, 15, 3).encode())
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with served(packed) as url:
        assert fetch(url) == page(5, 15, 3).encode()
    assert seen == ["Basic " + base64.b64encode(b"me:p@ss").decode()]


@pytest.mark.parametrize("headers_first", [True, False])
def test_a_server_that_drips_is_left_in_time(headers_first):
    """A byte every 10 ms keeps every single read alive; the answer as a whole has its time all the same."""
    stop = threading.Event()

    def drip(handler):
        if headers_first:
            handler.send_response(200)
            handler.end_headers()
        while not stop.wait(0.01):
            handler.wfile.write(b"#")
            handler.wfile.flush()

    with served(drip) as url:
        began = time.monotonic()
        with pytest.raises(OSError, match="no whole answer within 0.3 s"):
            fetch(url, limit=0.3)
        assert time.monotonic() - began < 3
        stop.set()


def test_a_cut_answer_and_an_endless_one_are_none(monkeypatch):
    def cut(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"# HELP")

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b"#" * 4096)

    with served(cut) as url, pytest.raises(http.client.IncompleteRead):
        fetch(url)
    monkeypatch.setattr("specq.engines.metrics.fetch.LARGEST", 1 << 20)
    with served(endless) as url, pytest.raises(OSError, match="more than 1 MiB"):
        fetch(url)


def test_against_is_read_before_minutes_of_scraping(monkeypatch, tmp_path):
    words = ["--against", str(tmp_path / "gone"), "--out", str(tmp_path / "s")]
    asked, error = live(monkeypatch, [page(5, 15, 3)], *words)
    assert (
        asked == 0 and isinstance(error, SpecqError) and "cannot read" in str(error) and not (tmp_path / "s").exists()
    )


def test_an_interrupted_scrape_says_what_is_kept(tmp_path):
    """Ctrl-C and a full disk: the scrapes so far are kept and named; without one there is no folder."""
    with pytest.raises(Interrupted, match="2 scrapes and 0 unusable answers are kept in"):
        scraped([page(1, 3, 1), page(2, 6, 2), KeyboardInterrupt()], tmp_path / "s")
    assert len(list((tmp_path / "s").glob("*.prom"))) == 2
    with pytest.raises(Interrupted, match="^interrupted$"):
        scraped([KeyboardInterrupt()], tmp_path / "t")
    assert not (tmp_path / "t").exists()
