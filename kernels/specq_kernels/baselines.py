"""Baselines of the attention benchmark: existing kernels at the same operating points, each over caches in its own layout.

    torch_sdpa         torch's scaled_dot_product_attention, BF16. It has no pages: K and V are contiguous per sequence
    flash_attention_3  FlashAttention 3 as vLLM ships it: BF16, FP8 e4m3 (query in FP8 too)
    vllm_triton        vLLM's Triton `unified_attention`: BF16, FP8 e4m3 (query in FP8 too), INT8 per token and head

The vLLM ones need vLLM 0.24 (or its kernel files alone) on PYTHONPATH; a baseline that cannot run here is left out with a
reason. Arguments, layouts and launch parameters are those of vLLM's own FlashAttention and Triton backends; what vLLM
does once per step and not once per layer (scheduler metadata), or fuses elsewhere (casting the query to FP8), is not timed.

`python -m specq_kernels.baselines` checks every one of them at small sizes against float32; exit code 1 if one is wrong.
"""

import sys
import warnings
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

# Largest ||out - ref|| / ||ref|| that is rounding. BF16 and INT8 round the probabilities and the output to bf16; both
# FP8 baselines round the probabilities to e4m3, with 3 mantissa bits and (vLLM's Triton) none left below 2^-9.
TOLERANCE = {"bf16": 5e-3, "int8_per_token_head": 5e-3, "fp8_e4m3": 6e-2}
# Distinct, so that a swap shows; |randn| / scale stays below 448.
Q_SCALE, K_SCALE, V_SCALE = 0.025, 0.02, 0.015
CHUNK = 1 << 17  # tokens filled at a time


