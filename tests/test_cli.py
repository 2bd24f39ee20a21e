"""The command line as users meet it: answers, refusals with exit code 2, nothing half-written."""

import json
import os
import subprocess
import sys

import pytest

from specq import __version__


def run(*args, cwd=None, **env):
    """The console program in a process of its own, which sees no GPU."""
    command = [sys.executable, "-m", "specq", *map(str, args)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""} | env
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=900)


def test_help_and_version_import_nothing_heavy():
    """--help lists the commands without importing torch, transformers, matplotlib or pydantic's models of a study."""
    code = (
        "import sys; sys.argv = ['specq', '--help']\n"
        "from specq.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'scipy', 'pyarrow', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    for command in ("study", "rollout", "tune", "compare", "capacity", "formats", "pairs", "schema"):
        assert command in out.stdout
    assert run("--version").stdout.strip() == __version__


def test_ctrl_c_inside_a_finalizer_is_not_lost():
    """Python drops an exception that a finalizer raises, Ctrl-C included; it comes again, without a traceback."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs of a shell ignore it
        "from specq import cli\n"
        "class Held:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "def long():\n"
        "    held = Held()\n"
        "    del held\n"
        "    for _ in range(600): time.sleep(0.1)\n"
        "cli.app = long\n"
        "try: cli.main()\n"
        "except KeyboardInterrupt: print('stopped')\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (out.returncode, out.stdout, out.stderr) == (0, "stopped\n", "")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--pair", "llama3"], "unknown pair 'llama3'; registered are tiny, llama70b-1b"),
        (["--dtype", "fp4"], "unknown KV format 'fp4'; accepted are bf16"),
        (["--cost", "roofline:h900"], "unknown GPU 'h900'; known are a100, h100"),
        (["--cost", "nothing"], "neither measured, nor roofline:GPU, nor a file"),
        (["--k-max", "0"], "--k-max: Input should be greater than or equal to 1"),
        (["--k-max", "100"], "--k-max: Input should be less than or equal to 64"),
        (["--current-k", "17"], "--current-k 17 is beyond --k-max 16"),
        (["--text", "mine"], "--text: Input should be 'same', 'own', 'both' or 'given'"),
        (["--top-p", "0"], "--top-p: Input should be greater than 0"),
        (["--batch", "1,x"], "--batch takes whole numbers"),
        (["--prompts", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--target", "./nowhere"], "no model directory at ./nowhere"),
        (["--vllm-version", "0.1"], "older than 0.24"),
        (["--prompt-tokens", "8192"], "8192 positions and the study needs 8384"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, args, says):
    """What is wrong and what is accepted, no traceback, exit code 2, and no directory left behind."""
    out = run("study", "--quiet", *args, cwd=tmp_path)
    assert out.returncode == 2 and says in out.stderr, out.stderr
    assert "Traceback" not in out.stderr and out.stdout == ""
    assert list(tmp_path.iterdir()) == [] or list(tmp_path.glob("runs/*")) == []


@pytest.mark.parametrize("pair", ["llama70b-1b", "llama8b-1b", "qwen2.5-72b-0.5b", "qwen3-32b-0.6b"])
def test_a_registered_pair_without_weights_says_what_it_takes(tmp_path, pair):
    """Hub ids, disk and memory computed from the geometry, local directories and logging in: exit code 2."""
    out = run("study", "--pair", pair, cwd=tmp_path)
    assert out.returncode == 2 and "Traceback" not in out.stderr
    for part in ("target: ", "draft: ", "B parameters", "GB on disk", "GPU memory", "--target DIR", "hf auth login"):
        assert part in out.stderr
    if pair == "llama70b-1b":
        assert "meta-llama/Llama-3.1-70B-Instruct: 70.55 B parameters, 141.1 GB" in out.stderr
        assert "10.74 GB of BF16 KV cache per 32,768-token sequence" in out.stderr
    assert list(tmp_path.iterdir()) == []


def test_lists_and_schemas():
    """`formats`, `pairs` and `schema` answer; an unknown schema is refused."""
    assert "int8_k_channel_v_token" in run("formats").stdout
    assert "llama70b-1b" in run("pairs").stdout
    schema = json.loads(run("schema", "recommendation").stdout)
    assert "mu_shift_inherited_draft" in schema["required"]
    bad = run("schema", "nothing")
    assert bad.returncode == 2 and "speculation_profile" in bad.stderr


def python(code, cwd, **env):
    """Run code in a fresh interpreter; returns its exit status and errors."""
    out = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    return out.returncode, out.stderr


def test_no_folder_of_ours_stands_in_for_the_hubs_kernels(tmp_path):
    """transformers looks for the hub's `kernels` package: from the repository root it does not take our folder for it, a
    real one wins over the folder, and elsewhere there is none."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    without = (
        "from transformers import AutoModelForCausalLM; from transformers.utils import is_kernels_available as k;"
        "assert not k()"
    )
    assert python(without, root) == (0, "")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("real = True")
    assert python("import kernels; assert kernels.real", root, PYTHONPATH=str(tmp_path)) == (0, "")
    (tmp_path / "elsewhere").mkdir()
    absent = "import importlib.util as u, specq, specq_kernels; assert u.find_spec('kernels') is None, u.find_spec('kernels')"
    assert python(absent, tmp_path / "elsewhere") == (0, "")
