"""Tiny random models, tokenizers and a float32 reference format that several tests share."""

import importlib.util
import json
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Waiting threads that spin make a busy machine crawl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton kernels run in its interpreter where there is no GPU; this must be set before triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if shutil.which("nvidia-smi") else "1")

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from specq import device, pairs
from specq.kv.base import Codec, KVFormat
from specq.models.loading import load

NEEDS_VLLM = ["test_vllm_engine.py"]
collect_ignore = [] if importlib.util.find_spec("vllm") else NEEDS_VLLM


def pytest_terminal_summary(terminalreporter):
    """Say what was not collected: these tests have an environment of their own."""
    for name in collect_ignore:
        terminalreporter.write_line(f"not run in this environment: tests/{name}, which needs vLLM (`make test-vllm`)")


@pytest.fixture(scope="session", autouse=True)
def on_the_cpu():
    """A study or rollout of a test for which no device is given computes on the CPU, on a machine with a GPU as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "default_device", lambda: "cpu")
        yield


VOCAB = 48
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
             pad_token_id=2)  # fmt: skip

CONFIGS = {
    "llama": lambda **kw: LlamaConfig(**SMALL | kw),
    "qwen2": lambda **kw: Qwen2Config(**SMALL | kw),
    "qwen3": lambda **kw: Qwen3Config(**SMALL | kw),
    "mistral": lambda **kw: MistralConfig(**SMALL | {"sliding_window": 6} | kw),
    "gemma2": lambda **kw: Gemma2Config(
        **SMALL | {"sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8} | kw
    ),
    "gemma3": lambda **kw: Gemma3TextConfig(
        **SMALL | {"sliding_window": 6, "num_key_value_heads": 1, "query_pre_attn_scalar": 8} | kw
    ),
    "gpt2": lambda **kw: GPT2Config(
        **{
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        | kw
    ),  # fmt: skip
}


class _Float32(Codec):
    dtype, max = torch.float32, float("inf")

    def encode(self, x):
        return x.float()


class Float32Format(KVFormat):
    """Stores K and V untouched: isolates attention and masks from rounding."""

    name, summary = "float32", "reference"
    codec, k_granularity, v_granularity = _Float32(), "none", "none"


FLOAT32 = Float32Format()


def word_tokenizer(words, path, **special):
    """A word-level tokenizer whose ids are the positions in `words`."""
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[-1]))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, **({"bos_token": words[0], "eos_token": words[1]} | special))
    fast.save_pretrained(path)


def save_model(path, kind="llama", seed=0, words=None, scale=1.0, **config):
    """A random model directory with a tokenizer; `scale` widens the weights so that distributions are not flat."""
    torch.manual_seed(seed)
    cfg = CONFIGS[kind](**config)
    model = AutoModelForCausalLM.from_config(cfg, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4.0 * scale)
    model.save_pretrained(path)
    words = words or ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, cfg.vocab_size))]
    word_tokenizer(words, path)
    return path


def edit_json(path, **changes):
    """Change keys of a JSON file in place."""
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changes))


@pytest.fixture(scope="session")
def tiny_pair():
    """The embedded pair, loaded once."""
    pair = pairs.find("tiny", None, None)
    target, draft = (load(p) for p in pairs.locate(pair))
    return target, draft


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory):
    """A random Llama target and draft."""
    root = tmp_path_factory.mktemp("small")
    target = save_model(root / "target", seed=1)
    draft = save_model(root / "draft", seed=2, num_hidden_layers=1)
    return load(str(target)), load(str(draft))
