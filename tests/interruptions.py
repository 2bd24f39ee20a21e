"""Ways to interrupt a run, for tests: a process of its own, kill -9 at a chosen call, an error before a chosen piece."""

import os
import random
import signal
import sys
import traceback

import pytest
import torch

from specq import shards
from specq.shards import partial_of


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A forked process has no threads of its parent's pool; with one thread it asks for none."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forked(work):
    """Exit status of `work()` in a forked process: 0, 1 after an exception, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def counting_calls(limit=None, told=None):
    """Count calls of Python functions and C functions; at `limit` the process kills itself as kill -9 would."""
    seen = 0

    def profile(frame, event, arg):
        nonlocal seen
        seen += 1
        if seen == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)
    yield
    sys.setprofile(None)
    if told is not None:
        told.write_text(str(seen))


def interrupted_after(monkeypatch, pieces, how):
    """Let `how()` happen before the piece with this number is written."""
    write, seen = shards.Shards._write, []

    def counted(self, path, piece):
        if len(seen) == pieces:
            how()
        seen.append(path.name)
        write(self, path, piece)

    monkeypatch.setattr(shards.Shards, "_write", counted)


def raising(error):
    def how():
        raise error

    return how


def killed_at_random(kills, whole, root, checked):
    """kill -9 `whole(out, resume)` at random function calls, of all those of a run, and continue it, until it was killed
    `kills` times; `checked(out)` looks at each finished directory. Returns how often pieces were there to continue from."""

    def counted(out, resume, limit=None, told=None):
        counter = counting_calls(limit, told)
        next(counter)
        whole(out, resume)
        next(counter, None)

    assert forked(lambda: counted(root / "count", False, told=root / "calls")) == 0
    calls, rng = int((root / "calls").read_text()), random.Random(7)
    killed = finished = kept = 0
    while killed < kills:
        out = root / f"run{finished}"
        status = forked(lambda out=out: counted(out, True, limit=rng.randrange(1, calls)))
        rng.random()  # the child drew on a copy
        if status == -signal.SIGKILL:
            killed += 1
            kept += shards.count(partial_of(out)) > 0
            continue
        assert status == 0
        checked(out)
        finished += 1
    last = root / f"run{finished}"
    assert forked(lambda: counted(last, True)) == 0
    checked(last)
    return kept
