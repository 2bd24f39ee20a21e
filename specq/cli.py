"""The command line. Heavy imports happen inside the command that needs them, so that --help is quick."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from specq import __version__
from specq import options as opt
from specq.capacity import RESERVE_GB, UTILISATION
from specq.errors import Interrupted, SpecqError, printable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What a quantized KV cache does to speculative decoding: acceptance, speed, and the best num_speculative_tokens.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(x) for x in text.split(",") if x.strip())
    except ValueError:
        raise SpecqError(f"{option} takes whole numbers separated by commas, not {text!r}") from None


@app.command()
def study(
    pair: opt.Pair = "tiny",
    dtype: Annotated[list[str] | None, typer.Option(help="KV format to compare with BF16; repeat for more.")] = None,
    target: opt.Target = None,
    draft: opt.Draft = None,
    ngram: opt.Ngram = None,
    random_weights: opt.RandomWeights = None,
    prompts: opt.Prompts = None,
    undecodable: opt.Undecodable = None,
    chat: opt.Chat = None,
    num_prompts: opt.NumPrompts = None,
    prompt_tokens: opt.PromptTokens = None,
    output_tokens: opt.OutputTokens = None,
    text: Annotated[str | None, typer.Option(help="Text to score: same, own, both or given.")] = None,
    k_max: Annotated[int | None, typer.Option(help="Largest num_speculative_tokens considered.")] = None,
    current_k: Annotated[int | None, typer.Option(help="num_speculative_tokens in use now.")] = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    draft_sampling: opt.DraftSampling = None,
    verify: opt.Verify = None,
    draft_transform: opt.DraftTransform = None,
    query_dtype: opt.QueryDtype = None,
    calibrate: opt.Calibrate = None,
    cost: Annotated[str | None, typer.Option(help="roofline:[Nx]GPU[@TIMINGS], measured, or a timings file.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes; the first is the one decided for.")] = None,
    context: Annotated[str | None, typer.Option(help="Context lengths; the first is the one decided for.")] = None,
    objective: Annotated[str | None, typer.Option(help="latency (default) or throughput.")] = None,
    max_ms_per_token: Annotated[float | None, typer.Option(help="Limit of the mean time per token, ms.")] = None,
    device: opt.Device = None,
    vllm_version: Annotated[str | None, typer.Option(help="vLLM version to write arguments for.")] = None,
    vllm_command: Annotated[
        str | None,
        typer.Option(
            help="Command line of a server in use (or a file with it) to start from; options here override it."
        ),
    ] = None,
    seed: opt.Seed = None,
    out: Annotated[Path | None, typer.Option(help="Output directory; default runs/<pair>-<dtype>...")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a study of another configuration.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted study.")] = False,
    part: Annotated[
        str | None, typer.Option(help="Measure one share of a study, as 2/8; `specq merge` joins them.")
    ] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Measure what KV formats do to acceptance and speed, and which K to use with them."""
    from specq.command import study_command

    how = ("out", "overwrite", "resume", "part", "quiet", "dtype", "study_command")
    options = {k: v for k, v in locals().items() if k not in (*how, "how")}
    options["batch"], options["context"] = _numbers(batch, "--batch"), _numbers(context, "--context")
    options["ngram"] = _numbers(ngram, "--ngram")
    study_command(options, dtype or [], out, overwrite=overwrite, resume=resume, part=part, quiet=quiet)


