"""Benchmarks of specq itself, on this machine: `make bench` (all) or `specq bench NAME ...`.

    help       seconds and heaviness of `specq --help`
    chain      the estimator for 64 texts x 512 positions and all K <= 16
    study      the default study of the embedded pair: seconds, peak memory, seconds of one more format
    tune       `specq tune` of a finished default study with two formats and twelve operating points
    rollout    tokens per second of real speculative decoding in every format, K = 4; `rollout:cuda` on a GPU
    agreement  rollouts of every format and rule at K = 1, 4, 8 against their replay, in one joint test (12 minutes, by name
               only); `agreement:TEXTS:TOKENS` sets the size of each
    scoring    on a GPU, by name only: operations per second of the replay of a registered pair with random weights;
               `scoring:PAIR:TOKENS:TEXTS`
    precision  27 prompts x 1500 prompt tokens x 512 new tokens at T = 1, K = 4: standard error of the FP8 shift, and
               INT8 and identity beside it; `precision:SEED` draws other documents and other noise
    memory     peak memory against scored tokens, up to a million; `memory:TOKENS:tiny` on the embedded pair

Timings are of a shared machine; compare them within one run. The last line of every bench is one JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specq.bench_rollout import bench_agreement, bench_rollout
from specq.bench_scoring import bench_scoring
from specq.errors import SpecqError


def _seconds(call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def bench_help() -> dict:
    """Start-up of the command line, which must not import torch."""
    command = [sys.executable, "-m", "specq", "--help"]
    return {"help_seconds": _seconds(lambda: subprocess.run(command, capture_output=True, check=True))}


def bench_chain() -> dict:
    """64 texts x 512 positions, K = 1..16."""
    from specq.chain import run_chain

    a = np.random.default_rng(0).random((512, 64))
    return {"chain_seconds": _seconds(lambda: run_chain(a, a, np.full(64, 512), 16))}


def _study(folder: Path, *args: str) -> tuple[float, float, dict]:
    """(seconds, peak GB, study.json) of a study on the CPU, where the goals are, in a process of its own."""
    began = time.perf_counter()
    how = ["--out", str(folder), "--overwrite", "--device", "cpu"]
    command = [sys.executable, "-m", "specq", "study", *how, *args]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SpecqError(f"the study of this bench ended with exit code {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss / 1e6, json.loads((folder / "study.json").read_text())


def bench_study() -> dict:
    """The default study, and what a second format adds to it beside one scoring pass of target and draft."""
    with tempfile.TemporaryDirectory() as root:
        one, peak, study = _study(Path(root) / "one", "--dtype", "fp8")
        two, _, both = _study(Path(root) / "two", "--dtype", "fp8", "--dtype", "int8")
    base = sum(s for name, s in both["seconds_per_pass"].items() if ":bf16:splits1" in name)
    more = sum(s for name, s in both["seconds_per_pass"].items() if ":int8" in name)
    return {
        "study_seconds": one,
        "study_peak_gb": peak,
        "study_with_second_format_seconds": two,
        "second_format_pass_over_baseline_pass": more / base,
        "timings": study["timings_seconds"],
    }


def bench_tune() -> dict:
    """Deciding a finished study of two formats again, at four batches and three contexts."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "study"
        _study(folder, "--dtype", "fp8", "--dtype", "int8")
        points = ["--cost", "roofline:h100", "--batch", "1,8,32,128", "--context", "2048,8192,32768"]
        command = [sys.executable, "-m", "specq", "tune", str(folder), *points]
        return {"tune_seconds": _seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))}


def bench_precision(seed: str = "0") -> dict:
    """Resolution on the embedded pair: FP8 at scale 1, INT8 per token and head, and bf16 as identity, K = 4, T = 1."""
    sizes = ["--num-prompts", "27", "--prompt-tokens", "1500", "--output-tokens", "512", "--temperature", "1"]
    formats = ["--dtype", "fp8", "--dtype", "int8", "--dtype", "bf16", "--current-k", "4", "--cost", "roofline:h100"]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "study"
        seconds, peak, study = _study(folder, *sizes, *formats, "--seed", seed)
        identity = json.loads((folder / "bf16" / "recommendation.json").read_text())["mu_shift"]
    return {
        "precision_seconds": seconds,
        "precision_peak_gb": peak,
        "seed": seed,
        "tokens": study["tokens"]["scored"],
        "mu_baseline": study["arms"]["bf16+bf16"]["mu_accepted"]["4"],
        "null_arm": study["null_arm"]["4"],
        "identity": {"value": identity["value"], "ci95": identity["ci95"]},
        "shifts": {arm: by_k["4"] for arm, by_k in study["shifts"].items()},
        "kl_from_baseline": {arm: block["kl_from_baseline_mean"] for arm, block in study["arms"].items()},
    }


def _random_pair(root: Path) -> list[str]:
    """Options of a study on a random one-layer pair without EOS: its forward passes cost next to nothing."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None)  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    for seed, role in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(root / role)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root / role)
    return ["--target", str(root / "target"), "--draft", str(root / "draft")]


def bench_memory(tokens: str = "1000000", pair: str = "random") -> dict:
    """Peak memory of studies of 1/64, 1/8 and all of so many scored tokens: memory:TOKENS[:tiny].

    A random one-layer pair by default, which makes a million tokens in minutes; `tiny` is the embedded pair.
    """
    positions, found = 1007, []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        options = ["--pair", "tiny"] if pair == "tiny" else _random_pair(root)
        draws = np.random.default_rng(0)
        for share in (64, 8, 1):
            count = max(1, int(tokens) // share // positions)
            rows = ({"prompt_token_ids": draws.integers(3, 256, 16).tolist()} for _ in range(count))
            (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
            sizes = ["--num-prompts", str(count), "--prompt-tokens", "16", "--output-tokens", str(positions + 1)]
            args = [
                *options,
                *sizes,
                "--prompts",
                str(root / "prompts.jsonl"),
                "--cost",
                "roofline:h100",
                "--temperature",
                "1",
            ]
            seconds, peak, study = _study(root / "study", *args)
            found.append({"tokens": study["tokens"]["scored"], "seconds": seconds, "peak_gb": peak})
    growth = (found[-1]["peak_gb"] - found[0]["peak_gb"]) / max(found[-1]["tokens"] - found[0]["tokens"], 1)
    return {"pair": pair, "studies": found, "gb_per_million_tokens": 1e6 * growth}


BENCHES: dict[str, Callable[..., dict]] = {
    "help": bench_help,
    "chain": bench_chain,
    "study": bench_study,
    "tune": bench_tune,
    "precision": bench_precision,
    "rollout": bench_rollout,
    "agreement": bench_agreement,
    "scoring": bench_scoring,
    "memory": bench_memory,
}
BY_NAME_ONLY = ("agreement", "scoring")


def main(names: list[str]) -> None:
    """Run the named benches (all but BY_NAME_ONLY by default) and print one JSON line each."""
    unknown = sorted({n.split(":")[0] for n in names} - set(BENCHES))
    if unknown:
        raise SpecqError(f"unknown bench {', '.join(unknown)}; known are {', '.join(BENCHES)}")
    for name in names or [n for n in BENCHES if n not in BY_NAME_ONLY]:
        name, *arguments = name.split(":")
        print(f"{name}: {BENCHES[name].__doc__.splitlines()[0]}", file=sys.stderr)
        print(json.dumps(BENCHES[name](*arguments)))
