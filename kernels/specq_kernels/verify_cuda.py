"""The CUDA C++ verify kernel (verify.cu): what it takes, its compiled variants, its launch."""

import ctypes
import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from specq_kernels import native
from specq_kernels.layout import SPECS, FormatSpec, PagedKV

CLUSTER = 2  # chunks merged within a cluster
HEAD_DIMS = {128: 64, 256: 32}  # head_dim -> most rows of one block
QUERY_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Args(ctypes.Structure):
    """`Args` of verify.cu, field for field."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("q_batch", "q_token", "q_head")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_scale", "v_scale", "k_low", "v_low", "k_static", "v_static")),
        ("table", ctypes.c_void_p),
        ("table_row", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("context_lens", "query_lens", "out", "part", "lse")),
        *((name, ctypes.c_int32) for name in ("rows_total", "max_queries", "heads", "kv_heads", "table_columns",
                                              "window", "chunk", "blocks", "spans")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]  # fmt: skip


def why_not(device: torch.device, dim: int) -> str:
    """Why verify attention of this head_dim runs in Triton on this device; an empty string if it does not."""
    if dim not in HEAD_DIMS:
        return f"head_dim {dim} is not {' or '.join(map(str, HEAD_DIMS))}"
    why = native.why_not(device, "verify.cu")
    # warpgroup matrix instructions exist on this architecture alone
    return why or ("" if native.architecture(device) == "90a" else "the GPU's compute capability is not 9.0")


class Config(NamedTuple):
    """What one compiled kernel is made for; `rows` (query, head) rows, a multiple of 8."""

    spec: FormatSpec
    dim: int
    rows: int
    group: int
    page: int
    cluster: int = CLUSTER
    q_type: int = 0
    capped: bool = False
    flags: tuple[str, ...] = ()

    @property
    def defines(self) -> dict[str, int]:
        """Preprocessor constants of verify.cu."""
        return {
            "CODE": self.spec.code, "K_KIND": self.spec.k_scale, "V_KIND": self.spec.v_scale, "D": self.dim,
            "ROWS": self.rows, "GROUP": self.group, "PAGE": self.page, "CLUSTER": self.cluster, "Q_TYPE": self.q_type,
            "CAPPED": int(self.capped),
        }  # fmt: skip


@functools.cache
def library(config: Config) -> ctypes.CDLL:
    """The kernel for one configuration."""
    loaded = native.load("verify.cu", config.defines, "90a", config.flags)
    loaded.launch.argtypes = [ctypes.POINTER(Args), ctypes.c_int, ctypes.c_void_p]
    return loaded


def row_blocks(dim: int, rows: int) -> tuple[int, int]:
    """(rows of one block, blocks) for `rows` (query, head) rows of one KV head."""
    blocks = -(-rows // HEAD_DIMS[dim])
    return -(-rows // blocks // 8) * 8, blocks


def configs(formats: Iterable[str], dim: int, group: int, queries: Iterable[int], page: int) -> list[Config]:
    """What calls of these shapes will need, for bf16 queries without a soft cap."""
    rows = {row_blocks(dim, group * q)[0] for q in queries}
    return [Config(SPECS[f], dim, r, group, page, c) for f in formats for r in rows for c in {1, CLUSTER}]


def build(configs: Iterable[Config]) -> None:
    """Compile several kernels at once, in parallel; each takes some seconds."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(library, configs))


def verify(
    query: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor,
    max_context: int,
    scale: float,
    window: int,
    softcap: float,
    chunk: int,
    most: int = CLUSTER,
    partial: bool = False,
    flags: tuple[str, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]:
    """Arguments as in `attention.verify_attention`, chunk a multiple of 128; launches on the current stream.

    `most` chunks at most form a cluster.

    Returns (output, partial outputs `[spans, rows, head_dim]`, their log-sum-exp in base 2 `[spans, rows]`, tokens per
    span). Without partials the output is final, otherwise the caller merges them; `partial` asks for them in any case.
    """
    if chunk % 128:
        raise ValueError(f"chunk {chunk} is not a multiple of 128")
    if query.data_ptr() % 16 or any(stride % 4 for stride in query.stride()[:3]):
        query = query.contiguous()  # it is read four elements at a time
    batch, max_queries, heads, dim = query.shape
    kv_heads = cache.k.shape[1]
    group, rows = heads // kv_heads, batch * max_queries * heads
    block_rows, blocks = row_blocks(dim, max_queries * group)
    chunks = -(-max_context // chunk)
    cluster = min(most, 1 << (chunks - 1).bit_length())
    q_type = QUERY_TYPES[query.dtype]
    config = Config(cache.spec, dim, block_rows, group, cache.page_size, cluster, q_type, softcap > 0, flags)
    spans = -(-chunks // cluster)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    part = lse = None
    if partial or spans > 1:
        part = torch.empty(spans, rows, dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(spans, rows, dtype=torch.float32, device=query.device)
    args = Args(
        query.data_ptr(), *query.stride()[:3], cache.k.data_ptr(), cache.v.data_ptr(), cache.k_scale.data_ptr(),
        cache.v_scale.data_ptr(), cache.k_low.data_ptr(), cache.v_low.data_ptr(), cache.k_static.data_ptr(),
        cache.v_static.data_ptr(), block_table.data_ptr(), block_table.stride(0), context_lens.data_ptr(),
        query_lens.data_ptr(), out.data_ptr(), 0 if part is None else part.data_ptr(), 0 if lse is None else lse.data_ptr(),
        rows, max_queries, heads, kv_heads, block_table.shape[1], window, chunk, blocks, spans, scale, softcap,
    )  # fmt: skip
    stream = torch.cuda.current_stream(query.device).cuda_stream
    error = library(config).launch(ctypes.byref(args), batch, stream)
    if error:
        raise RuntimeError(f"the verify kernel could not be launched: CUDA error {error}")
    return out, part, lse, chunk * cluster
