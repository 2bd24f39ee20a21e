"""Options of the command line that `study` and `rollout` share: one spelling and one help text each."""

from typing import Annotated

import typer

Pair = Annotated[str, typer.Option(help="Registered pair; `specq pairs` lists them.")]
Target = Annotated[str | None, typer.Option(help="Target model: directory or hub id.")]
Draft = Annotated[str | None, typer.Option(help="Draft: directory, hub id, self, or ngram.")]
Ngram = Annotated[str | None, typer.Option(help="Shortest and longest n-gram looked up; 2,5.")]
RandomWeights = Annotated[
    bool | None, typer.Option("--random-weights", help="Configurations alone, for memory and step times.")
]
Prompts = Annotated[str | None, typer.Option(help="Prompt file: .jsonl, .json, .txt, .parquet (.gz, .xz, .zst).")]
Undecodable = Annotated[str | None, typer.Option(help="Lines that are not UTF-8: refuse (the file) or skip.")]
Chat = Annotated[str | None, typer.Option(help="Chat records: template, or raw (turns joined as text).")]
NumPrompts = Annotated[int | None, typer.Option(help="Prompts to use.")]
PromptTokens = Annotated[int | None, typer.Option(help="Longest prompt in tokens.")]
OutputTokens = Annotated[int | None, typer.Option(help="Longest continuation in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="Default: the target's generation_config, then 1.")]
TopK = Annotated[int | None, typer.Option(help="0 = off.")]
TopP = Annotated[float | None, typer.Option(help="1 = off.")]
DraftSampling = Annotated[str | None, typer.Option(help="probabilistic, or greedy (vLLM's default).")]
Verify = Annotated[str | None, typer.Option(help="standard or strict.")]
DraftTransform = Annotated[str | None, typer.Option(help="same, or temperature (as vLLM: no top-k/top-p).")]
QueryDtype = Annotated[str | None, typer.Option(help="auto (as vLLM), bf16 or fp8.")]
Calibrate = Annotated[str | None, typer.Option(help="Prompt file to take static scales from.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or auto (all visible GPUs); default cuda if there is one.")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, for logs.")]
