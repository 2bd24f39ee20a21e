"""report.html: one self-contained page for one KV format, the answer first.

`page` turns the study's JSON into rows of text; `template.html.j2` lays them out and escapes everything, control characters of
names included.
"""

import base64
import shlex
from pathlib import Path

from specq.analysis import BASE, NULL
from specq.errors import printable
from specq.files import write_text
from specq.report.decision_rows import group_rows, operating_rows, speed_figures
from specq.report.view import UNKNOWN, FormatView, Row, interval, number, percent, percents, with_interval

CAPTIONS = {
    "acceptance_curve": "Left: mean accepted tokens per cycle (mu) for every K; its intervals say how well these prompts"
    " fix mu itself, not the difference of the two, which is far better known (next plot). Right: the probability that the"
    " first k drafted tokens are all accepted (marginal), and that the k-th is once those before it were (conditional).",
    "mu_shift": "Shift of mu against BF16, paired prompt by prompt. Believe a shift whose interval keeps clear of the grey"
    " band, which is what another order of the same BF16 arithmetic does. Triangles: the draft's cache is in the format too.",
    "speedup_vs_k": "Speedup at the batch size and context decided for; bands include the prompts' spread and that of the step"
    " times, where they were measured. Above the line at 1, speculation pays. Lower panels: the format at every batch size.",
    "break_even": "Tokens per cycle against time per cycle, format over BF16: above the line the format is faster. Filled"
    " points have each format at its best K, as the decision has; hollow ones both at the K in use now, all at one height:"
    " acceptance does not depend on batch and context here.",
    "sensitivity": "What would turn the decision: the format's acceptance rates moved (left), the draft's step times multiplied"
    " (middle), other batch sizes (right). Top: tokens per second over BF16, each at its best K; bottom: that K.",
    "ratio_histogram": "Left: the probability with which each drafted token is accepted; what is exactly 1 stands apart"
    " because it is so frequent. Right: how far the acceptance probability moves at single positions; changes of"
    " both signs cancel in mu.",
    "context": "Acceptance probability of one drafted token given its prefix, by context length; below, its change against"
    " BF16. If the format's error grew with context, the lower points would leave 0 towards the right.",
}


