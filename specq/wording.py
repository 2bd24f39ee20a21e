"""The one line that says what to do, with its evidence."""

from typing import TYPE_CHECKING

from specq.serve_command import read

if TYPE_CHECKING:
    from specq.decision import Capacity, Decision, StudyFacts


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _percents(value: float, interval: list[float]) -> str:
    return f"{_percent(value - 1)} [{100 * (interval[0] - 1):+.1f}, {100 * (interval[1] - 1):+.1f}]"


def sentence(facts: "StudyFacts", made: "Decision", documents: int, source: str, share: float, timing: float) -> str:
    """The decision of one format. share: its KV bytes over BF16's; timing: half-width that timing noise gives `pay`."""
    fmt, best, current = made.format, made.recommended, facts.config.current_k
    where = f"batch {made.at[0]}, context {made.at[1]}"
    by = "step times measured on this machine" if source == "measured" else source
    k = _k_advice(best, current)
    if fmt.name == "bf16":
        return f"{k} at {where}, by {by}"
    if documents < 2:
        return f"measure more: one document shows no spread, so nothing can be decided about {fmt.name}"
    if made.base_at != made.at:
        where = f"{where} (BF16: batch {made.base_at[0]})"
    speed = f"{_percents(made.pay, made.pay_ci95)} tokens per second against BF16, each at its best K"
    evidence = f"{speed}, at {where}, by {by}; its KV cache takes {100 * share:.0f} % of BF16's bytes"
    evidence += _room(made.capacity)
    server = facts.config.vllm_command
    enable, enabling = ("keep", "keeping") if server and read(server).dtype == fmt.name else ("enable", "enabling")
    if made.action == "enable_and_retune":
        return f"{enable} {fmt.name} and retune, {k}: {evidence}"
    if made.action == "enable":
        return f"{enable} {fmt.name}, {k}: {evidence}"
    if made.action == "do_not_enable":
        return f"do not {enable} {fmt.name} for speed: {evidence}. If memory decides, {k}"
    n = made.more_prompts
    if n is not None:
        how = f"about {n} more prompt{'s' * (n != 1)} like these would decide in four studies of five"
    else:
        how = (
            f"more prompts alone would not decide, the step times' noise is {100 * timing:.1f} %: time them more often"
        )
    return f"measure more before {enabling} {fmt.name}, {how}: {evidence}. Meanwhile {k}"


def _k_advice(best: int, current: int) -> str:
    if best == current:
        return f"keep num_speculative_tokens at {best}"
    if best:
        return f"set num_speculative_tokens to {best} (now {current})"
    return "drop speculation (K = 0): no K is better than plain decoding by more than noise and 1 %"


def _room(capacity: "Capacity | None") -> str:
    if capacity is None or not capacity.limits or not (capacity.sequences or capacity.bf16_sequences):
        return ""
    text = f"; on {capacity.server} {capacity.sequences} sequences of {capacity.context} tokens fit"
    text += f" instead of {capacity.bf16_sequences}"
    if capacity.tokens_per_second_over_bf16 is not None and capacity.batch != capacity.bf16_batch:
        text += f", which gives {_percents(capacity.tokens_per_second_over_bf16, capacity.ci95)} tokens per second"
    return text
