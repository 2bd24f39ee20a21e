"""No text of a file steers the terminal: names of models, groups and directories, notes and warnings."""

import io
import json

import pytest
from conftest import VOCAB, save_model
from rich.table import Table

from specq import study
from specq.command import study_command
from specq.compare import compare_command
from specq.config import RolloutConfig, StudyConfig
from specq.progress import Reporter
from specq.rollout_command import rollout_command
from specq.terminal import Terminal
from specq.tune_command import tune_command

NASTY = "x\x1b[31m\x1b]0;title\x07\x9b2J\u202e[bold]y"
SHOWN = "x\\x1b[31m"


def test_text_is_written_out_and_styles_stay():
    """Every way to print: rules, tables, plain lines and notes; what rich adds itself is left alone."""
    out = io.StringIO()
    console = Terminal(file=out, width=300)
    table = Table(title=NASTY)
    table.add_row(NASTY)
    for thing in (table, NASTY):
        console.print(thing, markup=False)
    console.rule(NASTY)
    assert out.getvalue().count(SHOWN) == 4
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    out = io.StringIO()
    Terminal(file=out, force_terminal=True, color_system="standard").print("[red]x[/red]\x1b[2J")
    assert out.getvalue() == "\x1b[31mx\x1b[0m\\x1b[2J\n"


def test_notes_and_bars_of_a_reporter(capsys):
    """Notes quote prompt files, bars quote names."""
    reporter = Reporter()
    reporter.note(NASTY)
    with reporter.task(NASTY, 1) as done:
        done(1)
    err = capsys.readouterr().err
    assert SHOWN in err and all(c.isprintable() or c == "\n" for c in err)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """A pair whose directories, and prompts whose ids and groups, would steer a terminal."""
    root = tmp_path_factory.mktemp("nasty") / NASTY
    rows = [{"prompt": f"w{3 + i} w4 w5 w6", "id": f"{i}{NASTY}", "group": f"{NASTY}{i % 2}"} for i in range(6)]
    target, draft = save_model(root / NASTY, seed=1), save_model(root / "d", seed=2)
    (root / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert VOCAB > 8
    return root, {"target": str(target), "draft": str(draft), "prompts": str(root / "p.jsonl")}


def options(kind, given, **more):
    base = {k: None for k in kind.model_fields if k != "dtypes" and not k.endswith("sha256")}
    return base | {"pair": "tiny", "num_prompts": 6, "prompt_tokens": 8, "output_tokens": 8} | more | given


def test_commands_print_names_as_escapes(nasty, capsys, monkeypatch):
    """study, tune, compare and rollout over such a pair, into such a directory."""
    root, given = nasty
    monkeypatch.setattr(study, "draw", lambda out: None)
    small = {"k_max": 3, "current_k": 2, "cost": "roofline:h100", "batch": (1,), "context": (2048,)}
    study_command(options(StudyConfig, given, **small), ["fp8"], root / "s")
    tune_command(root / "s", {"cost": "roofline:h200"}, None, None)
    compare_command(root / "s", root / "s")
    rollout_command(options(RolloutConfig, given, k=2), ["fp8"], root / "r")
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert all(c.isprintable() or c == "\n" for c in text)
    assert told.out.count(SHOWN) > 8
