"""Train the tiny target and its draft on one accelerator, within wall-clock budgets.

The target is trained with cross-entropy, first on windows of 1024 tokens and then on windows of 8192. The
draft is distilled from the frozen target on windows of 1024 tokens: first by KL divergence, then by total
variation, whose complement is the acceptance rate of speculative sampling.

DATA holds train.xz, val.xz and tokenizer/ (see build_corpus.py). OUT receives target/, draft/ and
report.json. Run extend.py afterwards: until then the draft is poor beyond 1024 tokens.
"""

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable

import numpy as np
import torch
from common import (
    DRAFT_SIZES,
    SMOKE_SHRINK,
    SMOKE_VAL_TOKENS,
    TARGET_SIZES,
    Log,
    build_model,
    encode,
    load_tokenizer,
    random_windows,
    run_parser,
    save_model,
    save_report,
)
from training import (
    Loss,
    Stage,
    cross_entropy,
    distillation_loss,
    evaluate,
    fit,
    kl_divergence,
    logits_of,
    make_optimizer,
    total_variation,
)
from transformers import LlamaForCausalLM

TARGET_SECONDS, LONG_SECONDS, DRAFT_SECONDS = 300.0, 45.0, 120.0
KL_SHARE = 0.75  # of the draft's budget; total variation has the rest

TARGET_STAGE = Stage("target", TARGET_SECONDS, context=1024, rows=128, rate=3e-3, warmup=200, floor=0.1)
LONG_STAGE = Stage("target-long", LONG_SECONDS, context=8192, rows=8, rate=3e-4, warmup=1, floor=0.05)
KL_STAGE = Stage("draft-kl", DRAFT_SECONDS * KL_SHARE, context=1024, rows=32, rate=5e-3, warmup=100, floor=0.1)
TV_STAGE = Stage("draft-tv", DRAFT_SECONDS * (1 - KL_SHARE), context=1024, rows=32, rate=6e-4, warmup=1, floor=0.05)

WEIGHT_DECAY = 0.1  # matrices only
EMBEDDING_STD = 0.03  # of the draft's first embedding
EVAL_CONTEXT = 4096
EVAL_TOKENS = 40 * EVAL_CONTEXT
SEED = 0


def language_loss(model: torch.nn.Module, device: torch.device) -> Loss:
    """Cross-entropy of a model on windows [B, T + 1], in bfloat16 autocast."""

    def loss(windows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = logits_of(model, windows)
        return cross_entropy(logits, windows)

    return loss


@torch.no_grad()
def seed_draft_embedding(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Set the draft's tied embedding to the target's principal directions, scaled to EMBEDDING_STD."""
    weight = target.model.embed_tokens.weight.float()
    left, singular, _ = torch.linalg.svd(weight - weight.mean(0), full_matrices=False)
    width = draft.config.hidden_size
    projected = left[:, :width] * singular[:width]
    draft.model.embed_tokens.weight.copy_(projected / projected.std() * EMBEDDING_STD)


def stages(args: argparse.Namespace) -> tuple[Stage, ...]:
    """The four stages with the budgets of the command line."""
    draft_seconds = args.draft_seconds
    chosen = (
        dataclasses.replace(TARGET_STAGE, seconds=args.target_seconds),
        dataclasses.replace(LONG_STAGE, seconds=args.long_seconds),
        dataclasses.replace(KL_STAGE, seconds=draft_seconds * KL_SHARE),
        dataclasses.replace(TV_STAGE, seconds=draft_seconds * (1 - KL_SHARE)),
    )
    return tuple(stage.for_smoke_test() for stage in chosen) if args.smoke_test else chosen


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = run_parser(__doc__, {"data": "what build_corpus.py made", "out": "folder of the results"})
    budget = dict(type=float, help="seconds (default: %(default)s)")
    parser.add_argument("--target-seconds", default=TARGET_SECONDS, **budget)
    parser.add_argument("--long-seconds", default=LONG_SECONDS, **budget)
    parser.add_argument("--draft-seconds", default=DRAFT_SECONDS, **budget)
    return parser.parse_args()


def main() -> None:
    """Train, evaluate and save the pair."""
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    log = Log()
    args.out.mkdir(parents=True, exist_ok=True)

    def compiled(function: Callable) -> Callable:
        return torch.compile(function) if args.compile else function

    tokenizer = load_tokenizer(args.data)
    train = encode(args.data / "train.xz", tokenizer)
    val = encode(args.data / "val.xz", tokenizer)
    log(f"train tokens {len(train) / 1e6:.1f}M val {len(val) / 1e3:.0f}k")

    target = build_model(tokenizer, TARGET_SIZES).to(device)
    draft = build_model(tokenizer, DRAFT_SIZES).to(device)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) / 1e6 for model in (target, draft)]
    log(f"params target {sizes[0]:.2f}M draft {sizes[1]:.2f}M")

    generator = torch.Generator().manual_seed(SEED)
    steps = {}

    def draw(high: int, rows: int) -> np.ndarray:
        return torch.randint(high, (rows,), generator=generator).numpy()

    def run(stage: Stage, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        batches = random_windows(train, stage.context, stage.rows, draw, device)
        steps[stage.name.replace("-", "_")] = fit(stage, loss, optimizer, batches, log)

    target_stage, long_stage, kl_stage, tv_stage = stages(args)
    optimizer = make_optimizer(target, WEIGHT_DECAY)
    run(target_stage, language_loss(compiled(target), device), optimizer)
    run(long_stage, language_loss(target, device), optimizer)
    target.eval().requires_grad_(False)
    save_model(copy.deepcopy(target).to(torch.bfloat16), tokenizer, args.out / "target")

    seed_draft_embedding(draft, target)
    student = compiled(draft)
    optimizer = make_optimizer(draft, WEIGHT_DECAY)
    for stage, divergence in ((kl_stage, kl_divergence), (tv_stage, total_variation)):
        run(stage, distillation_loss(target, student, compiled(divergence), device), optimizer)

    target.to(torch.bfloat16)
    draft.eval().to(torch.bfloat16)
    save_model(draft, tokenizer, args.out / "draft")
    context, tokens = EVAL_CONTEXT, EVAL_TOKENS
    if args.smoke_test:
        context, tokens = EVAL_CONTEXT // SMOKE_SHRINK, SMOKE_VAL_TOKENS
    scores = evaluate(target, draft, val[:tokens], context, device).mean(1).tolist()
    names = ("val_ce_target", "val_ce_draft", "expected_acceptance_T1", "top1_agreement")
    training = dict(
        zip(names, scores, strict=True),
        steps=steps,
        train_tokens=len(train),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        torch=torch.__version__,
        seconds=log.seconds(),
    )
    log(json.dumps(training))
    save_report({"training": training, "log": log.lines}, args.out)


if __name__ == "__main__":
    main()
