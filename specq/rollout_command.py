"""What `specq rollout` does around the rollouts: inputs, one arm after the other, their files, the answer in the terminal.

The directory holds texts.parquet, cycles.parquet (one row per arm, prompt, cycle and drafted token) and rollout.json. What
was decoded or replayed when a run is interrupted lies in pieces in `<out>.partial/`, as a study's does.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from specq import files, pairs
from specq.command import fingerprints, format_names, refuse_both
from specq.config import RolloutConfig, make_config, same_study
from specq.device import on_device
from specq.errors import SpecqError
from specq.progress import Reporter
from specq.terminal import Terminal

KIND = "rollout"
SUMMARY = f"{KIND}.json"


def rollout_command(
    options: dict[str, Any],
    dtypes: list[str],
    out: Path | None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    quiet: bool = False,
) -> None:
    """Run rollouts, or show the finished ones when their directory already holds this very configuration."""
    refuse_both(overwrite, resume)
    pair = pairs.find(options["pair"], options["target"], options["draft"])
    from specq.kv import get_format

    names = format_names(pair, dtypes)
    given = {k: v for k, v in options.items() if v is not None}
    if given.get("draft_dtype", "same") != "same":
        given["draft_dtype"] = get_format(given["draft_dtype"]).name
    defaults = {k: v for k, v in pair.defaults.items() if k in RolloutConfig.model_fields}
    given = defaults | given | {"dtypes": tuple(names), "pair": pair.name}
    given |= fingerprints(pair, bool(options.get("random_weights")))
    config = make_config(RolloutConfig, **given)
    out = Path(os.path.normpath(out or Path("runs") / _folder(pair, config, names)))
    if not out.name:
        raise SpecqError(f"--out {out} is no directory that a rollout could be renamed to; name a new one")
    files.refuse_foreign(out, KIND)
    config = on_device(config, options["device"], out, KIND, overwrite=overwrite)
    from specq.shards import refuse_mixing, tidy

    if (out / SUMMARY).is_file() and not overwrite:
        finished = files.read_json(out / SUMMARY)
        if not isinstance(finished, dict) or not same_study(config, finished.get("configuration")):
            raise SpecqError(
                f"{out} holds a rollout of another configuration; choose another --out, or --overwrite to replace it"
            )
        tidy(out, KIND)  # it may have been killed between renaming and tidying up
    else:
        refuse_mixing(out, lambda old: same_study(config, old.configuration), overwrite, resume, KIND)
        run_rollouts(config, out, overwrite, Reporter(quiet), resume=resume)
    show(out)


def _folder(pair: pairs.Pair, config: RolloutConfig, names: dict[str, str]) -> str:
    """The default directory's name: pair, formats and K, and the draft or its format where they are not the default ones."""
    parts = ["rollout", pair.name, *(names[n] for n in config.dtypes), f"k{config.k}"]
    if config.draft and config.pair:  # without a registered pair its name has the draft's already
        parts.append(f"draft-{Path(config.draft).name}")
    if config.draft_dtype != RolloutConfig.model_fields["draft_dtype"].default:
        parts.append(f"draft-{config.draft_dtype}")
    return "-".join(parts)


