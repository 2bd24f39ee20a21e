"""Shared parts of train.py and extend.py: options, log, text to windows of tokens, models and saving."""

import argparse
import json
import lzma
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_CONTEXT = 8192
ROPE_THETA = 100_000.0
TARGET_SIZES = dict(
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=12,
    num_attention_heads=6,
    num_key_value_heads=2,
)
DRAFT_SIZES = dict(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
)
SHARD_SIZE = "15MB"

ENCODE_BATCH = 2_000  # documents per call of the tokenizer

SMOKE_SHRINK = 64  # a smoke test divides every window by this
SMOKE_VAL_TOKENS = 2_000

# draw(high, rows) returns `rows` random integers in [0, high).
Draw = Callable[[int, int], np.ndarray]
Batches = Iterator[torch.Tensor]


class Log:
    """Prints lines with the seconds since its creation and keeps them."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines = lines if lines is not None else []
        self.start = time.time()

    def seconds(self) -> float:
        """Seconds since creation."""
        return time.time() - self.start

    def __call__(self, message: str) -> None:
        self.lines.append(f"[{self.seconds():6.1f}s] {message}")
        print(self.lines[-1], flush=True)


def run_parser(description: str, folders: dict[str, str]) -> argparse.ArgumentParser:
    """Parser with the given folder arguments (name -> help) and the options that both scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, meaning in folders.items():
        parser.add_argument(name, type=Path, metavar=name.upper(), help=meaning)
    parser.add_argument("--device", default="cuda", help="torch device (default: %(default)s)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use torch.compile (default: yes)",
    )
    parser.add_argument(
        "--smoke-test",
        action="store_true",
        help="one second per stage with tiny batches and windows, to check that the script runs",
    )
    return parser


def load_tokenizer(data: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that build_corpus.py wrote to `data`."""
    return PreTrainedTokenizerFast.from_pretrained(data / "tokenizer")


def encode(path: Path, tokenizer: PreTrainedTokenizerFast, max_chars: int = -1) -> np.ndarray:
    """Token ids (uint16, one dimension) of NUL-separated xz text, each document between <|bos|> and <|eos|>.

    Only the first `max_chars` characters of the file are read; -1 reads all.
    """
    with lzma.open(path, "rt", encoding="utf-8", errors="replace") as file:
        documents = file.read(max_chars).split("\0")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    parts = []
    for first in range(0, len(documents), ENCODE_BATCH):
        batch = documents[first : first + ENCODE_BATCH]
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            parts.append(np.array([bos, *ids, eos], dtype=np.uint16))
    return np.concatenate(parts)


def build_model(tokenizer: PreTrainedTokenizerFast, sizes: dict[str, int]) -> LlamaForCausalLM:
    """A freshly initialised Llama model, in float32 on the CPU."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        **sizes,
    )
    return LlamaForCausalLM(config)


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a bfloat16 model and its tokenizer in the Hugging Face layout."""
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)


def save_report(report: dict, folder: Path) -> None:
    """Write report.json."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def gather_windows(ids: np.ndarray, starts: np.ndarray, context: int, device: torch.device) -> torch.Tensor:
    """Windows of context + 1 token ids beginning at `starts`: int64 [len(starts), context + 1]."""
    windows = np.stack([ids[start : start + context + 1] for start in starts]).astype(np.int64)
    tensor = torch.from_numpy(windows)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def random_windows(ids: np.ndarray, context: int, rows: int, draw: Draw, device: torch.device) -> Batches:
    """Endless batches [rows, context + 1] of windows that begin anywhere in the token stream."""
    while True:
        starts = draw(len(ids) - context - 1, rows)
        yield gather_windows(ids, starts, context, device)
