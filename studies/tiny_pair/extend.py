"""Teach the draft long contexts: total variation against the frozen target on windows of 8192 tokens.

DATA holds train.xz, val.xz and tokenizer/ (see build_corpus.py). PAIR is what train.py wrote: target/, draft/
and report.json. OUT receives the target unchanged, the new draft and the report with its scores added.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from common import (
    SMOKE_VAL_TOKENS,
    Log,
    encode,
    load_tokenizer,
    random_windows,
    run_parser,
    save_model,
    save_report,
)
from training import SCORES, Stage, distillation_loss, evaluate, fit, make_optimizer, total_variation
from transformers import LlamaForCausalLM

SECONDS = 70.0
STAGE = Stage("draft-long", SECONDS, context=8192, rows=4, rate=1e-3, warmup=20, floor=0.03)
WEIGHT_DECAY = 0.0
TRAIN_CHARS = 120_000_000  # characters of train.xz used
RANGES = ((0, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8192))  # positions scored together
TORCH_SEED, WINDOW_SEED = 1, 3


def load_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """A saved model in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def score_ranges(scores: torch.Tensor) -> dict[str, dict[str, float]]:
    """Mean scores over ranges of positions, from scores [4, context]; ranges end at the context."""
    context = scores.shape[1]
    means = {}
    for first, last in RANGES:
        if first < context:
            mean = scores[:, first:last].mean(1).tolist()
            means[f"{first}-{min(last, context)}"] = dict(zip(SCORES, mean, strict=True))
    return means


def copy_target(pair: Path, out: Path) -> None:
    """Copy the unchanged target, unless PAIR and OUT are one folder."""
    if pair.resolve() != out.resolve():
        shutil.copytree(pair / "target", out / "target", dirs_exist_ok=True)


def parse_args() -> argparse.Namespace:
    """Command line."""
    folders = {
        "data": "what build_corpus.py made",
        "pair": "what train.py made",
        "out": "folder of the results",
    }
    parser = run_parser(__doc__, folders)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="budget (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train, evaluate and save the draft."""
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(TORCH_SEED)
    report = json.loads((args.pair / "report.json").read_text())
    log = Log(report["log"])
    stage = dataclasses.replace(STAGE, seconds=args.seconds)
    if args.smoke_test:
        stage = stage.for_smoke_test()

    tokenizer = load_tokenizer(args.data)
    train = encode(args.data / "train.xz", tokenizer, TRAIN_CHARS)
    val = encode(args.data / "val.xz", tokenizer)
    if args.smoke_test:
        val = val[:SMOKE_VAL_TOKENS]
    log(f"extension: train tokens {len(train) / 1e6:.1f}M")
    target = load_model(args.pair / "target", device).eval().requires_grad_(False)
    draft = load_model(args.pair / "draft", device)

    divergence = torch.compile(total_variation) if args.compile else total_variation
    loss = distillation_loss(target, draft, divergence, device)
    rng = np.random.default_rng(WINDOW_SEED)

    def draw(high: int, rows: int) -> np.ndarray:
        return rng.integers(0, high, rows)

    batches = random_windows(train, stage.context, stage.rows, draw, device)
    steps = fit(stage, loss, make_optimizer(draft, WEIGHT_DECAY), batches, log)

    target.to(torch.bfloat16)
    draft.eval().to(torch.bfloat16)
    copy_target(args.pair, args.out)
    save_model(draft, tokenizer, args.out / "draft")
    scores = score_ranges(evaluate(target, draft, val, stage.context, device))
    log(json.dumps(scores))
    report["extension"] = {"steps": steps, "seconds": stage.seconds, "eval": scores}
    save_report(report, args.out)


if __name__ == "__main__":
    main()
