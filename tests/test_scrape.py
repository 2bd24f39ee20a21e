"""Scraping a live server: restarts, useless and slow answers, what an error or Ctrl-C leaves, and when a model is refused."""

import http.client
import re
from functools import partial
from pathlib import Path

import pytest
from test_import_metrics import page
from typer.testing import CliRunner

from specq.cli import app
from specq.engines.metrics import command
from specq.engines.metrics.command import read
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
        return answer

    paths, missed = scrape(
        "http://x/metrics", 10, 40, folder, Reporter(quiet=True), get=get, clock=lambda: now[0],
        sleep=lambda s: now.__setitem__(0, now[0] + s),
    )  # fmt: skip
    return paths, missed, now[0]


def test_scraping_survives_a_restart(tmp_path):
    """A server that vanishes for one scrape and comes back at zero still gives one answer, with both facts told."""
    answers = [page(100, 300, 150), page(200, 600, 300), OSError("refused"), page(30, 90, 40), page(80, 240, 110)]
    paths, missed, now = scraped(answers, tmp_path / "s")
    assert (len(paths), missed, now) == (4, 1, 40.0)
    reading = read(paths)
    assert reading.total.drafts == 100 + 30 + 50
    assert any("counter reset" in n for n in reading.notes)


@pytest.mark.parametrize(
    "answer",
    ["<html>Bad gateway</html>", "", page(200, 600, 300)[:300], 'vllm:num_requests_running{engine="0"} 0\n',
     http.client.IncompleteRead(b"# HELP"), http.client.BadStatusLine("")],
)  # fmt: skip
def test_one_useless_answer_costs_one_scrape(tmp_path, answer):
    """What a proxy or a server that starts or dies answers is kept aside, and the analysis can be repeated without it."""
    answers = [page(100, 300, 150), answer, page(200, 600, 300), page(300, 900, 450), page(400, 1200, 600)]
    paths, missed, _ = scraped(answers, tmp_path / "s")
    assert (len(paths), missed) == (4, 1)
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
        return pages[min(len(asked), len(pages)) - 1]

    own = partial(scrape, get=get, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(command, "scrape", own)
    done = CliRunner().invoke(app, ["import-metrics", "--url", "http://x/metrics", *words])
    return len(asked), done.exception


@pytest.mark.parametrize(
    ("model", "said"), [(None, "choose one with --model: a, b"), ("c", "no counters of model 'c'")]
)
def test_a_wrong_model_is_refused_at_the_first_scrape(monkeypatch, tmp_path, model, said):
    """Not after the whole --for, and nothing is left behind; where an unusable answer came before it, its folder is named."""
    two, chosen = page(5, 15, 3, model="a") + page(7, 21, 4, model="b"), ["--model", model] * bool(model)
    asked, error = live(monkeypatch, [two], "--out", str(tmp_path / "a"), *chosen)
    assert asked == 1 and isinstance(error, SpecqError) and said in str(error) and "kept" not in str(error)
    assert not (tmp_path / "a").exists()
    asked, error = live(monkeypatch, ["starting", two], "--out", str(tmp_path / "b"), *chosen)
    assert asked == 2 and said in str(error) and f"1 unusable answers are kept in {tmp_path / 'b'}" in str(error)
    assert [p.name for p in (tmp_path / "b").glob("*")] == ["00000.unusable"]


@pytest.mark.parametrize("later", [page(5, 15, 3) + page(7, 21, 4, model="b"), page(9, 20, 21)])
def test_errors_after_scraping_name_the_folder(monkeypatch, tmp_path, later):
    """A model that turns up later, and counters that contradict each other."""
    asked, error = live(monkeypatch, [page(5, 15, 3), later], "--out", str(tmp_path / "s"))
    assert asked == 31 and isinstance(error, SpecqError) and len(list(tmp_path.glob("s/*.prom"))) == 31
    assert re.search("several models|inconsistent", str(error)) and f"31 scrapes are kept in {tmp_path / 's'}" in str(
        error
    )


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
