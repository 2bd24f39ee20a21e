"""From a study to the cells that vLLM is to run: KV format x K x drafting, as requests that need nothing else."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.engines.vllm.protocol import CellRequest
from specq.errors import SpecqError
from specq.kv import KVFormat, get_format
from specq.ngram import NgramLookup
from specq.pairs import NGRAM
from specq.rules import Transform
from specq.vllm_options import draft_kv_is_free, speculative_config, synthetic_rates

# Lookup is modelled as the V1 runner does it: the earliest occurrence. The V2 runner of 0.32 takes the latest, and fills up to
# K tokens (vllm/v1/worker/gpu/spec_decode/ngram/speculator.py).
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# The probe reads the sampler in this very process and of the V1 runner only.
PROBE_ENVIRONMENT = V1_RUNNER | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_CELL = re.compile(r"(?P<format>\w+):(?P<k>\d{1,3})(?::(?P<drafting>probabilistic|greedy))?(?:@(?P<backend>\w+))?")


@dataclass(frozen=True)
class Cell:
    """One configuration of the engine. `drafting` is probabilistic, greedy or ngram; `backend` None takes the one the format
    needs, or vLLM's choice."""

    fmt: KVFormat
    k: int
    drafting: str
    backend: str | None = None

    @property
    def name(self) -> str:
        """File name and key: fp8_e4m3-k4-probabilistic."""
        parts = [self.fmt.name, f"k{self.k}", *([self.drafting] if self.k else [])]
        return "-".join(parts) + (f"-{self.backend}" if self.backend else "")

    def draft_fmt(self, version: str) -> KVFormat:
        """The draft's KV format: BF16 where this vLLM can set it (or lookup has none), else inherited from the target."""
        return get_format("bf16") if self.drafting == NGRAM or draft_kv_is_free(version) else self.fmt


def parse_cell(text: str, drafting: str) -> Cell:
    """FORMAT:K[:greedy|probabilistic][@BACKEND], for instance fp8:4:greedy or fp8:4@TRITON_ATTN."""
    found = _CELL.fullmatch(text.strip())
    if not found:
        raise SpecqError(f"--cell {text!r}: write FORMAT:K[:greedy|probabilistic][@BACKEND], like fp8:4@TRITON_ATTN")
    if drafting == NGRAM and found["drafting"]:
        raise SpecqError(
            f"--cell {text!r}: the study's draft is n-gram lookup, which is neither greedy nor probabilistic"
        )
    backend = found["backend"].upper() if found["backend"] else None
    return Cell(served(found["format"]), int(found["k"]), found["drafting"] or drafting, backend)


def served(name: str) -> KVFormat:
    """A format that vLLM has. Raises SpecqError otherwise."""
    fmt = get_format(name)
    if fmt.vllm is None:
        raise SpecqError(f"vLLM has no KV cache format like {fmt.name}")
    return fmt


def grid(formats: Sequence[KVFormat], ks: Sequence[int], drafting: str, extra: Sequence[Cell]) -> list[Cell]:
    """Plain decoding first within each format, then K upwards, then the extra cells; each once."""
    cells = [Cell(f, k, drafting) for f in formats for k in sorted({0, *ks})]
    return list(dict.fromkeys([*cells, *extra]))


@dataclass
class Workload:
    """What all cells share. `models` are target and draft, directories or hub ids (or `lookup` is the draft); `survival` maps
    a format name and K to S_1..S_K for a synthetic sweep, which takes no weights and accepts at those rates."""

    models: tuple[str, str]
    prompts: list[list[int]]
    documents: list[str]
    transform: Transform
    output_tokens: int
    batch: int
    version: str
    passes: int = 3
    seed: int = 0
    eager: bool = False
    tensor_parallel: int = 1
    memory_share: float = 0.9
    positions: int | None = None
    probe: str | None = None
    lookup: NgramLookup | None = None
    survival: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest text, prompt and response."""
        return max(map(len, self.prompts)) + self.output_tokens

    @property
    def synthetic(self) -> bool:
        """Whether acceptance is prescribed and weights are dummies."""
        return bool(self.survival)


def margin(k: int) -> int:
    """Positions that max_model_len must leave beyond the longest text, or vLLM stops drafting before it ends.

    Its V1 runner drafts for nobody in a step where any request of the batch comes within K of max_model_len
    (`GPUModelRunner._input_fits_in_drafter`, 0.24 and 0.32), and the draft's cache keeps a hole there, so later cycles lose
    too. The length it compares is an upper bound: with asynchronous scheduling two cycles are taken to be accepted whole.
    """
    return 3 * (k + 1)


def build(cell: Cell, work: Workload) -> CellRequest:
    """The request of one cell. Raises SpecqError where the texts do not fit the models' positions."""
    target, draft = work.models
    longest = work.longest
    if work.positions is not None and longest > work.positions:
        raise SpecqError(f"texts of {longest} tokens are longer than the models' {work.positions} positions")
    room = longest + margin(cell.k)
    engine: dict[str, Any] = {
        "model": target,
        "dtype": "bfloat16",
        "kv_cache_dtype": cell.fmt.vllm,
        "max_model_len": room if work.positions is None else min(room, work.positions),
        "max_num_seqs": work.batch,
        "tensor_parallel_size": work.tensor_parallel,
        "gpu_memory_utilization": work.memory_share,
        "enable_prefix_caching": False,
        "enforce_eager": work.eager,
        "disable_log_stats": False,
        "seed": work.seed,
    }
    if backend := cell.backend or cell.fmt.vllm_backend:
        engine["attention_backend"] = backend
    sampling: dict[str, Any] = {
        "temperature": 0.0 if work.transform.greedy else work.transform.temperature,
        "top_p": work.transform.top_p,
        "top_k": work.transform.top_k,
        "max_tokens": work.output_tokens,
        "detokenize": False,
    }
    if cell.k:
        draft_fmt = cell.draft_fmt(work.version)
        config = speculative_config(work.version, draft, draft_fmt, cell.k, cell.drafting, work.lookup)
        if work.synthetic:
            rates = work.survival[cell.fmt.name, cell.k]
            config |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": synthetic_rates(rates),
            }
        engine["speculative_config"] = config
    if work.synthetic:
        engine |= {"load_format": "dummy", "skip_tokenizer_init": True}
        sampling["ignore_eos"] = True
    probing = work.probe if cell.k and not work.synthetic else None
    environment = V1_RUNNER if cell.k and work.lookup else {}
    if probing:
        environment = PROBE_ENVIRONMENT | {"SPECQ_PROBE": f"{probing}/{cell.name}"}
    return CellRequest(
        name=cell.name,
        engine=engine,
        environment=environment,
        sampling=sampling,
        prompts=work.prompts,
        documents=work.documents,
        batch=work.batch,
        passes=work.passes,
        warmup=min(work.batch, len(work.prompts)),
        probe=probing,
    )


def random_prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids for a sweep with dummy weights, where text has no meaning."""
    return np.random.default_rng(seed).integers(0, vocabulary, (count, tokens)).tolist()