class Baseline:
    """One attention kernel at one operating point: `sets` disjoint copies of the cache, filled with random K and V.

    name, formats: what it is called and the KV formats it runs. note: what a reader of its row must know.
    variants: the ways to call it that work here; a fair row is the fastest of them. dropped: the others, with the reason.
    kv_bytes: bytes of K and V, scales counted, that one call has to read.
    out: bf16 `[batch * queries, heads, dim]`, filled with NaN by `check` before the call, so that a row left out shows.
    """

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    note: ClassVar[str] = ""

    @classmethod
    def missing(cls, device: str = "cuda") -> str | None:
        """Why it cannot run on this machine, or None."""
        return None if device != "cuda" or torch.cuda.is_available() else "no CUDA device"

    @classmethod
    def build(
        cls,
        batch: int,
        context: int,
        queries: int,
        heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        sets: int,
        fmt: str,
        seed: int = 0,
        device: str = "cuda",
    ) -> "Baseline":
        """Allocate and fill caches, page tables, query and output; find out which variants run.

        context counts the `queries` newest tokens. Raises ValueError for a format it does not run or a shape that
        makes no sense.
        """
        if fmt not in cls.formats:
            raise ValueError(f"{cls.name} does not run {fmt}; it runs {', '.join(cls.formats)}")
        if not 1 <= queries <= context or heads % kv_heads:
            raise ValueError(f"{queries} queries over {context} tokens with {heads} heads over {kv_heads} KV heads")
        self = cls()
        self.batch, self.context, self.queries, self.sets = batch, context, queries, sets
        self.heads, self.kv_heads, self.dim, self.page_size, self.fmt, self.device = (
            heads, kv_heads, dim, page_size, fmt, device)  # fmt: skip
        self.scale = dim**-0.5
        self.random = torch.Generator(device).manual_seed(seed)
        self.query = self._randn(batch * queries, heads, dim)  # as the kernel reads it, or bf16 before a cast to FP8
        self.out = torch.full((batch * queries, heads, dim), float("nan"), dtype=torch.bfloat16, device=device)
        itemsize, scales = {"bf16": (2, 0), "fp8_e4m3": (1, 0), "int8_per_token_head": (1, 8)}[fmt]
        self.kv_bytes = batch * context * kv_heads * (2 * dim * itemsize + scales)
        self.variants, self.dropped = (), {}
        for variant in self._prepare():
            try:
                self.run(0, variant)
                if device == "cuda":
                    torch.cuda.synchronize()
                self.variants += (variant,)
            except Exception as error:  # a way to call it that this version or device refuses is not an answer
                self.dropped[variant] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return self

    def run(self, which: int, variant: str | None = None) -> torch.Tensor:
        """Launch on page table `which`; the output as the kernel leaves it. No host synchronisation: can be captured."""
        raise NotImplementedError

    def arrange(self, out: torch.Tensor) -> torch.Tensor:
        """What `run` gave as `[batch, queries, heads, dim]`; may copy, so it is no part of what is timed."""
        return out.view(self.batch, self.queries, self.heads, self.dim)

    def reference_row(self, which: int = 0, row: int = 0) -> torch.Tensor:
        """Float32 attention of one row over the dequantised cache, `[1, queries, heads, dim]`."""
        k, v = (x.float() for x in self._dequantized(which, row))  # [context, kv_heads, dim]
        q = self._read_query().view(self.batch, self.queries, self.kv_heads, -1, self.dim)[row]
        s = torch.einsum("qhgd,nhd->hgqn", q, k) * self.scale
        newest = torch.arange(self.context - self.queries, self.context, device=k.device)[:, None]
        s = s.masked_fill(torch.arange(self.context, device=k.device) > newest, float("-inf"))
        return torch.einsum("hgqn,nhd->qhgd", s.softmax(-1), v).reshape(1, self.queries, self.heads, self.dim)

    def error(self, out: torch.Tensor, which: int = 0, row: int = 0) -> float:
        """||out - ref|| / ||ref|| of one row of what `run` gave."""
        ref = self.reference_row(which, row)
        return float((self.arrange(out)[row : row + 1].float() - ref).norm() / ref.norm())

    def check(self, variant: str, which: int = 0, rows: int = 1) -> float:
        """Largest error of the first rows, after a call into a poisoned output."""
        self.out.fill_(float("nan"))
        out = self.run(which, variant)
        errors = [self.error(out, which, row) for row in range(rows)]
        return max(errors, key=lambda e: (e != e, e))  # a NaN is the worst

    def _prepare(self) -> tuple[str, ...]:
        """Allocate and fill the caches; the variants to try."""
        raise NotImplementedError

    def _dequantized(self, which: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one row, `[context, kv_heads, dim]`."""
        raise NotImplementedError

    def _read_query(self) -> torch.Tensor:
        """The query that the kernel sees, float32."""
        return self.query.float()

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.device, dtype=torch.bfloat16)


class TorchSDPA(Baseline):
    """torch's scaled_dot_product_attention over contiguous K and V `[batch, kv_heads, context, dim]`.

    Causal means the newest `queries` tokens (aligned to the bottom right). `flash` is FlashAttention 2 with grouped heads
    (causal_lower_right when there are several queries), `cudnn` cuDNN with an additive mask. `grouped` and
    `grouped_cudnn` lay the queries of one KV head out as rows of one head, so that K and V are read once. torch allocates
    the output itself. The layout of the query and the mask are made before the call.
    """

    name = "torch_sdpa"
    formats = ("bf16",)
    note = "no pages: contiguous K and V; allocates its output"

    def _prepare(self) -> tuple[str, ...]:
        b, q, h, n, d = self.batch, self.queries, self.kv_heads, self.context, self.dim
        self.k, self.v = (
            torch.empty((self.sets, b, h, n, d), dtype=torch.bfloat16, device=self.device) for _ in range(2)
        )
        for x in (*self.k.flatten(0, 1), *self.v.flatten(0, 1)):
            x.normal_(generator=self.random)
        split = self.query.view(b, q, h, -1, d)
        self.by_head = self.query.view(b, q, self.heads, d).transpose(1, 2)
        self.by_kv_head = split.permute(0, 2, 1, 3, 4).reshape(b, h, -1, d)  # rows: query by query, the group's heads
        last = torch.arange(n - q, n, device=self.device)[:, None]
        hidden = torch.arange(n, device=self.device) > last
        mask = torch.zeros((q, n), dtype=torch.bfloat16, device=self.device).masked_fill_(hidden, float("-inf"))
        several = q > 1
        self.causal = causal_lower_right(q, n) if several else None
        self.mask = mask[None, None] if several else None
        self.row_mask = mask.repeat_interleave(self.heads // h, 0)[None, None] if several else None
        return ("flash", "cudnn", "grouped", "grouped_cudnn")

    def run(self, which: int, variant: str | None = None) -> torch.Tensor:
        """See `Baseline.run`."""
        variant = variant or self.variants[0]
        k, v = self.k[which], self.v[which]
        if variant in ("flash", "cudnn"):
            backend = SDPBackend.FLASH_ATTENTION if variant == "flash" else SDPBackend.CUDNN_ATTENTION
            mask = self.causal if variant == "flash" else self.mask
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    self.by_head, k, v, attn_mask=mask, scale=self.scale, enable_gqa=self.heads != self.kv_heads
                )
            return out
        # FlashAttention 2 takes no mask
        fused = SDPBackend.FLASH_ATTENTION if self.row_mask is None else SDPBackend.EFFICIENT_ATTENTION
        with sdpa_kernel(fused if variant == "grouped" else SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(self.by_kv_head, k, v, attn_mask=self.row_mask, scale=self.scale)
        return out

    def arrange(self, out: torch.Tensor) -> torch.Tensor:
        """See `Baseline.arrange`: from `[batch, heads, queries, dim]` or `[batch, kv_heads, queries * group, dim]`."""
        if out.shape[2] == self.queries and out.shape[1] == self.heads:
            return out.transpose(1, 2)
        return out.unflatten(2, (self.queries, -1)).transpose(1, 2).flatten(2, 3)

    def _dequantized(self, which: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[which, row].transpose(0, 1), self.v[which, row].transpose(0, 1)


class Paged(Baseline):
    """vLLM's cache: `[pages, 2, page_size, kv_heads, dim]`, K and V of a page one after the other.

    INT8 per token and head widens the last dimension by 4 bytes, which hold that row's float32 scale.
    """

    def _allocate(self) -> None:
        each = -(-self.context // self.page_size)
        pages = self.sets * self.batch * each
        dtype = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}[self.fmt]
        width = self.dim + (4 if self.fmt == "int8_per_token_head" else 0)
        cache = torch.empty((pages, 2, self.page_size, self.kv_heads, width), dtype=dtype, device=self.device)
        self.k, self.v = cache.unbind(1)
        order = torch.randperm(pages, generator=self.random, device=self.device).to(torch.int32)
        # The Triton kernel reads the table in whole tiles, past the last page; and rows stay 16-byte aligned.
        padded = -(-each // 32) * 32
        self.tables = torch.zeros((self.sets, self.batch, padded), dtype=torch.int32, device=self.device)
        self.tables[..., :each] = order.view(self.sets, self.batch, each)
        self.lengths = torch.full((self.batch,), self.context, dtype=torch.int32, device=self.device)
        starts = torch.arange(self.batch + 1, device=self.device) * self.queries
        self.starts = starts.to(torch.int32)
        per_row = (self.batch, self.kv_heads)  # vLLM expands one scalar over sequences and heads
        scales = (Q_SCALE, K_SCALE, V_SCALE) if self.fmt == "fp8_e4m3" else (1.0, 1.0, 1.0)
        self.q_scale, k_scale, v_scale = (torch.tensor(s, dtype=torch.float32, device=self.device) for s in scales)
        self.k_descale, self.v_descale = k_scale.expand(per_row), v_scale.expand(per_row)
        self.read = self.query
        if self.fmt == "fp8_e4m3":
            self.read = (self.query.float() / self.q_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        step = max(1, CHUNK // self.page_size)
        both = torch.stack((k_scale, v_scale)).view(1, 2, 1, 1, 1)
        for start in range(0, pages, step):
            part = cache[start : start + step]
            x = self._randn(*part.shape[:-1], self.dim)
            if self.fmt == "int8_per_token_head":
                self._store_int8(x, start)
            else:
                part.copy_(x if self.fmt == "bf16" else (x.float() / both).clamp(-448, 448).to(dtype))

    def _store_int8(self, x: torch.Tensor, page: int) -> None:
        raise NotImplementedError

    def _dequantized(self, which: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        each = -(-self.context // self.page_size)
        used = self.tables[which, row, :each].long()

        def gather(pages: torch.Tensor) -> torch.Tensor:
            small = torch.uint8 if pages.element_size() == 1 else pages.dtype  # few operations exist for FP8
            x = pages[..., : self.dim].view(small)[used].view(pages.dtype)
            return x.flatten(0, 1)[: self.context].float()

        k, v = gather(self.k), gather(self.v)
        if self.fmt == "fp8_e4m3":
            return k * K_SCALE, v * V_SCALE
        if self.fmt == "int8_per_token_head":
            scales = (s[used].flatten(0, 1)[: self.context, :, None] for s in (self.k_scales, self.v_scales))
            k_scale, v_scale = scales
            return k * k_scale, v * v_scale
        return k, v

    def _read_query(self) -> torch.Tensor:
        return self.read.float() * (Q_SCALE if self.fmt == "fp8_e4m3" else 1.0)


class FlashAttention3(Paged):
    """FlashAttention 3 of vLLM, on Hopper.

    `graph` is vLLM under CUDA graphs: scheduler metadata made beforehand, at most 32 splits. `scheduled` leaves the number
    of splits to FlashAttention's heuristic; `plain` also makes the metadata inside the call.
    """

    name = "flash_attention_3"
    formats = ("bf16", "fp8_e4m3")
    note = "FP8: query in FP8, cast not timed; scheduler metadata made once per step, not timed"

    @classmethod
    def missing(cls, device: str = "cuda") -> str | None:
        """See `Baseline.missing`."""
        if reason := super().missing(device):
            return reason
        if device != "cuda":
            return "it needs a CUDA device"
        try:
            from vllm.vllm_flash_attn import flash_attn_interface as fa
        except Exception as error:
            return f"vLLM's FlashAttention does not import: {error}"
        return None if fa.is_fa_version_supported(3) else fa.fa_version_unsupported_reason(3)

    def _prepare(self) -> tuple[str, ...]:
        from vllm.vllm_flash_attn import flash_attn_interface as fa

        self.call = fa.flash_attn_varlen_func
        self._allocate()
        self.plans = {"graph": (None, 32), "scheduled": (None, 0), "plain": (None, 0)}
        for name in ("graph", "scheduled"):
            splits = self.plans[name][1]
            metadata = fa.get_scheduler_metadata(
                batch_size=self.batch,
                max_seqlen_q=self.queries,
                max_seqlen_k=self.context,
                num_heads_q=self.heads,
                num_heads_kv=self.kv_heads,
                headdim=self.dim,
                cache_seqlens=self.lengths,
                qkv_dtype=self.read.dtype,
                cu_seqlens_q=self.starts,
                page_size=self.page_size,
                causal=True,
                window_size=(-1, -1),
                num_splits=splits,
            )
            self.plans[name] = (metadata, splits)
        return tuple(self.plans)

    def run(self, which: int, variant: str | None = None) -> torch.Tensor:
        """See `Baseline.run`."""
        metadata, splits = self.plans[variant or self.variants[0]]
        self.call(
            q=self.read,
            k=self.k,
            v=self.v,
            out=self.out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.queries,
            seqused_k=self.lengths,
            max_seqlen_k=self.context,
            softmax_scale=self.scale,
            causal=True,
            window_size=[-1, -1],
            block_table=self.tables[which],
            softcap=0.0,
            scheduler_metadata=metadata,
            fa_version=3,
            q_descale=self.q_scale.expand(self.batch, self.kv_heads),
            k_descale=self.k_descale,
            v_descale=self.v_descale,
            num_splits=splits,
        )
        return self.out


class VllmTriton(Paged):
    """vLLM's Triton `unified_attention`, called as vLLM's Triton backend calls it.

    It splits the sequence (16 segments) only for one query per sequence and at most 128 // kv_heads sequences.
    """

    name = "vllm_triton"
    formats = ("bf16", "fp8_e4m3", "int8_per_token_head")
    note = "FP8: query in FP8, cast not timed; splits the sequence only for one query"

    @classmethod
    def missing(cls, device: str = "cuda") -> str | None:
        """See `Baseline.missing`."""
        if reason := super().missing(device):
            return reason
        if device != "cuda":  # Triton's interpreter multiplies neither bf16 nor FP8 as the hardware does
            return "it needs a CUDA device"
        try:
            from vllm.v1.attention.ops import triton_reshape_and_cache_flash, triton_unified_attention  # noqa: F401
        except Exception as error:
            return f"vLLM's Triton attention does not import: {error}"
        return None

    def _prepare(self) -> tuple[str, ...]:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        self.call = unified_attention
        self._allocate()
        self.mode = {
            "bf16": KVQuantMode.NONE,
            "fp8_e4m3": KVQuantMode.FP8_PER_TENSOR,
            "int8_per_token_head": KVQuantMode.INT8_PER_TOKEN_HEAD,
        }[self.fmt]
        inline = self.fmt == "int8_per_token_head"
        self.scales = {"q_descale": None, "k_descale": None, "v_descale": None} if inline else {
            "q_descale": self.q_scale if self.fmt == "fp8_e4m3" else None,
            "k_descale": self.k_descale, "v_descale": self.v_descale}  # fmt: skip
        if inline:
            self.scales |= {"k_scale_cache": self.k_scales, "v_scale_cache": self.v_scales}
        self.threshold, self.segments = 128 // self.kv_heads, 16
        rows = (self.threshold, self.heads, self.segments)
        padded = 1 << (self.dim - 1).bit_length()
        self.partial = torch.empty((*rows, padded), dtype=torch.float32, device=self.device)
        self.maxima, self.sums = (torch.empty(rows, dtype=torch.float32, device=self.device) for _ in range(2))
        return ("default",)

    def _store_int8(self, x: torch.Tensor, page: int) -> None:
        """vLLM's own quantising store; the scales are the last 4 bytes of every row."""
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash_per_token_head_quant as store,
        )

        self.k_scales, self.v_scales = (part.view(torch.float32)[..., self.dim // 4] for part in (self.k, self.v))
        k, v = (t.flatten(0, 1).contiguous() for t in x.unbind(1))  # [tokens, kv_heads, dim]
        slots = torch.arange(k.shape[0], device=self.device) + page * self.page_size
        store(k, v, self.k, self.v, self.k_scales, self.v_scales, slots)

    def run(self, which: int, variant: str | None = None) -> torch.Tensor:
        """See `Baseline.run`."""
        self.call(
            q=self.read,
            k=self.k,
            v=self.v,
            out=self.out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.queries,
            seqused_k=self.lengths,
            max_seqlen_k=self.context,
            softmax_scale=self.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=self.tables[which],
            softcap=0,
            seq_threshold_3D=self.threshold,
            num_par_softmax_segments=self.segments,
            softmax_segm_output=self.partial,
            softmax_segm_max=self.maxima,
            softmax_segm_expsum=self.sums,
            kv_quant_mode=self.mode,
            **self.scales,
        )
        return self.out


BASELINES: tuple[type[Baseline], ...] = (TorchSDPA, FlashAttention3, VllmTriton)


def listed(device: str = "cuda") -> tuple[list[type[Baseline]], dict[str, str]]:
    """The baselines that can run on this machine, and the reason for each of the others."""
    reasons = {b.name: b.missing(device) for b in BASELINES}
    return [b for b in BASELINES if reasons[b.name] is None], {n: r for n, r in reasons.items() if r is not None}


def versions() -> dict[str, str]:
    """What the baselines come from, for the result file."""
    found = {"torch": torch.__version__}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    try:
        import vllm

        found["vllm"] = vllm.__version__
    except Exception:  # absent, or a broken install: its baselines say why
        pass
    return found


def _captured_error(one: Baseline, variant: str, which: int) -> float:
    """Error of the first row after a replay of the call captured in a CUDA graph, into a poisoned output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one.run(which, variant)
    out.fill_(float("nan"))
    graph.replay()
    return one.error(out, which)


def self_check(device: str = "cuda", contexts: tuple[int, ...] = (512, 45)) -> int:
    """Every baseline, format and variant at small sizes: prints errors; 1 if one is wrong, 2 if there is none, else 0.

    The short context, in the middle of a page, is where a wrong mask or a wrong last page shows best.
    """
    classes, absent = listed(device)
    for name, reason in absent.items():
        print(f"{name:18} left out: {reason}")
    wrong = False
    for cls in classes:
        for fmt in cls.formats:
            for context in contexts:
                for queries in (1, 4):
                    at = f"{cls.name:18} {fmt:20} 2x{context:<4} q{queries}"
                    try:
                        one = cls.build(2, context, queries, 64, 8, 128, 16, 2, fmt, context + queries, device)
                    except Exception as error:
                        print(f"{at} WRONG: {type(error).__name__}: {error}")
                        wrong = True
                        continue
                    for variant, reason in one.dropped.items():
                        print(f"{at} {variant:14} not here: {reason}")
                    wrong |= not one.variants
                    for variant in one.variants:
                        errors = [one.check(variant, which, rows=2) for which in range(2)]
                        if device == "cuda":
                            errors.append(_captured_error(one, variant, 1))
                        bad = not all(e < TOLERANCE[fmt] for e in errors)  # a NaN is bad
                        wrong |= bad
                        shown = " ".join(f"{e:.2e}" for e in errors)
                        print(f"{at} {variant:14} relative error {shown} {'WRONG' if bad else 'ok'}", flush=True)
    return 1 if wrong else 0 if classes else 2


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)  # torch's reasons to refuse a backend, a dozen lines each
    sys.exit(self_check(*sys.argv[1:2]))
