"""A stand-in for the process of one cell: real speculative decoding of small models on the CPU, or a way to go wrong.

    python fake_engine.py MODE REQUEST.json RESULT.json

Modes: `decode` steps a small engine through `specq.engines.vllm.engine.measure`, so that all but vLLM's own classes is the real
code (with acceptance as prescribed and no models where the request asks for dummy weights); `crash`; `hang`, with a child
that outlives it; `alone`, which hangs too and ends with its caller as the engine does; `garbage`. A name in FAKE_FAIL
(comma-separated cells) crashes in any mode.
"""

import itertools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from specq.engines.vllm.engine import end_with_caller
from specq.engines.vllm.protocol import CellRequest, CellResult


def go_wrong(mode, asked, out):
    request = CellRequest.model_validate_json(Path(asked).read_text())
    if mode == "crash" or request.name in os.environ.get("FAKE_FAIL", "").split(","):
        print("INFO starting\nValueError: Selected backend is not valid for this configuration")
        sys.exit(1)
    if mode == "alone":
        sys.stdin.readline()
        end_with_caller()
    if mode in ("hang", "alone"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        told = Path(out).with_suffix(".pids")
        told.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
        os.replace(told.with_suffix(".tmp"), told)
        time.sleep(600)
    if mode == "garbage":
        Path(out).write_text('{"digest": 1')
        sys.exit(0)


if __name__ == "__main__":
    go_wrong(*sys.argv[1:])  # before the imports that take seconds

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from specq.acceptance import verify_cycle  # noqa: E402
from specq.engines.vllm.engine import measure  # noqa: E402
from specq.rules import Rule, Transform  # noqa: E402
from specq.sampling import inverse_cdf, log_probs  # noqa: E402


@dataclass
class Running:
    id: str
    tokens: list
    left: int
    started: bool = False


class Engine:
    """Add, step, has_unfinished: one step is prefill's token or one whole cycle for up to `slots` requests."""

    def __init__(self, request):
        spec = request.engine.get("speculative_config")
        self.k = spec["num_speculative_tokens"] if spec else 0
        self.window = (spec["prompt_lookup_min"], spec["prompt_lookup_max"]) if spec and "model" not in spec else None
        self.rule = Rule("greedy" if self.window else spec["draft_sample_method"]) if spec else None
        self.target = self.draft = None
        self.synthetic = spec.get("synthetic_acceptance_rates") if spec else None
        if request.engine.get("load_format") != "dummy":
            load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()  # noqa: E731
            self.target, self.draft = (
                load(request.engine["model"]),
                load(spec["model"]) if spec and not self.window else None,
            )
        self.generator = torch.Generator().manual_seed(request.engine["seed"])
        self.waiting, self.slots, self.active = [], request.engine["max_num_seqs"], []
        self.counts = [0, 0, 0, [0] * self.k]
        assert request.engine["disable_log_stats"] is False  # LLM.get_metrics asserts it in vLLM

    def add_request(self, request_id, prompt, params):
        self.waiting.append(Running(request_id, list(prompt["prompt_token_ids"]), params.max_tokens))
        self.params = params

    def has_unfinished_requests(self):
        return bool(self.waiting or self.active)

    def _probs(self, model, tokens, last):
        transform = Transform(self.params.temperature)
        with torch.inference_mode():
            return log_probs(model(torch.tensor([tokens])).logits[0, -last:], transform).exp()

    def _synthetic_cycle(self):
        coin = float(torch.rand(1, generator=self.generator))
        return [7] * (1 + sum(coin < rate for rate in self.synthetic)), self.k

    def _count(self, accepted, drafted):
        self.counts[0] += drafted > 0
        self.counts[1] += drafted
        self.counts[2] += accepted
        for i in range(accepted):
            self.counts[3][i] += 1

    def _looked_up(self, tokens):
        """What followed the earliest of the longest runs that the text ends with, by looking everywhere."""
        shortest, longest = self.window
        for n in range(longest, shortest - 1, -1):
            for at in range(len(tokens) - n):
                if tokens[at : at + n] == tokens[len(tokens) - n :]:
                    return tokens[at + n : at + n + self.k]
        return []

    def _cycle(self, tokens):
        drafted, q = self._looked_up(tokens) if self.window else [], []
        for _ in range(0 if self.window else self.k):
            p = self._probs(self.draft, tokens + drafted, 1)[0]
            q.append(p)
            if self.rule.draft_sampling == "greedy":
                drafted.append(int(p.argmax()))
            else:
                drafted.append(int(inverse_cdf(p[None], torch.rand(1, generator=self.generator, dtype=torch.float64))))
        p = self._probs(self.target, tokens + drafted, len(drafted) + 1)
        known = None if self.rule.draft_sampling == "greedy" else torch.stack(q)[None]
        coins, picks = (torch.rand(1, len(drafted) + n, generator=self.generator, dtype=torch.float64) for n in (0, 1))
        n, after = verify_cycle(p[None], known, torch.tensor([drafted], dtype=torch.long), self.rule, coins, picks)
        return [*drafted[: int(n)], int(after)], len(drafted)

    def step(self):
        while self.waiting and len(self.active) < self.slots:
            self.active.append(self.waiting.pop(0))
        outputs = []
        for r in list(self.active):
            if self.k and r.started:
                new, drafted = self._synthetic_cycle() if self.synthetic else self._cycle(r.tokens)
                self._count(len(new) - 1, drafted)
            elif self.target is None:
                new = [7]
            else:
                p = self._probs(self.target, r.tokens, 1)
                new = [int(inverse_cdf(p, torch.rand(1, generator=self.generator, dtype=torch.float64)))]
            r.started, new = True, new[: r.left]
            r.tokens += new
            r.left -= len(new)
            reason = "length" if not r.left else None
            if reason:
                self.active.remove(r)
            outputs.append(
                SimpleNamespace(request_id=r.id, outputs=[SimpleNamespace(token_ids=new, finish_reason=reason)])
            )
        return outputs

    def get_metrics(self):
        if not self.k:
            return [SimpleNamespace(name="vllm:num_requests_running", labels={}, value=0.0)]
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        found = [
            SimpleNamespace(name=f"vllm:spec_decode_{n}", value=v) for n, v in zip(names, self.counts, strict=False)
        ]
        return [
            *found,
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=list(self.counts[3])),
        ]


def main(mode, asked, out):
    request = CellRequest.model_validate_json(Path(asked).read_text())
    print("INFO Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].")
    assert sys.stdin.readline() == "go\n"
    engine = Engine(request)
    ticks = itertools.count()
    time.perf_counter = lambda: next(ticks) * 0.5  # a clock that is the same on every machine
    llm = SimpleNamespace(llm_engine=engine, get_metrics=engine.get_metrics)
    passes, counters = measure(llm, lambda s: SimpleNamespace(**s), request)
    versions = {"vllm": "0.24.0"}
    result = CellResult(
        digest=request.digest, versions=versions, device="fake", timing_mode="none", passes=passes, counters=counters,
        date="2026-11-30T01:02:03+00:00",
    )  # fmt: skip
    Path(out).write_text(result.model_dump_json())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
