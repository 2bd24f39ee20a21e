"""An optional look inside vLLM's rejection sampler: log p, log q, ratio and alpha of every drafted token.

vLLM loads `register` through the entry point group `vllm.general_plugins` in each of its processes. Without the environment
variable SPECQ_PROBE=DIRECTORY it returns at once and touches nothing. With it, two functions of the V1 runner are wrapped:

- `vllm.v1.sample.rejection_sampler.rejection_sample` sees the target's logits after temperature, top-k and top-p, the
  draft's probabilities (none for greedy drafts, which count as one-hot), the drafted and the resulting tokens;
- `GPUModelRunner._sample` knows whose rows they are.

Rows go to `cycles-<pid>-<n>.parquet` in that directory, with the columns of cycles.parquet (`prompt` is vLLM's request id).
The V2 runner samples elsewhere, before temperature: the probe asks for VLLM_USE_V2_MODEL_RUNNER=0, and refuses versions and
signatures it does not know rather than record something else. Recording waits for the device in each step: time nothing.
"""

import atexit
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from specq.vllm_options import why_not_probed

# vllm/v1/sample/rejection_sampler.py, 0.24 and 0.32
SIGNATURE = (
    "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits",
    "bonus_token_ids", "sampling_metadata", "synthetic_mode", "synthetic_conditional_rates", "use_fp64_gumbel",
)  # fmt: skip
COLUMNS = ("prompt", "cycle", "draft_position", "token", "logp", "logq", "ratio", "alpha", "accepted")
ROWS = 20_000  # rows held before a file is written
_recorder: "Recorder | None" = None


class ProbeError(RuntimeError):
    """The engine is one that the probe does not know; raised at its start, so that nothing is recorded wrongly."""


def score(
    draft_token_ids: Any,  # noqa: ANN401 - torch is imported by the engine, not here
    num_draft_tokens: list[int],
    draft_probs: Any,  # noqa: ANN401
    target_logits: Any,  # noqa: ANN401
    output_token_ids: Any,  # noqa: ANN401
    greedy: list[bool],
) -> dict[str, list]:
    """Columns of one step's drafted tokens, in the order of the flattened drafts.

    draft_token_ids [n]; num_draft_tokens [requests]; draft_probs [n, V] or None; target_logits [n, V] as verified;
    output_token_ids [requests, K + 1], -1 beyond what was emitted; greedy [requests]: sampled at temperature 0.

    ratio = min(1, p/q) at the drafted token, alpha = sum min(p, q); for a one-hot q both are p at that token. At temperature
    0 p is one-hot at its argmax. A token counts as accepted where it and all before it were emitted.
    """
    import torch

    rows = torch.repeat_interleave(torch.arange(len(num_draft_tokens)), torch.tensor(num_draft_tokens))
    tokens = draft_token_ids.long()
    logp = target_logits.float().log_softmax(-1)
    at_zero = torch.tensor(greedy)[rows].to(logp.device)
    if bool(at_zero.any()):
        hot = torch.full_like(logp, float("-inf")).scatter_(-1, logp.argmax(-1, keepdim=True), 0.0)
        logp = torch.where(at_zero[:, None], hot, logp)
    at = tokens.clamp(min=0)[:, None]  # -1 pads a draft that never was
    p = logp.gather(-1, at)[:, 0]
    if draft_probs is None:
        q, ratio = torch.zeros_like(p), p.exp()
        alpha = ratio
    else:
        probs = draft_probs.float()
        q = probs.gather(-1, at)[:, 0].log()
        ratio = (p - q).clamp(max=0.0).exp()
        alpha = torch.minimum(logp.exp(), probs).sum(-1)
    emitted = (output_token_ids != -1).sum(-1).cpu()
    position = torch.cat([torch.arange(n) for n in num_draft_tokens]) if num_draft_tokens else rows
    return {
        "row": rows.tolist(),
        "draft_position": (position + 1).tolist(),
        "token": tokens.tolist(),
        "logp": p.tolist(),
        "logq": q.tolist(),
        "ratio": ratio.tolist(),
        "alpha": alpha.tolist(),
        "accepted": (position < emitted[rows] - 1).tolist(),
    }


