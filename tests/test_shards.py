"""Interruptions: whatever ends a run, finished pieces stay valid, and continuing gives the very bytes of one left alone."""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import VOCAB, save_model
from interruptions import forked, interrupted_after, killed_at_random, one_thread, raising  # noqa: F401

from specq import files, finished, measure, outliers, shards, study
from specq.command import merge_command, resolve, study_command
from specq.config import StudyConfig
from specq.errors import Interrupted, SpecqError
from specq.memory import Fits, is_out_of_memory
from specq.progress import Reporter
from specq.replay import Room
from specq.shards import Piece, Run, workspace

QUIET = Reporter(quiet=True)
KILLS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random pair and 40 prompts for it: two blocks."""
    root = tmp_path_factory.mktemp("pair")
    rng = np.random.default_rng(0)
    rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(3, VOCAB, 6)), "id": f"p{n}"} for n in range(40)]
    (root / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    target, draft = save_model(root / "t", seed=1), save_model(root / "d", seed=2, num_hidden_layers=1)
    return {"target": str(target), "draft": str(draft), "prompts": str(root / "p.jsonl")}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Drawing is no part of what is measured here, and slow."""
    monkeypatch.setattr(study, "draw", lambda out: None)


def options(pair, **changes):
    base = {k: None for k in StudyConfig.model_fields if k != "dtypes" and not k.endswith("sha256")}
    small = {"pair": "tiny", "num_prompts": 40, "prompt_tokens": 8, "output_tokens": 8, "k_max": 3, "current_k": 2,
             "cost": "roofline:h100", "batch": (1,), "context": (2048,), "text": "both"}  # fmt: skip
    return base | pair | small | changes


def run(pair, out, resume=False, part=(1, 1), overwrite=False, **changes):
    config, directories = resolve(options(pair, **changes), ["fp8"])
    return study.run_study(config, directories, out, overwrite, QUIET, resume=resume, part=part)


def data(out):
    return {n: (out / n).read_bytes() for n in ("positions.parquet", "texts.parquet")}


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
    """The files of a study that nothing interrupted."""
    out = tmp_path_factory.mktemp("alone") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "draw", lambda out: None)
        run(pair, out)
    return data(out)


def test_killed_at_20_random_moments_and_resumed_gives_the_same_bytes(pair, alone, tmp_path):
    """kill -9 at 20 random function calls (of all those of a run, writing and renaming included): every continued study
    ends with the parquet files of the one left alone, byte for byte, and leaves nothing else behind."""

    def whole(out, resume):
        study_command(options(pair), ["fp8"], out, resume=resume, quiet=True)

    def checked(out):
        assert data(out) == alone
        assert {p.name for p in out.iterdir()} == {"fp8", "positions.parquet", "texts.parquet", "study.json"}

    assert killed_at_random(KILLS, whole, tmp_path, checked) > KILLS / 4