@app.command()
def merge(
    out: Annotated[Path, typer.Argument(help="Directory of the whole study.")],
    parts: Annotated[list[Path], typer.Argument(help="Directories made by `specq study --part`.")],
    target: Annotated[str | None, typer.Option(help="The target model's directory on this machine.")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft model's directory on this machine.")] = None,
    prompts: Annotated[str | None, typer.Option(help="The prompt file on this machine.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the study in OUT.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Join the parts of a study that several machines made, and print the answer."""
    from specq.command import merge_command

    merge_command(out, parts, {"target": target, "draft": draft, "prompts": prompts}, overwrite, quiet)


@app.command()
def tune(
    study_dir: Annotated[Path, typer.Argument(help="Directory of a finished study.")],
    cost: Annotated[str | None, typer.Option(help="roofline:[Nx]GPU[@TIMINGS], measured, or a timings file.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes; the first is the one decided for.")] = None,
    context: Annotated[str | None, typer.Option(help="Context lengths; the first is the one decided for.")] = None,
    current_k: Annotated[int | None, typer.Option(help="num_speculative_tokens in use now.")] = None,
    objective: Annotated[str | None, typer.Option(help="latency or throughput.")] = None,
    max_ms_per_token: Annotated[float | None, typer.Option(help="Limit of the mean time per token, ms.")] = None,
    mix: Annotated[str | None, typer.Option(help="Shares of tokens of prompt groups: code=0.7,chat=0.3.")] = None,
    vllm_version: Annotated[str | None, typer.Option(help="vLLM version to write arguments for.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for recommendation.json, decision.json, plots.")] = None,
) -> None:
    """Decide a finished study again, without its models: other costs, batches, contexts, objectives, traffic."""
    from specq.tune_command import tune_command

    changes = {
        "cost": cost,
        "batch": _numbers(batch, "--batch"),
        "context": _numbers(context, "--context"),
        "current_k": current_k,
        "objective": objective,
        "max_ms_per_token": max_ms_per_token,
        "vllm_version": vllm_version,
    }
    tune_command(study_dir, changes, mix, out)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Directory of a finished study.")],
    second: Annotated[Path, typer.Argument(help="Directory of another.")],
) -> None:
    """Two finished studies side by side: settings that differ, mu and shifts with their difference, decisions."""
    from specq.compare import compare_command

    compare_command(first, second)


@app.command()
def capacity(
    pair: Annotated[str | None, typer.Option(help="Registered pair; `specq pairs` lists them.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Target model: directory (config.json suffices) or hub id.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, whose weights and cache take room too.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="KV format; repeat for more. Default: all that vLLM has.")
    ] = None,
    draft_dtype: Annotated[str, typer.Option(help="KV format of the draft's cache.")] = "bf16",
    gpus: Annotated[
        str | None, typer.Option(help="What it runs on: h100, 8xh100, 2xMINE.toml; tensor parallel.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 32768,
    sequences: Annotated[int | None, typer.Option(help="Sequences at once that are wanted.")] = None,
    weight_bytes: Annotated[
        float | None, typer.Option(help="Bytes per target weight; default: configuration, 2.")
    ] = None,
    memory_share: Annotated[
        float, typer.Option(help="Share of GPU memory used (vLLM: gpu_memory_utilization).")
    ] = UTILISATION,
    reserve_gb: Annotated[float, typer.Option(help="GB per GPU kept for activations and graphs.")] = RESERVE_GB,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """KV bytes per sequence, what fits beside the weights, and what each KV format buys."""
    from specq.capacity_command import capacity_command

    capacity_command(
        pair=pair, target=target, draft=draft, dtypes=dtype or [], draft_dtype=draft_dtype, gpus=gpus, context=context,
        sequences=sequences, weight_bytes=weight_bytes, utilisation=memory_share, reserve_gb=reserve_gb, as_json=as_json,
    )  # fmt: skip


@app.command()
def cost(
    timings: Annotated[Path, typer.Argument(help="Measured step times (JSON), or a validation.json.")],
    gpus: Annotated[str, typer.Option(help="What they were measured on: h200, 8xh100, MINE.toml.")],
    share: Annotated[
        Path | None, typer.Option(help="Times of one GPU's share of those steps: tells communication from the rest.")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="Registered pair; `specq pairs` lists them.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Target model: directory (config.json suffices) or hub id.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: directory, hub id, or self.")] = None,
    weight_bytes: Annotated[
        float | None, typer.Option(help="Bytes per target weight; default: configuration, 2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File NAME.toml for --cost roofline:NAME.toml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Calibrate the roofline on measured step times: efficiency factors, and the roofline beside every timing."""
    from specq.cost_command import cost_command

    cost_command(
        timings, gpus=gpus, share=share, pair=pair, target=target, draft=draft, weight_bytes=weight_bytes, out=out,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def validate(
    study_dir: Annotated[Path, typer.Argument(help="Directory of a finished study.")],
    dtype: Annotated[list[str] | None, typer.Option(help="KV format; repeat. Default: BF16 and the study's.")] = None,
    k: Annotated[str | None, typer.Option("--k", help="K to run, as 0,2,4,8; 0 always runs.")] = None,
    cell: Annotated[
        list[str] | None, typer.Option(help="Extra cell, like fp8:4:greedy or fp8:4@TRITON_ATTN; repeat.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Requests in flight; default: the study's first batch.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts of the study to use; default all.")] = None,
    passes: Annotated[int, typer.Option(help="Times that every cell runs all prompts.")] = 3,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Dummy weights, the study's acceptance: true step times of a shape.")
    ] = False,
    pair: Annotated[
        str | None, typer.Option(help="With --synthetic: run this registered pair's shape; default the study's.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="With --synthetic: tokens per prompt.")] = None,
    cost: Annotated[str | None, typer.Option(help="Cost model of the predicted speedup; default the study's.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Record p, q, ratio, alpha inside the engine.")] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="No compilation and graphs: starts faster; its times are not a server's.")
    ] = False,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs of the engine.")] = 1,
    memory_share: Annotated[float, typer.Option(help="vLLM's gpu_memory_utilization.")] = 0.9,
    time_limit: Annotated[float, typer.Option(help="Seconds that one cell may take.")] = 900.0,
    stop_after: Annotated[float | None, typer.Option(help="Seconds after which no further cell is started.")] = None,
    at_once: Annotated[int, typer.Option(help="Cells that run at once, each on GPUs of its own.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda for the replay; default the study's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory; default STUDY_DIR/validation.")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Run the study's pair in vLLM and set measured acceptance and speed beside the predicted. Resumable."""
    from specq.engines.vllm.command import refuse_fruitless, validate_command
    from specq.engines.vllm.validate import Limits

    made = validate_command(
        study_dir, dtypes=dtype or [], ks=_numbers(k, "--k"), extra=cell or [], batch=batch, num_prompts=num_prompts,
        passes=passes, synthetic=synthetic, pair=pair, context=context, cost=cost, probe=probe, eager=eager,
        tensor_parallel=tensor_parallel, memory_share=memory_share, limits=Limits(time_limit, stop_after, at_once),
        device=device, out=out, quiet=quiet,
    )  # fmt: skip
    refuse_fruitless(made)


@app.command("import-metrics")
def import_metrics(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="BEFORE AFTER (or more scrapes in order of time), bench results, logs, histograms."),
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Files of another server or time to compare with; repeat.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Scrape a live server: http://host:port/metrics.")] = None,
    every: Annotated[str, typer.Option(help="Time between scrapes of --url.")] = "10s",
    span: Annotated[str, typer.Option("--for", help="How long to scrape --url.")] = "5m",
    model: Annotated[str | None, typer.Option(help="Served model, where there are several.")] = None,
    draft_cost: Annotated[
        float | None, typer.Option(help="Draft step over target step in seconds: name the K it supports.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for metrics.json and the scrapes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Acceptance from a server's own counters, without GPU or models."""
    from specq.engines.metrics.command import import_metrics_command

    import_metrics_command(paths or [], against or [], url, every, span, model, draft_cost, out, as_json, quiet)


@app.command()
def rollout(
    pair: opt.Pair = "tiny",
    dtype: Annotated[list[str] | None, typer.Option(help="KV format of the target's cache; repeat for more.")] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="KV format of the draft's cache (bf16), or same.")] = None,
    k: Annotated[int | None, typer.Option(help="Drafted tokens per cycle.")] = None,
    target: opt.Target = None,
    draft: opt.Draft = None,
    ngram: opt.Ngram = None,
    random_weights: opt.RandomWeights = None,
    prompts: opt.Prompts = None,
    undecodable: opt.Undecodable = None,
    chat: opt.Chat = None,
    num_prompts: opt.NumPrompts = None,
    prompt_tokens: opt.PromptTokens = None,
    output_tokens: opt.OutputTokens = None,
    rows: Annotated[int | None, typer.Option(help="Prompts decoded together.")] = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    draft_sampling: opt.DraftSampling = None,
    verify: opt.Verify = None,
    draft_transform: opt.DraftTransform = None,
    query_dtype: opt.QueryDtype = None,
    calibrate: opt.Calibrate = None,
    device: opt.Device = None,
    seed: opt.Seed = None,
    replay: Annotated[bool | None, typer.Option(help="Check against the replay of the emitted text.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output directory; default runs/rollout-<pair>-<dtype>-k<K>...")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a rollout of another configuration.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted rollout.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Decode speculatively for real, over quantized caches, and log every drafted token."""
    from specq.rollout_command import rollout_command

    how = ("out", "overwrite", "resume", "quiet", "dtype", "rollout_command")
    options = {n: v for n, v in locals().items() if n not in (*how, "how")}
    options["ngram"] = _numbers(ngram, "--ngram")
    rollout_command(options, dtype or ["fp8"], out, overwrite=overwrite, resume=resume, quiet=quiet)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="help, chain, study, tune, precision[:SEED], rollout, agreement, scoring, memory[:TOKENS[:tiny]]."
        ),
    ] = None,
) -> None:
    """Benchmark specq itself on this machine; one JSON line each."""
    from specq.bench import main as run_benches

    run_benches(names or [])


@app.command()
def formats() -> None:
    """List the KV formats."""
    from specq.kv import FORMATS

    for f in FORMATS:
        names = f.name + (f" ({', '.join(f.aliases)})" if f.aliases else "")
        typer.echo(f"{names:<26} vLLM: {f.vllm or 'none':<20} {f.summary}")


@app.command()
def pairs() -> None:
    """List the registered pairs."""
    from specq.pairs import registry

    for p in registry().values():
        where = " and ".join("embedded" if s.local and s.is_model else s.source for s in (p.target, p.draft))
        typer.echo(f"{p.name:<18} {p.summary}\n{'':<18} {where if where != 'embedded and embedded' else 'embedded'}")


@app.command()
def schema(name: Annotated[str, typer.Argument(help="recommendation or speculation_profile.")]) -> None:
    """Print the JSON schema of a file specq writes."""
    from specq.report.schema import SCHEMAS

    if name not in SCHEMAS:
        raise SpecqError(f"unknown schema {name!r}; accepted are {', '.join(SCHEMAS)}")
    typer.echo(json.dumps(SCHEMAS[name].model_json_schema(), indent=2))


def _not_lost(raised: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C that Python delivers inside a finalizer is dropped there, with a traceback: raise it again, a moment later."""
    if isinstance(raised.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        sys.__unraisablehook__(raised)


def main() -> None:
    """Entry point: SpecqError becomes one message and its exit code (2), Ctrl-C one sentence and 130."""
    sys.unraisablehook = _not_lost
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own pool holds on to what a study has freed
    if (
        "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    ):  # torchrun, several processes
        from specq import parallel

        parallel.run(_run)
    else:
        _run()


def _run() -> None:
    try:
        app()
    except SpecqError as error:
        print(f"specq: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == Interrupted.exit_code:  # typer's answer to Ctrl-C, which says nothing
            print("specq: interrupted", file=sys.stderr)
        raise
