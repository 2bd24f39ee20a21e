"""Rows of the report about speed and the decision: what the format does to it, point by point and group by group."""

from specq.analysis import BASE
from specq.report.view import FormatView, Row, interval, number, percent, percents, with_interval


def speed_figures(view: FormatView) -> list[Row]:
    """Speedups now and recommended, the gain from changing K, and the format against BF16."""
    curve, gain, name = view.curves[0], view.recommendation["speedup"], view.label
    at = f"batch {curve['batch']}, context {curve['context']}"

    def speedup(key: str, k: int, whose: str, when: str) -> Row:
        value, bounds = f"{curve[key][k]:.3f}x", interval(curve[f"{key}_ci95"][k], 3, sign=False)
        return f"speedup at K = {k}, {whose} {when}", value, bounds, f"over plain {whose} decoding; {at}"

    rows = [] if view.is_baseline else [speedup("speedup_bf16", view.current, "BF16", "now")]
    rows.append(speedup("speedup", view.current, name, "now"))
    if view.recommended != view.current:
        rows.append(speedup("speedup", view.recommended, name, "recommended"))
        change = percent(gain["retuning_gain"]), percents(gain["ci95"])
        rows.append(("gain from changing K", *change, "tokens per second; the choice of K included"))
    return rows if view.is_baseline else rows + _against_bf16(view, at)


def _against_bf16(view: FormatView, at: str) -> list[Row]:
    """The format's speed over BF16's: its two parts at one K, what not retuning loses, each at its best, and the room."""
    name, rec = view.label, view.recommendation
    parts, kept, room = rec["break_even"], rec["speedup"]["kept_bf16_k"], rec["capacity"]
    k, both = parts["k"], "over BF16 at the same K"
    emitted = number(parts["emitted_ratio"], 4, False), interval(parts["emitted_ratio_ci95"], 4, False)
    speed = number(parts["speed_ratio"], 4, False), interval(parts["speed_ratio_ci95"], 4, False)
    rows = [
        (f"tokens per cycle at K = {k}", *emitted, f"{both}: what acceptance does"),
        (f"time per cycle at K = {k}", number(parts["cycle_time_ratio"], 4, False), "", f"{both}: what step times do"),
        (f"speed at K = {k}", *speed, f"{both}; {at}"),
        (
            f"lost by keeping BF16's best K = {kept['k']}",
            percent(kept["loss"]),
            percents(kept["ci95"]),
            "of the format's speed; both choices of K included",
        ),
    ]
    ratio = rec["cost"]["details"].get("tokens_per_second_over_bf16_at_best")
    if ratio:
        value, bounds = with_interval(ratio, 3, sign=False)
        rows.append((f"{name} over BF16, each at its best K", f"{value}x", bounds, "tokens per second"))
    if room:
        fit = f"{room['bf16_sequences']:,} in BF16; {room['context']:,} tokens each, {room['server']}"
        rows.append((f"sequences that fit in {name}", f"{room['sequences']:,}", "", fit))
        if room["tokens_per_second_over_bf16"] is not None and room["batch"] != room["bf16_batch"]:
            value = f"{number(room['tokens_per_second_over_bf16'], 3, False)}x"
            batches = f"batch {room['batch']} against {room['bf16_batch']}: larger batch and other cycle together"
            rows.append(("tokens per second of a full server", value, interval(room["ci95"], 3, False), batches))
    return rows


def operating_rows(view: FormatView) -> list[Row]:
    """(batch, context, BF16's K, the format's K, speedup, emitted ratio, cycle-time ratio, tokens per second over BF16,
    interval) of every operating point, the one decided for first."""
    rows = []
    for c in view.curves:
        parts = c["break_even"]
        bounds = percents(None if b is None else b - 1 for b in c["over_bf16_ci95"])
        rows.append(
            (
                str(c["batch"]),
                f"{c['context']:,}",
                str(c["recommended_bf16"]),
                str(c["recommended"]),
                f"{c['speedup'][c['recommended']]:.2f}x",
                number(parts["emitted_ratio"], 4, sign=False),
                number(parts["cycle_time_ratio"], 4, sign=False),
                percent(c["over_bf16"] - 1),
                bounds,
            )
        )
    return rows


def group_rows(view: FormatView) -> list[Row]:
    """(group, documents, mu BF16, mu format, own K, speed lost by the common K, interval), then all texts together: token
    by token, as a server counts, and as the mean over prompts. Empty without groups."""
    groups = view.decision["groups"]
    if not groups:
        return []
    rows = [
        (
            g["name"],
            str(g["documents"]),
            number(g["mu_bf16"], 3, False),
            number(g["mu"], 3, False),
            str(g["best"]),
            percent(g["loss"]),
            percents(g["loss_ci95"]),
        )
        for g in groups
    ]
    k, documents = groups[0]["k"], str(sum(g["documents"] for g in groups))
    tokens = (view.mu(arm)[k]["value"] for arm in (BASE, view.arm))
    prompts = (view.summary(arm).get("mu_accepted_prompt_mean", {}).get(str(k)) for arm in (BASE, view.arm))
    rows.append(
        ("all, token-weighted", documents, *(number(x, 3, False) for x in tokens), str(view.recommended), "", "")
    )
    return [*rows, ("all, mean over prompts", documents, *(number(x, 3, False) for x in prompts), "", "", "")]