def test_ctrl_c_says_one_sentence_and_resume_continues(pair, alone, tmp_path, monkeypatch):
    """After Ctrl-C: what is kept and how to go on. Without --resume the pieces are not touched, with another
    configuration neither; with it only the missing ones are made."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(patch, 4, raising(KeyboardInterrupt()))
        with pytest.raises(Interrupted, match=r"interrupted; 4 finished pieces are kept in .*out.partial, .* --resume"):
            run(pair, out)
    assert not out.exists() and not (tmp_path / "out.lock").exists()
    with pytest.raises(SpecqError, match="4 finished pieces of an interrupted study; --resume continues it"):
        run(pair, out)
    with pytest.raises(SpecqError, match="of another configuration; choose another --out, or --overwrite"):
        run(pair, out, resume=True, seed=5)
    made = []
    write = shards.Shards._write
    monkeypatch.setattr(shards.Shards, "_write", lambda s, path, piece: (made.append(path.name), write(s, path, piece)))
    run(pair, out, resume=True)
    assert data(out) == alone and len(made) == 3 * (2 + 5) - 4  # texts and scores of three sets: same, null's, FP8's
    assert sorted(p.name for p in out.iterdir()) == ["fp8", "positions.parquet", "study.json", "texts.parquet"]


def test_ctrl_c_in_the_terminal(pair, tmp_path):
    """A real SIGINT: one sentence on stderr, exit code 130, no traceback; before the first piece nothing stays."""
    for pieces, says in ((3, "3 finished pieces are kept"), (0, "nothing is kept")):
        code = (
            "import os, signal\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs of a shell ignore it
            "from specq import shards\n"
            "write, seen = shards.Shards._write, []\n"
            "def counted(self, path, piece):\n"
            f"    if len(seen) == {pieces}: os.kill(os.getpid(), signal.SIGINT)\n"
            "    seen.append(path); write(self, path, piece)\n"
            "shards.Shards._write = counted\n"
            "from specq.cli import main\n"
            "main()\n"
        )
        args = [
            "study",
            "--num-prompts",
            "40",
            "--prompt-tokens",
            "8",
            "--output-tokens",
            "8",
            "--k-max",
            "3",
            "--device",
            "cpu",
            "--quiet",
        ]
        args += [x for k, v in pair.items() for x in (f"--{k}", v)] + ["--out", "out"]
        out = subprocess.run([sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True, text=True)
        assert out.returncode == 130 and out.stdout == "" and len(out.stderr.splitlines()) == 1, out.stderr
        assert out.stderr.startswith("specq: interrupted; ") and says in out.stderr
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=pieces == 0)
        assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_valid_pieces(pair, alone, tmp_path, monkeypatch):
    """No space left while a piece is written (the file is cut short): a sentence, no half piece, and --resume goes on."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        fsync, calls = os.fsync, []

        def full(fd):
            calls.append(fd)
            if len(calls) == 4:
                os.ftruncate(fd, 100)
                raise OSError(28, "No space left on device")
            fsync(fd)

        patch.setattr(os, "fsync", full)
        with pytest.raises(
            SpecqError, match=r"cannot write to .*: No space left on device; 3 finished pieces are kept"
        ):
            run(pair, out)
    assert len(list((tmp_path / "out.partial" / "shards").iterdir())) == 3
    run(pair, out, resume=True)
    assert data(out) == alone