def write_html(path: Path, study: dict, recommendation: dict, plots: dict[str, Path]) -> None:
    """Write the page of one format; `plots` holds the PNG files to embed, by name."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specq.report", "."),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("template.html.j2")
    text = template.render(page(FormatView(study, recommendation)), figures=_figures(plots))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _figures(plots: dict[str, Path]) -> list[dict]:
    def uri(file: Path) -> str:
        return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode("ascii")

    return [{"name": n, "uri": uri(plots[n]), "caption": c} for n, c in CAPTIONS.items() if n in plots]


def page(view: FormatView) -> dict:
    """Everything the template shows, as text."""
    rec, study = view.recommendation, view.study
    k = view.shown_k
    return {
        "title": f"{rec['pair']}: {view.name} KV cache",
        "headline": headline(view),
        "decision": rec["decision"],
        "key_figures": key_figures(view),
        "warnings": rec["warnings"],
        "verdicts": rec["verdicts"],
        "vllm": _vllm(rec["vllm"]),
        "k": k,
        "current": view.current,
        "recommended": view.recommended,
        "schedule": rec["recommended_schedule"],
        "names": arm_names(view),
        "mu_rows": mu_rows(view),
        "shift_rows": shift_rows(view),
        "own_text_only": view.own_text_only,
        "survival_rows": survival_rows(view),
        "health_rows": health_rows(view),
        "operating_rows": operating_rows(view),
        "break_even_k": view.curves[0]["break_even"]["k"],
        "group_rows": group_rows(view),
        "pair_rows": pair_rows(study),
        "setting_rows": setting_rows(view),
        "prompt_rows": prompt_rows(study),
        "skipped": study["prompts"]["skipped"],
        "cost_rows": [("source", rec["cost"]["source"]), *_flat(rec["cost"]["details"])],
        "environment_rows": _flat(study["environment"]),
        "timing_rows": [(name, f"{seconds:.1f} s") for name, seconds in study.get("timings_seconds", {}).items()],
    }


def headline(view: FormatView) -> str:
    """What happens to mu, whether that is resolved, which K, and what it gains; with random weights that this says nothing."""
    if view.withheld:
        return f"{view.recommendation['decision']}."
    k, name = view.shown_k, view.name
    base, mine = (number(view.mu(arm)[k]["value"], 3, sign=False) for arm in (BASE, view.arm))
    shift, said = view.shift, f"{number(view.shift['value'])} {interval(view.shift['ci95'])}"
    if view.is_baseline:
        first = f"BF16, the baseline itself, has {mine} tokens accepted per cycle at K = {k}."
    elif shift["ci95"][0] is None:
        value = number(shift["value"])
        first = f"{name} shifts mean accepted tokens per cycle by {value} at K = {k}; without an interval, nothing is resolved."
    elif shift["significant"]:
        first = f"{name} changes mean accepted tokens per cycle beyond the noise floor: {said} at K = {k} ({base} to {mine})."
    else:
        first = f"{name} makes no resolved difference to mean accepted tokens per cycle: {said} at K = {k} ({base} to {mine})."
    return f"{first} {_advice(view, view.recommendation['speedup'])}"


def _advice(view: FormatView, speedup: dict) -> str:
    best, current = view.recommended, view.current
    by = f"(step times: {view.recommendation['cost']['source']})"
    if best == current:
        return f"With {view.label}, num_speculative_tokens = {current} stays the best choice {by}."
    change = f"num_speculative_tokens = {best} rather than {current}"
    if best == 0:
        change = f"dropping speculation (K = 0 rather than {current})"
    gain = f"{percent(speedup['retuning_gain'])} {percents(speedup['ci95'])}"
    return f"With {view.label}, {change} gives {gain} tokens per second {by}."


def key_figures(view: FormatView) -> list[Row]:
    """(figure, value, 95 % interval, remark) of what a reader wants to know first."""
    rec, k = view.recommendation, view.shown_k
    text = "own text" if view.own_text_only else f"{rec['mu_shift']['text']} text"
    mu = [(f"mu, accepted per cycle at K = {k}, BF16", *with_interval(view.mu(BASE)[k], 3, False), "")]
    if not view.is_baseline:
        resolved = "beyond the noise floor" if view.shift["significant"] else "not resolved"
        inherited = view.shifts(view.inherited_arm).get(k, UNKNOWN)
        mu += [
            (f"mu, accepted per cycle at K = {k}, {view.name}", *with_interval(view.mu(view.arm)[k], 3, False), ""),
            ("shift of mu (accepted)", *with_interval(view.shift), f"{resolved}; {text}, paired"),
            ("shift with the draft's cache in the format too", *with_interval(inherited), f"arm {view.inherited_arm}"),
        ]
    if view.own_shift:
        own = view.own_shift
        resolved = "beyond the noise floor" if own["significant"] else "not resolved"
        mu.append(("shift on own text", *with_interval(own), f"{resolved}; K = {own['k']}{view.parting}"))
    null = view.null_shifts().get(k, UNKNOWN)
    mu.append(("null arm's shift (noise floor)", *with_interval(null, 6), "BF16 again, other order of arithmetic"))
    return mu + speed_figures(view)


def _vllm(block: dict | None) -> dict | None:
    """The command line for a shell, one option per line."""
    if block is None:
        return None
    command = "vllm serve"
    for argument in block["serve_args"]:
        command += (" \\\n    " if argument.startswith("--") else " ") + shlex.quote(argument)
    rates = ", ".join(number(r, 4, sign=False) for r in block["synthetic_acceptance_rates"])
    return {"version": block["version"], "command": command, "rates": rates, "plain": not block["speculative_config"],
            "now": block.get("current_command"), "then": block.get("changed_command")}  # fmt: skip


def arm_names(view: FormatView) -> list[str]:
    """Headings of the compared arms: the baseline alone when it is the format under test."""
    return ["BF16"] if view.is_baseline else ["BF16", view.name]


def _compared(view: FormatView) -> list[str]:
    return [BASE] if view.is_baseline else [BASE, view.arm]


def mu_rows(view: FormatView) -> list[tuple[int, list[str]]]:
    """(K, cells) with accepted, its interval and emitted per compared arm."""
    tables = [view.mu(arm) for arm in _compared(view)]
    return [
        (k, [cell for t in tables for cell in (*with_interval(t[k], 3, False), number(_plus_one(t[k]), 3, False))])
        for k in tables[0]
    ]


def _plus_one(entry: dict) -> float | None:
    return None if entry["value"] is None else entry["value"] + 1


def shift_rows(view: FormatView) -> list[tuple[int, list[str]]]:
    """(K, cells) with the shift, its error, the interval beyond the null arm, and the other arms' shifts."""
    null, both = view.null_shifts(), view.shifts(view.inherited_arm)
    return [
        (
            k,
            [
                *with_interval(entry),
                number(entry["se"], sign=False),
                interval(entry["minus_null"]["ci95"]),
                "yes" if entry["significant"] else "no",
                *with_interval(both[k]),
                number(null[k]["value"], 6),
            ],
        )
        for k, entry in view.shifts(view.arm).items()
    ]