class Recorder:
    """Rows of a process on their way to its files. `requests` are the ids of the rows now in the sampler, if any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] | None = None
        self._cycles: dict[str, int] = {}
        self._rows: dict[str, list] = {name: [] for name in COLUMNS}
        self._files = 0

    def add(self, scores: dict[str, list]) -> None:
        """Take one step's columns; the requests that drafted nothing have no rows and no cycle."""
        assert self.requests is not None
        numbers = {}
        for row in dict.fromkeys(scores["row"]):
            name = self.requests[row]
            numbers[row] = self._cycles.get(name, 0)
            self._cycles[name] = numbers[row] + 1
        for i, row in enumerate(scores["row"]):
            if scores["token"][i] < 0:
                continue
            self._rows["prompt"].append(self.requests[row])
            self._rows["cycle"].append(numbers[row])
            for name in COLUMNS[2:]:
                self._rows[name].append(scores[name][i])
        if len(self._rows["token"]) >= ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held to a file of its own."""
        if not self._rows["token"]:
            return
        from specq.files import write_parquet

        self.folder.mkdir(parents=True, exist_ok=True)
        write_parquet(self.folder / f"cycles-{os.getpid()}-{self._files:05d}.parquet", self._rows)
        self._rows = {name: [] for name in COLUMNS}
        self._files += 1


def _check_version(version: str) -> None:
    if why := why_not_probed(version):
        raise ProbeError(f"specq's probe {why}: unset SPECQ_PROBE")


def _check(version: str, sampler: ModuleType, runner: type) -> None:
    _check_version(version)
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise ProbeError(
            "specq's probe reads the V1 model runner only: set VLLM_USE_V2_MODEL_RUNNER=0, or unset SPECQ_PROBE"
        )
    found = tuple(inspect.signature(sampler.rejection_sample).parameters)
    if found != SIGNATURE or not hasattr(runner, "_sample"):
        raise ProbeError(f"this vLLM {version} has another rejection sampler than the one specq's probe knows: {found}")


def install(folder: Path, version: str, sampler: ModuleType, runner: type) -> Recorder:
    """Wrap the two functions; returns the recorder. Raises ProbeError for an engine that is not known.

    sampler: the module vllm.v1.sample.rejection_sampler; runner: the class GPUModelRunner.
    """
    _check(version, sampler, runner)
    recorder = Recorder(folder)
    verify, sample = sampler.rejection_sample, runner._sample

    def rejection_sample(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if recorder.requests is None:  # the engine's own warm-up
            return verify(*args, **kwargs)
        given = dict(zip(SIGNATURE, args, strict=False)) | kwargs
        logits = given["target_logits"].clone()  # the sampler may write into it
        out = verify(*args, **kwargs)
        if given.get("synthetic_mode"):
            raise ProbeError("specq's probe has nothing to record where acceptance is synthetic: unset SPECQ_PROBE")
        counts = list(given["num_draft_tokens"])
        metadata = given["sampling_metadata"]
        zero = [True] * len(counts) if metadata.all_greedy else (metadata.temperature == 0).tolist()[: len(counts)]
        recorder.add(score(given["draft_token_ids"], counts, given["draft_probs"], logits, out, zero))
        return out

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:  # noqa: ANN401 - vLLM's own types
        recorder.requests = list(self.input_batch.req_ids) if spec_decode_metadata is not None else None
        try:
            return sample(self, logits, spec_decode_metadata)
        finally:
            recorder.requests = None

    sampler.rejection_sample, runner._sample = rejection_sample, _sample
    return recorder


def register(load: Callable[[], tuple[str, ModuleType, type]] | None = None) -> None:
    """The plugin: nothing without SPECQ_PROBE, else install the probe once in this process."""
    global _recorder
    folder = os.environ.get("SPECQ_PROBE")
    if not folder or _recorder is not None:
        return
    _recorder = install(Path(folder), *(load or _vllm)())
    atexit.register(close)


def _vllm() -> tuple[str, ModuleType, type]:
    import vllm

    _check_version(vllm.__version__)  # before importing modules that another version may not have
    import vllm.v1.sample.rejection_sampler as sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return vllm.__version__, sampler, GPUModelRunner


def close() -> None:
    """Write what is still held."""
    if _recorder is not None:
        _recorder.flush()