def test_a_limit_on_file_size_is_a_sentence(pair, tmp_path):
    """The operating system's own refusal (RLIMIT_FSIZE) in a process of its own: exit by SpecqError, nothing half-written."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
        with pytest.raises(SpecqError, match="cannot write to"):
            run(pair, tmp_path / "out")

    assert forked(limited) == 0
    for path in (tmp_path / "out.partial").rglob("*.parquet"):
        pq.read_table(path)
    assert not (tmp_path / "out").exists()


def test_out_of_memory_halves_what_is_done_at_once_and_says_so(pair, alone, tmp_path, monkeypatch):
    """Sampling halves the prompts, scoring the arms; the results stay, and study.json says what happened. With nothing
    left to halve the study stops with a sentence."""
    sample, score = measure.sample_texts, measure.score_texts
    batches, arms = [], []

    def short(fits):
        def sampled(target, prompts, fmt, *, batch, **kw):
            batches.append(batch)
            if batch > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return sample(target, prompts, fmt, batch=batch, **kw)

        def scored(target, draft, texts, some, *rest):
            arms.append(len(some))
            if len(some) > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
            return score(target, draft, texts, some, *rest)

        monkeypatch.setattr(measure, "sample_texts", sampled)
        monkeypatch.setattr(measure, "score_texts", scored)

    short(fits=8)
    run(pair, tmp_path / "out")
    assert data(tmp_path / "out") == alone
    assert batches[:4] == [32, 16, 8, 8] and arms[:6] == [5, 3, 2, 2, 2, 2]
    warnings = json.loads((tmp_path / "out" / "study.json").read_text())["warnings"]
    assert any("prompts sampled together are taken 8 at a time" in w for w in warnings)
    assert any("arms scored together with the baseline are taken 1 at a time" in w for w in warnings)
    short(fits=0)
    with pytest.raises(SpecqError, match="out of memory with a single one of the prompts sampled together"):
        run(pair, tmp_path / "none")
    assert not (tmp_path / "none.partial").exists()


def test_out_of_memory_on_a_gpu_takes_fewer_texts_side_by_side(pair, alone, tmp_path, monkeypatch):
    """Where one arm beside the baseline is still too much, texts and everything done at once are halved as well, and that is
    said; with the least of them, a sentence."""
    score, rooms = measure.score_texts, []
    whole = Room(tokens=1 << 13, prefill=1 << 12, logits=1 << 20, positions=1 << 10, copied=1 << 20)
    monkeypatch.setattr(Room, "on", classmethod(lambda cls, device: whole))

    def short(fits):
        def scored(target, draft, texts, some, setting, done, room):
            rooms.append((len(some), room.tokens))
            if room.tokens * len(some) > 2 * fits:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
            return score(target, draft, texts, some, setting, done, room)

        monkeypatch.setattr(measure, "score_texts", scored)

    short(fits=1 << 11)
    run(pair, tmp_path / "out")
    tokens = [8192] * 3 + [4096, 2048]
    assert rooms[:6] == [*zip([5, 3, 2, 2, 2], tokens, strict=True), (2, 2048)]
    warnings = json.loads((tmp_path / "out" / "study.json").read_text())["warnings"]
    assert any("tokens of texts scored side by side are taken 2048 at a time" in w for w in warnings)
    mine, theirs = (
        pq.read_table(io.BytesIO(files["positions.parquet"])).to_pydict() for files in (data(tmp_path / "out"), alone)
    )
    assert mine["arm"] == theirs["arm"] and mine["token"] == theirs["token"]
    assert np.abs(np.subtract(mine["alpha"], theirs["alpha"])).mean() < 1e-4
    short(fits=512)
    with pytest.raises(SpecqError, match="out of memory with 1,024 of the tokens of texts scored side by side"):
        run(pair, tmp_path / "none")


def test_a_narrower_room_is_narrower_in_everything():
    """The first is the room itself; the numbers of logits and of float32 copies follow the tokens."""
    gpu = Room(1 << 15, 1 << 12, 1 << 29, 1 << 12, 1 << 26)
    assert gpu.narrowed(1 << 15) == gpu
    assert gpu.narrowed(1 << 13) == Room(1 << 13, 1 << 10, 1 << 27, 1 << 10, 1 << 24)


def test_real_out_of_memory_is_recognised():
    """What PyTorch and Python raise when memory runs out; another RuntimeError is none of it."""
    for said in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        assert is_out_of_memory(RuntimeError(said))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52)
    assert is_out_of_memory(caught.value) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        Fits(4, "things", QUIET).run(lambda size: raising(RuntimeError("shapes"))())


@pytest.mark.parametrize("size", [1, 32])
def test_results_do_not_depend_on_the_size_of_pieces(pair, alone, tmp_path, monkeypatch, size):
    """Check 4 for pieces: one text per piece or 32 give the same parquet files."""
    monkeypatch.setattr(measure, "SIZE", size)
    run(pair, tmp_path / "out")
    assert data(tmp_path / "out") == alone


@pytest.mark.parametrize("draft", ["ngram", "self"])
def test_drafts_without_weights_and_ranges_come_back_from_pieces(pair, tmp_path, monkeypatch, draft):
    """A lookup's columns by depth and the largest keys per channel survive an interruption and other sizes of pieces: the
    same bytes, the same outliers, columns of the shape that the finished study is read back with."""
    monkeypatch.setattr(outliers, "OUTLIER_RATIO", 1.5)  # random keys have some
    how = {"draft": draft, "ngram": (1, 3)}
    run(pair, tmp_path / "whole", **how)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupted_after(patch, 9, raising(KeyboardInterrupt()))
        run(pair, tmp_path / "cut", **how)
    run(pair, tmp_path / "cut", resume=True, **how)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "SIZE", 16)
        run(pair, tmp_path / "large", **how)
    found = [json.loads((tmp_path / n / "study.json").read_text())["key_outliers"] for n in ("whole", "cut", "large")]
    assert found[0] and found[0] == found[1] == found[2]
    assert data(tmp_path / "whole") == data(tmp_path / "cut") == data(tmp_path / "large")
    rows = files.read_parquet(tmp_path / "whole" / "positions.parquet")
    assert ("alpha_by_depth" in rows) == (draft == "ngram")
    if draft == "ngram":
        assert rows["alpha_by_depth"].shape == (len(rows["alpha"]), 3) and rows["b_by_depth"].any()
    assert set(rows["arm"][rows["text"] == "own"]) == {"null", "fp8_e4m3+bf16", "fp8_e4m3+fp8_e4m3"}
    again = finished.load(tmp_path / "cut").material
    told = json.loads((tmp_path / "cut" / "study.json").read_text())["arms"]["fp8_e4m3+bf16"]["mu_accepted"]["3"][
        "value"
    ]
    assert again.main.arms["fp8_e4m3+bf16"].emitted(3) - 1 == pytest.approx(told, abs=1e-12)


def test_damaged_pieces_are_made_again(pair, alone, tmp_path, monkeypatch):
    """A flipped bit, a cut file, leftovers of a killed write: found by checksums and replaced."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(patch, 6, raising(KeyboardInterrupt()))
        with pytest.raises(Interrupted):
            run(pair, out)
    pieces = sorted((tmp_path / "out.partial" / "shards").iterdir())
    body = bytearray(pieces[0].read_bytes())
    body[len(body) // 3] ^= 1
    pieces[0].write_bytes(body)
    pieces[1].write_bytes(pieces[1].read_bytes()[:-20])
    pieces[2].with_suffix(".tmp").write_bytes(b"half")
    run(pair, out, resume=True)
    assert data(out) == alone


def test_pieces_of_other_studies_are_never_mixed_in(pair, tmp_path, monkeypatch):
    """A piece copied from another study is refused by its digest; other versions of the libraries are refused too."""
    for name, seed in (("a", 0), ("b", 1)):
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupted_after(patch, 2, raising(KeyboardInterrupt()))
            run(pair, tmp_path / name, seed=seed)
    piece = "texts-bf16-0000000.parquet"
    shutil.copy(tmp_path / "b.partial" / "shards" / piece, tmp_path / "a.partial" / "shards" / piece)
    with pytest.raises(SpecqError, match="belongs to another study"):
        run(pair, tmp_path / "a", resume=True)
    path = tmp_path / "b.partial" / "run.json"
    old = json.loads(path.read_text())
    path.write_text(json.dumps(old | {"versions": old["versions"] | {"torch": "1.0"}}))
    with pytest.raises(SpecqError, match="begun under other versions .torch 1.0 then"):
        run(pair, tmp_path / "b", resume=True, seed=1)
    run(pair, tmp_path / "b", overwrite=True, seed=1)
    assert (tmp_path / "b" / "study.json").is_file()


@pytest.mark.parametrize(
    "changes",
    [
        {"directories": {"fp8_e4m3": "../../evil"}},
        {"directories": {"fp8_e4m3": "/evil"}},
        {"directories": {"fp8_e4m3": ".."}},
        {"directories": {"int8": "fp8"}},
        {"directories": {}},
        {"versions": None},
        {"part": "x"},
        {"configuration": 3},
        {"configuration": {}},
        {"configuration": {"target": 7}},
        {"study": None},
    ],
    ids=json.dumps,
)
def test_run_json_of_another_machine_is_not_trusted(pair, tmp_path, changes):
    """A part whose run.json was damaged or made to lead out of the study is refused in a sentence, and so is resuming it."""
    part = tmp_path / "p"
    (part / "shards").mkdir(parents=True)
    (part / "shards" / "texts-bf16-0000000.parquet").write_bytes(b"")
    config, directories = resolve(options(pair), ["fp8"])
    whole = {"study": "0", "configuration": config.model_dump(mode="json"), "directories": directories, "versions": {},
             "part": [1, 2]}  # fmt: skip
    (part / "run.json").write_text(json.dumps(whole | changes))
    with pytest.raises(SpecqError):
        merge_command(tmp_path / "whole", [part], {}, False, True)
    part.rename(tmp_path / "out.partial")
    with pytest.raises(SpecqError):
        study_command(options(pair), ["fp8"], tmp_path / "out", resume=True, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]


def test_ctrl_c_while_a_whole_run_is_tidied_says_so(tmp_path, monkeypatch):
    """The study lies in its place already: nothing is said to be lost."""
    tidy = raising(KeyboardInterrupt())
    monkeypatch.setattr(shards, "tidy", lambda *args: tidy())
    with pytest.raises(Interrupted, match="interrupted; .*out is complete"):
        with workspace(tmp_path / "out", an_empty_run(), QUIET) as work:
            (work.folder.parent / "study.json").write_text("{}")
    assert (tmp_path / "out" / "study.json").is_file()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_kill_while_a_study_is_replaced_leaves_one_to_go_on_with(tmp_path, at):
    """--overwrite, killed at each of its renames and before tidying up: the old or the new study is there, or --resume
    finishes the new one; what was replaced goes."""
    out = tmp_path / "out"

    def replaced(killed_at, **how):
        calls, replace, tree = [], os.replace, shutil.rmtree

        def counted(work, path, *rest, **more):
            if str(path) in (str(out), str(out.with_name("out.partial")), str(out / "replaced")):
                calls.append(path)
                if len(calls) == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return work(path, *rest, **more)

        with pytest.MonkeyPatch.context() as patch, workspace(out, an_empty_run(seed=1), QUIET, **how) as work:
            work.complete("s", range(8), 8, lambda group: Piece([pa.table({"x": list(group)})]))
            (work.folder.parent / "study.json").write_text("new")
            patch.setattr(os, "replace", lambda *args: counted(replace, *args))
            patch.setattr(shutil, "rmtree", lambda *args, **more: counted(tree, *args, **more))

    with workspace(out, an_empty_run(), QUIET) as work:
        (work.folder.parent / "study.json").write_text("old")
    assert forked(lambda: replaced(at, overwrite=True)) == -signal.SIGKILL
    found = (out / "study.json").read_text() if out.exists() else None
    assert found == {1: "old", 2: None, 3: "new"}[at]
    if at == 3:
        shards.tidy(out)
    else:
        assert forked(lambda: replaced(99, overwrite=at == 1, resume=at == 2)) == 0
    assert (out / "study.json").read_text() == "new"
    assert [p.name for p in out.iterdir()] == ["study.json"]


def an_empty_run(**changes):
    return Run({"seed": 0} | changes, {}, {}, {"specq": "0"})


def test_a_second_study_into_the_same_directory_is_refused(tmp_path):
    """While one works, another into the same directory is refused, from this process and from another; when a killed one
    left no finished piece its directory is cleared; what is not ours is left alone."""
    out = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    with workspace(out, an_empty_run(), QUIET) as work:
        with pytest.raises(SpecqError, match="another run is being written"), workspace(out, an_empty_run(), QUIET):
            pass

        def other():
            with pytest.raises(SpecqError, match="another run is being written"), files.sole_writer(out):
                pass

        assert forked(other) == 0
        (work.folder.parent / "study.json").write_text("{}")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out.partial" / "shards").mkdir(parents=True)  # killed before run.json was written
    (tmp_path / "out.partial" / "run.json.tmp").write_text("{")
    with workspace(out, an_empty_run(), QUIET, overwrite=True):
        pass
    (tmp_path / "y.partial" / "shards").mkdir(parents=True)
    (tmp_path / "y.partial" / "shards" / "texts-0.parquet").write_bytes(b"whose?")
    with (
        pytest.raises(SpecqError, match="run.json cannot be read"),
        workspace(tmp_path / "y", an_empty_run(), QUIET, resume=True),
    ):
        pass
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with (
            pytest.raises(SpecqError, match="is in the way"),
            workspace(tmp_path / "x", an_empty_run(), QUIET, overwrite=overwrite),
        ):
            pass
    assert (tmp_path / "x.partial" / "thesis.tex").read_text() == "years of work"


def test_a_lock_ends_with_its_process(tmp_path):
    """A killed run holds no lock, and the file it left does not stand in the way."""

    def killed():
        with files.sole_writer(tmp_path / "out"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked(killed) == -signal.SIGKILL and (tmp_path / "out.lock").exists()
    with files.sole_writer(tmp_path / "out"):
        pass


def test_stages_of_any_kind_can_use_pieces(tmp_path):
    """The mechanism by itself: groups of the items, facts, columns per row group, nothing made twice."""
    made = []

    def work(group):
        made.append(list(group))
        return Piece([pa.table({"x": list(group)}), pa.table({"x": [10 * i for i in group]})], {"first": group[0]})

    with pytest.raises(Interrupted), workspace(tmp_path / "o", an_empty_run(), QUIET) as w:
        w.complete("s", range(20), 8, work)
        raise KeyboardInterrupt
    with workspace(tmp_path / "o", an_empty_run(), QUIET, resume=True) as w:
        skipped = []
        paths = w.complete("s", range(20), 8, work, skipped.append)
        assert skipped == [range(0, 8), range(8, 16), range(16, 20)]
        columns = shards.Columns(paths, 1)
        assert columns["x"].tolist() == [10 * i for i in range(20)] and list(columns) == ["x"]
        assert [shards.facts(p)["first"] for p in paths] == [0, 8, 16]
    assert made == [list(range(0, 8)), list(range(8, 16)), list(range(16, 20))]


def test_parts_of_several_machines_merge_into_the_whole(pair, alone, tmp_path, capsys):
    """Two parts, made in separate directories from copies of the models and prompts at other paths, give the study of one
    machine byte for byte; a missing part, a damaged piece and another study are refused."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    there = {k: str(shutil.copytree(v, elsewhere / k)) for k, v in pair.items() if k != "prompts"}
    there["prompts"] = str(shutil.copy(pair["prompts"], elsewhere / "prompts.jsonl"))
    parts = [tmp_path / "p1", tmp_path / "p2"]
    for i, (path, files_of) in enumerate(zip(parts, (pair, there), strict=True), 1):
        study_command(options(files_of), ["fp8"], path, part=f"{i}/2", quiet=True)
    assert "part 2 of 2 is complete" in capsys.readouterr().out
    assert sorted(p.name for p in parts[0].iterdir()) == ["run.json", "shards"]
    study_command(options(pair), ["fp8"], parts[0], part="1/2", quiet=True)  # again: told, not made again
    shutil.rmtree(elsewhere)
    merge_command(tmp_path / "whole", [*reversed(parts)], pair, False, True)
    assert data(tmp_path / "whole") == alone
    with pytest.raises(SpecqError, match="lack texts-bf16 of prompts 33 to 40; give the part that has it"):
        merge_command(tmp_path / "half", parts[:1], {}, False, True)
    with pytest.raises(SpecqError, match="holds a study already"):
        merge_command(tmp_path / "whole", parts, {}, False, True)
    with pytest.raises(SpecqError, match="not those the parts were made with"):
        merge_command(tmp_path / "other", parts[:1], {"target": pair["draft"]}, False, True)
    other = tmp_path / "p3"
    study_command(options(pair, seed=9), ["fp8"], other, part="1/2", quiet=True)
    with pytest.raises(SpecqError, match="belongs to another study"):
        merge_command(tmp_path / "other", [parts[0], other], {}, False, True)
    with pytest.raises(SpecqError, match="no run.json"):
        merge_command(tmp_path / "other", [tmp_path / "whole"], {}, False, True)
    piece = next((parts[0] / "shards").glob("scores*"))
    piece.write_bytes(piece.read_bytes()[:-9])
    with pytest.raises(SpecqError, match="pieces given are damaged"):
        merge_command(tmp_path / "other", parts, pair, False, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p1", "p2", "p3", "whole"]


@pytest.mark.parametrize(
    ("part", "says"), [("3/2", "takes two numbers"), ("0/2", "takes"), ("x", "takes"), ("1/3", "at most 2")]
)
def test_impossible_parts_are_refused(pair, tmp_path, part, says):
    """A share of a study is i/n with 1 <= i <= n, and n at most the blocks there are."""
    with pytest.raises(SpecqError, match=says):
        study_command(options(pair), ["fp8"], tmp_path / "out", part=part, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_the_same_study_at_another_path_is_the_same_study(pair, tmp_path, capsys):
    """Content decides: moved models and prompts give the finished answer; an edited model is another configuration."""
    out = tmp_path / "out"
    study_command(options(pair), ["fp8"], out, quiet=True)
    for d in ("fp8",):
        (out / d / "report.html").write_text("drawn")
    there = {k: str(shutil.copytree(v, tmp_path / k)) for k, v in pair.items() if k != "prompts"} | {
        "prompts": pair["prompts"]
    }
    before = (out / "study.json").stat().st_mtime_ns
    study_command(options(there), ["fp8"], out, quiet=True)
    assert (out / "study.json").stat().st_mtime_ns == before
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(SpecqError, match="another configuration"):
        study_command(options(there), ["fp8"], out, quiet=True)
    with pytest.raises(SpecqError, match="give one of them"):
        study_command(options(pair), ["fp8"], out, overwrite=True, resume=True, quiet=True)