def survival_rows(view: FormatView) -> list[Row]:
    """(k, marginal and conditional per compared arm) at the K shown."""
    columns = [values for arm in _compared(view) for values in view.survival(arm)]
    return [(str(i), *(number(v, 4, sign=False) for v in row)) for i, row in enumerate(zip(*columns, strict=True), 1)]


def health_rows(view: FormatView) -> list[Row]:
    """(arm, mean alpha, mean ratio, KL, top-1 agreement, entropy) of every arm of this format."""
    keys = ("alpha_mean", "ratio_mean", "kl_from_baseline_mean", "top1_agreement_with_baseline", "entropy_mean")
    arms = dict.fromkeys((BASE, NULL, view.arm, view.inherited_arm))
    found = {arm: view.summary(arm) for arm in arms if view.summary(arm)}
    digits = (4, 4, 6, 4, 4)
    return [
        (a, *(number(s.get(n), d, sign=False) for n, d in zip(keys, digits, strict=True))) for a, s in found.items()
    ]


def pair_rows(study: dict) -> list[Row]:
    """(what, target, draft); a draft that runs no model has nothing to fill in."""
    target, draft = study["pair"]["target"], study["pair"]["draft"]
    if "geometry" not in draft:
        nothing = {n: {"codes": 0, "scales": 0} for n in target["kv_bytes_per_token"]}
        draft = dict.fromkeys(target, "none") | {"parameters": 0, "kv_bytes_per_token": nothing} | draft
        draft["geometry"] = dict.fromkeys(target["geometry"], "none")
    sides = [target, draft]
    rows = [(n.replace("_", " "), *(str(s[n]) for s in sides)) for n in ("source", "checkpoint_dtype", "compute_dtype")]
    rows.append(("parameters", *(f"{s['parameters']:,}" for s in sides)))
    rows += [(n.replace("_", " "), *(str(s["geometry"][n]) for s in sides)) for n in sides[0]["geometry"]]
    for name in sides[0]["kv_bytes_per_token"]:
        parts = [s["kv_bytes_per_token"][name] for s in sides]
        sizes = (
            f"{p['codes'] + p['scales']:,}" + (f" ({p['scales']:,} of it scales)" if p["scales"] else "") for p in parts
        )
        rows.append((f"KV bytes per token, {name}", *sizes))
    return rows


def setting_rows(view: FormatView) -> list[Row]:
    """(setting, value) of sampling, rule, formats, scales and statistics."""
    study, config = view.study, view.study["configuration"]
    rounded = [f"rounded to FP8 with {n}" for n, yes in study.get("query_rounded_to_fp8", {}).items() if yes]
    bootstrap, check = study["bootstrap"], study["text_sampled_from_target"]
    excess = f"{number(check['sum_b_minus_a_mean'], 3)}, standard error {number(check['se'], 3, sign=False)}"
    return [
        ("sampling", ", ".join(f"{n} {v}" for n, v in study["sampling"].items())),
        ("acceptance rule", study["rule"]),
        ("draft's sampling transform", config["draft_transform"]),
        ("query dtype", ", ".join([config["query_dtype"], *rounded])),
        ("vLLM's name of the format", view.recommendation["vllm_kv_cache_dtype"] or "none"),
        *((f"scales, {n}", source) for n, source in study["scales"].items()),
        *((f"values saturated by layer, {n}", str(c)) for n, c in study["saturated_per_layer"].items()),
        ("text scored", f"{config['text']}; {study['tokens']['scored']} tokens"),
        ("texts ended by EOS", str(study["tokens"]["ended_by_eos"])),
        ("sum of b - a per document", f"{excess}; near 0 where the target sampled the text"),
        ("intervals", f"{bootstrap['draws']} bootstrap draws of {bootstrap['documents']} documents"),
        ("seed", str(bootstrap["seed"])),
    ]


def prompt_rows(study: dict) -> list[Row]:
    """(what became of the prompts, how many)."""
    counts = {n: v for n, v in study["prompts"].items() if n not in ("skipped", "shapes")}
    rows = [(n.replace("_", " "), f"{v:.1f}" if isinstance(v, float) else str(v)) for n, v in counts.items()]
    return [*rows, *((f"records with {key}", str(n)) for key, n in study["prompts"]["shapes"].items())]


def _flat(values: dict, prefix: str = "") -> list[Row]:
    """Nested settings as (name, text); lists of records are only counted, study.json holds them."""
    rows: list[Row] = []
    for name, value in values.items():
        label = prefix + str(name).replace("_", " ")
        if isinstance(value, dict):
            rows += _flat(value, f"{label}: ")
        elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
            rows.append((label, f"{len(value)} (in study.json)"))
        else:
            rows.append((label, ", ".join(map(_plain, value)) if isinstance(value, list) else _plain(value)))
    return rows


def _plain(value: object) -> str:
    return "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
