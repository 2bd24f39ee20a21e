"""The benches of rollouts on the embedded pair: how fast they decode, and whether replay agrees with them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specq.inputs import Models, Scales
    from specq.prompts import Prompt


def _inputs(count: int, prompt_tokens: int, device: str) -> "tuple[Models, list[Prompt], Scales]":
    """The embedded pair, held-out prompts, and calibrated scales of the formats that need some."""
    from specq.config import RolloutConfig
    from specq.inputs import calibrate, choose_prompts, load_models, prompt_source
    from specq.kv import FORMATS
    from specq.progress import Reporter
    from specq.prompts import read_records

    config = RolloutConfig(num_prompts=count, prompt_tokens=prompt_tokens, output_tokens=64, device=device)
    quiet = Reporter(quiet=True)
    _, models = load_models(config, quiet)
    prompts, spare = choose_prompts(config, models, *read_records(prompt_source(config)), quiet)
    return models, prompts, calibrate(config, models, FORMATS, prompts, spare, quiet)


def bench_rollout(device: str = "cpu") -> dict:
    """Tokens per second of speculative decoding per KV format: 16 prompts x 128 + 64 tokens together, K = 4, T = 1."""
    from specq.acceptance import Rule
    from specq.kv import FORMATS, get_format
    from specq.replay import Arm, Setting
    from specq.rollout import roll_out
    from specq.sampling import Transform

    models, prompts, scales = _inputs(16, 128, device)
    setting = Setting(Transform(), Transform(), Rule(), models.vocabulary, 0, scales)
    out = {}
    for fmt in FORMATS:
        made = roll_out(
            models.target, models.draft, prompts, Arm.of(fmt, get_format("bf16")), setting, k=4, max_tokens=64
        )
        tokens = sum(t.positions for t in made.texts)
        out[fmt.name] = {
            "tokens_per_second": tokens / (made.seconds["draft"] + made.seconds["verify"]),
            "emitted_per_cycle": tokens / int(made.ends.sum()),
            "kv_bytes_per_token": made.kv_bytes["target"],
        }
    return {"rollout": out, "device": device, "k": 4}


def bench_agreement(texts: str = "40", tokens: str = "32") -> dict:
    """Every format and rule at K = 1, 4, 8: are cycles and S_k those that replay gives for the same tokens?"""
    from dataclasses import asdict

    from specq.acceptance import Rule
    from specq.agreement import compare, joint
    from specq.kv import FORMATS, get_format
    from specq.ngram import NgramLookup
    from specq.replay import Arm, Setting, score_texts
    from specq.rollout import roll_out
    from specq.sampling import Transform

    models, prompts, scales = _inputs(int(texts), 24, "cpu")
    rules = [Rule(d, v) for d in ("probabilistic", "greedy") for v in ("standard", "strict")]
    cases = [(f, r, k, models.draft) for f in FORMATS for r in rules for k in (1, 4, 8)]
    cases += [(f, Rule(), 4, NgramLookup(1, 3)) for f in FORMATS]
    found = []
    for fmt, rule, k, draft in cases:
        arm = Arm.of(fmt, get_format("bf16"))
        setting = Setting(Transform(), Transform(), rule, models.vocabulary, 0, scales, depth=k)
        made = roll_out(models.target, draft, prompts, arm, setting, k=k, max_tokens=int(tokens), batch=len(prompts))
        found.append(compare(made, score_texts(models.target, draft, made.texts, [arm], setting), rule))
    sampled = [a for a, (_, rule, _, _) in zip(found, cases, strict=True) if rule.draft_sampling == "probabilistic"]
    return {
        "joint": asdict(joint(found)),
        "exact": sum(a.exact for a in found),
        "exact_expected": len(found) - sum(not isinstance(d, NgramLookup) for *_, d in cases) // 2,
        "smallest_p_value": min(a.p_value for a in found),
        "rollouts": len(found),
        "tokens": float(sum(a.ends + a.accepted.sum() for a in found)),
        "cycle_ends": sum(a.ends for a in sampled),
        "cycle_ends_expected": sum(a.ends_expected for a in sampled),
    }