def run_rollouts(
    config: RolloutConfig, out: Path, overwrite: bool, reporter: Reporter, *, resume: bool = False
) -> None:
    """Roll every format out and write `out`. Raises SpecqError for all that the user can mend; finished pieces are kept."""
    from specq.acceptance import Rule
    from specq.agreement import compare
    from specq.inputs import (
        calibrate,
        choose_prompts,
        load_models,
        prompt_source,
        prompt_warnings,
        resolve_sampling,
        round_query_policy,
    )
    from specq.kv import get_format
    from specq.measure import Work, run_of, score
    from specq.prompts import read_records
    from specq.replay import Arm, Setting
    from specq.rollout_stage import roll
    from specq.shards import workspace
    from specq.summary import describe, environment, peak_memory, prompt_block

    records, report = read_records(prompt_source(config), config.undecodable)
    pair, models = load_models(config, reporter)
    prompts, spare = choose_prompts(config, models, records, report, reporter)
    rule = Rule(config.draft_sampling, config.verify)
    arms = []
    for name in config.dtypes:
        fmt = get_format(name)
        arms.append(Arm.of(fmt, fmt if config.draft_dtype == "same" else get_format(config.draft_dtype)))
    run = run_of(config, models, kind=KIND)
    with workspace(out, run, reporter, overwrite=overwrite, resume=resume) as shards:
        formats = list(dict.fromkeys(p.format for a in arms for p in (a.target, a.draft)))
        scales = calibrate(config, models, formats, prompts, spare, reporter)
        setting = Setting(
            *resolve_sampling(config, models.target), rule, models.vocabulary, config.seed, scales,
            round_query_policy(config), config.k,
        )  # fmt: skip
        work = Work(config, models, setting, prompts, shards, reporter)
        rollouts, blocks = [], {}
        # the replay's draft reads every token of a text but the last
        draft_positions = min([m.geometry.max_positions for m in models.by_role.values()], default=0)
        for arm in arms:
            made, agreement = roll(work, arm), None
            if config.replay and max(len(t.tokens) for t in made.texts) <= draft_positions + 1:
                told = score(work, f"replay-{arm.name}", made.texts, [arm], f"the rollout of {arm.name}")
                agreement = compare(made, told, rule)
            rollouts.append(made)
            blocks[arm.name] = summarise(made, models.target.geometry, agreement)
        folder = shards.folder.parent
        files.write_texts(folder / "texts.parquet", [t for r in rollouts for t in r.texts])
        files.write_parquet(folder / "cycles.parquet", cycle_columns(rollouts))
        files.write_json(
            folder / SUMMARY,
            {
                "schema_version": 1,
                "configuration": config.model_dump(mode="json"),
                "environment": environment(models.target),
                "pair": {"name": pair.name}
                | {role: describe(getattr(pair, role).source, m, config) for role, m in models.by_role.items()},
                "draft_kind": {pairs.SELF: "the target itself", pairs.NGRAM: "n-gram lookup"}.get(
                    pair.draft.source, "model"
                ),
                "sampling": asdict(setting.transform),
                "rule": rule.name,
                "k": config.k,
                "arms": blocks,
                "peak_memory_gb": peak_memory(models.target),
                "prompts": prompt_block(report, prompts),
                "warnings": [
                    *(["random weights: acceptance says nothing about the pair"] if config.random_weights else []),
                    *dict.fromkeys(note for m in models.by_role.values() for note in m.notes),
                    *prompt_warnings(config, prompts, report),
                    *_short_texts(rollouts, blocks),
                    *work.notes,
                ],
            },
        )


def _short_texts(rollouts: Sequence[Any], blocks: Mapping[str, dict]) -> list[str]:
    """A warning for every arm whose last cycles, which the ends of texts cut, weigh on its steady mu."""
    from specq.chain import CUT_WARNING

    said = []
    for r, block in zip(rollouts, blocks.values(), strict=True):
        whole = block["engine"]["accepted"] / block["cycles"] if block["cycles"] else 0.0
        steady = block["mu_accepted"]
        if steady is not None and abs(steady - whole) > CUT_WARNING * whole:
            positions = sum(t.positions for t in r.texts) / len(r.texts)
            said.append(
                f"texts of {positions:.0f} positions on average are short for K = {r.k}: the cut last cycles move the steady mu"
                f" of {r.arm.name} from {whole:.3f}, whole cycles counted as a server does, to {steady:.3f}"
            )
    return said


def cycle_columns(rollouts: Sequence[Any]) -> dict[str, np.ndarray]:
    """cycles.parquet: arm, prompt id and the logged columns of every rollout, one row per drafted token."""
    parts: dict[str, list[np.ndarray]] = {}
    for r in rollouts:
        ids = np.array([t.prompt.id for t in r.texts])
        rows = r.log | {"arm": np.full(len(r.log["prompt"]), r.arm.name), "prompt": ids[r.log["prompt"]]}
        for name in ("arm", "prompt", *(n for n in r.log if n != "prompt")):
            parts.setdefault(name, []).append(rows[name])
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def summarise(rollout: Any, geometry: Any, agreement: Any) -> dict:  # noqa: ANN401 - torch stays unloaded here
    """The JSON block of one arm.

    `mu_accepted` is steady (drafts in the text per cycle end in it), `mu_accepted_useful` charges the cycle that EOS cuts
    short, `engine` counts as a server does: cycles that drafted, with what they accepted beyond EOS and the length limit.
    """
    from specq.counters import CycleCounts
    from specq.kv import get_format

    r = rollout
    accepted, ends, cycles = int(r.accepted.sum()), int(r.ends.sum()), int(r.cycles.sum())
    drafted, log = len(r.log["token"]), r.log
    engine = CycleCounts(
        cycles - int(r.undrafted.sum()),
        drafted,
        int(log["accepted_engine"].sum()),
        tuple(int((log["accepted_engine"] & (log["draft_position"] == i + 1)).sum()) for i in range(r.k)),
    )
    tokens = sum(t.positions for t in r.texts)
    cut_by_eos = int((r.cycles - r.ends)[[t.ended for t in r.texts]].sum())
    seconds = sum(r.seconds[n] for n in ("draft", "verify"))
    bf16 = sum(geometry.kv_bytes_per_token(get_format("bf16")))
    return {
        "prompts": len(r.texts),
        "tokens": sum(len(t.response) for t in r.texts),
        "ended_by_eos": sum(t.ended for t in r.texts),
        "cycles": cycles,
        "cycles_without_draft": int(r.undrafted.sum()),
        "cycles_out_of_positions": int(r.out_of_positions.sum()),
        "drafted": drafted,
        "accepted": accepted,
        "mu_accepted": accepted / ends if ends else None,
        "mu_accepted_useful": tokens / (ends + cut_by_eos) - 1 if ends + cut_by_eos else None,
        "emitted_per_cycle": tokens / ends if ends else None,
        "marginal_survival": (r.accepted.sum(0) / ends).tolist() if ends else None,
        "engine": {
            "drafts": engine.drafts,
            "accepted": engine.accepted,
            "per_position": engine.per_position,
            "mu_accepted": engine.mean_accepted if engine.drafts else None,
        },
        "kv_bytes_per_token": r.kv_bytes,
        "target_kv_share_of_bf16": r.kv_bytes["target"] / bf16,
        "seconds": r.seconds,
        "tokens_per_second": (tokens / seconds) if seconds else None,
        "replay": None if agreement is None else _agreement_block(agreement),
    }


def _agreement_block(a: Any) -> dict:  # noqa: ANN401
    from specq.agreement import ERROR, LEVEL

    return {
        "mu_accepted": a.accepted_expected.sum() / a.ends_expected if a.ends_expected else None,
        "marginal_survival": (a.accepted_expected / a.ends_expected).tolist() if a.ends_expected else None,
        "cycle_ends": a.ends_expected,
        "p_value": a.p_value if a.tested else None,
        "agrees": a.p_value >= LEVEL if a.tested else None,
        "exact_given_text": a.exact,
        "power": {"relative_error": ERROR, "level": LEVEL, "value": a.power},
    }


def show(out: Path) -> None:
    """Print every arm's figures and the paths of the files."""
    console, found = Terminal(), files.read_json(out / SUMMARY)
    for name, b in found["arms"].items():
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for row in _rows(b, found["k"]):
            table.add_row(*map(escape, row))
        console.rule(escape(f"{name}, K = {found['k']}, {found['rule']}, draft: {found['draft_kind']}"), align="left")
        console.print(table)
    for warning in found["warnings"]:
        console.print(f"warning: {warning}", markup=False)
    paths = ", ".join(str(out / n) for n in (SUMMARY, "cycles.parquet", "texts.parquet"))
    console.print(f"files: {paths}", soft_wrap=True, markup=False)


def _rows(b: dict, k: int) -> list[tuple[str, str]]:
    def number(x: float | None, digits: int = 3) -> str:
        return "n/a" if x is None else f"{x:.{digits}f}"

    skipped = f", {b['cycles_without_draft']} without a draft" if b["cycles_without_draft"] else ""
    if b["cycles_out_of_positions"]:
        skipped += f" ({b['cycles_out_of_positions']} because a model's positions had ended)"
    rows = [
        ("accepted per cycle", f"{number(b['engine']['mu_accepted'])} of {k}, as a server counts: beyond EOS included"),
        ("steady, in the text", f"{number(b['mu_accepted'])} per cycle end (emitted {number(b['emitted_per_cycle'])})"),
        ("survival S_1..S_K", " ".join(number(s) for s in b["marginal_survival"] or [])),
        ("cycles", f"{b['cycles']}{skipped}; {b['tokens']} tokens, {b['ended_by_eos']} texts ended by EOS"),
        (
            "KV bytes per token",
            f"target {b['kv_bytes_per_token']['target']:.0f} ({100 * b['target_kv_share_of_bf16']:.0f} % of BF16's), draft"
            f" {b['kv_bytes_per_token']['draft']:.0f}, measured",
        ),
        ("speed here", f"{number(b['tokens_per_second'], 1)} tokens per second"),
    ]
    if r := b["replay"]:
        if r["p_value"] is None:
            verdict = "too few texts for a test"
        else:
            power = "exact" if r["exact_given_text"] else f"power {r['power']['value']:.2f} against a 2 % error"
            verdict = f"{'agrees' if r['agrees'] else 'DISAGREES'}, p = {r['p_value']:.3f} ({power})"
        rows.append(("replay of this text", f"{number(r['mu_accepted'])} per cycle end; {verdict}"))
    return rows
