"""What fits: KV bytes per sequence, sequences beside the weights, the longest context, and what each format buys.

    KV bytes of a sequence = 2 x layers x KV heads x head_dim x tokens x bytes per element, plus scales

with sliding-window layers capped at their window, an MLA latent in place of K and V per head, and, over tensor-parallel
GPUs, KV heads replicated where there are fewer heads than GPUs (`specq.shape`). A draft model keeps a cache of its own.
Prefix sharing, blocks that are partly filled and host offload are not counted. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specq.errors import SpecqError
from specq.kv import KVFormat, get_format
from specq.shape import ModelShape

# vLLM's gpu_memory_utilization (0.92 from 0.26 on, 0.9 before), and what activations, CUDA graphs and NCCL take per GPU:
# an assumption, of the size that servers report.
UTILISATION, RESERVE_GB = 0.92, 3.0
LONGEST = 1 << 24  # tokens; where a configuration names no limit


@dataclass(frozen=True)
class Server:
    """N equal GPUs, tensor parallel; `memory_gb` each (10^9 bytes), of which a share and not the reserve is used."""

    gpu: str
    gpus: int
    memory_gb: float
    utilisation: float = UTILISATION
    reserve_gb: float = RESERVE_GB

    @property
    def usable_bytes(self) -> float:
        """Bytes per GPU for weights and KV cache."""
        return 1e9 * (self.memory_gb * self.utilisation - self.reserve_gb)

    @property
    def name(self) -> str:
        """For people: 8 x h100."""
        return f"{self.gpus} x {self.gpu}"


@dataclass(frozen=True)
class Load:
    """What is served: a target and, with speculation, a draft with a cache of its own.

    `shared`: the draft is the target itself, whose weights lie in memory once.
    """

    target: ModelShape
    draft: ModelShape | None = None
    draft_format: str = "bf16"
    shared: bool = False

    def check(self, server: Server) -> None:
        """Raises SpecqError when the target cannot be divided over the server's GPUs."""
        if not self.target.splits(server.gpus):
            raise SpecqError(
                f"{self.target.heads} heads with {self.target.kv_heads} KV heads cannot be divided over {server.gpus}"
                " tensor-parallel GPUs"
            )

    def _parts(self, fmt: KVFormat, gpus: int) -> list[tuple[ModelShape, KVFormat, int]]:
        """(shape, format, GPUs it is spread over); a draft whose heads do not divide sits on one GPU."""
        parts = [(self.target, fmt, gpus)]
        if self.draft is not None:
            parts.append((self.draft, get_format(self.draft_format), gpus if self.draft.splits(gpus) else 1))
        return parts

    def weights_bytes(self, gpus: int = 1) -> float:
        """Bytes of weights on the fullest of `gpus`."""
        parts = self._parts(get_format("bf16"), gpus)[: 1 if self.shared else None]
        return sum(shape.resident_bytes / over for shape, _, over in parts)

    def sequence_bytes(self, fmt: KVFormat, tokens: int, gpus: int = 1) -> tuple[int, int]:
        """(code bytes, scale bytes) of one sequence on the fullest of `gpus`, target and draft together."""
        parts = [shape.kv_bytes(f, tokens, over) for shape, f, over in self._parts(fmt, gpus)]
        return sum(c for c, _ in parts), sum(s for _, s in parts)

    def free_bytes(self, server: Server) -> float:
        """Bytes per GPU left for KV beside the weights; negative where the weights alone do not fit."""
        return server.usable_bytes - self.weights_bytes(server.gpus)

    def sequences(self, fmt: KVFormat, tokens: int, server: Server) -> int:
        """How many sequences of `tokens` fit."""
        return max(0, int(self.free_bytes(server) // sum(self.sequence_bytes(fmt, tokens, server.gpus))))

    def longest(self, fmt: KVFormat, sequences: int, server: Server) -> int:
        """The longest context, in tokens, at which `sequences` fit; 0 where none does."""
        limits = [s.max_positions for s, _, _ in self._parts(fmt, server.gpus) if s.max_positions]
        low, high = 0, min([*limits, LONGEST])
        while low < high:  # bytes grow with tokens: bisection
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.sequences(fmt, middle, server) >= sequences else (low, middle - 1)
        return low


@dataclass(frozen=True)
class FormatRow:
    """One format's line: bytes of one sequence over all GPUs (replicas counted) and of its target's cache alone, and
    what fits. `refused` says why a format is impossible for this model; then the figures are None."""

    name: str
    vllm: str | None
    target_codes: int | None = None
    target_scales: int | None = None
    per_gpu: int | None = None
    fit: int | None = None
    longest: int | None = None
    servers: int | None = None
    refused: str | None = None


@dataclass(frozen=True)
class CapacityReport:
    """The answer of `specq capacity`."""

    load: Load
    server: Server | None
    context: int
    sequences: int | None
    rows: list[FormatRow]


def report(
    load: Load, formats: Sequence[KVFormat], context: int, server: Server | None, sequences: int | None
) -> CapacityReport:
    """One row per format; what fits needs a server, the longest context also a number of sequences."""
    if server is not None:
        load.check(server)
    return CapacityReport(
        load, server, context, sequences, [_row(load, f, context, server, sequences) for f in formats]
    )


def _row(load: Load, fmt: KVFormat, context: int, server: Server | None, sequences: int | None) -> FormatRow:
    try:
        codes, scales = load.target.kv_bytes(fmt, context)
    except SpecqError as error:
        return FormatRow(fmt.name, fmt.vllm, refused=str(error))
    if server is None:
        return FormatRow(fmt.name, fmt.vllm, codes, scales)
    fit = load.sequences(fmt, context, server)
    return FormatRow(
        fmt.name,
        fmt.vllm,
        codes,
        scales,
        sum(load.sequence_bytes(fmt, context, server.gpus)),
        fit,
        load.longest(fmt, sequences, server) if sequences else None,
        -(-sequences // fit) if sequences and fit else None,
    )


def gigabytes(size: float) -> str:
    """Bytes as GB (10^9) for people: two decimals below 20 GB, one below 1000, none above."""
    value = size / 1e9
    return f"{value:,.{2 if value < 20 else 1 if value < 1000 else 0}f} GB"


def explain(found: CapacityReport) -> list[str]:
    """The answer in sentences: what does not fit, and which format and context would."""
    load, server, wanted = found.load, found.server, found.sequences
    usable = [r for r in found.rows if r.refused is None]
    if server is None or not usable:
        return []
    free = load.free_bytes(server)
    weights = f"weights {gigabytes(load.target.resident_bytes)}"
    weights += f" and a draft of {gigabytes(load.draft.resident_bytes)}" if load.draft and not load.shared else ""
    if free <= 0:
        return [
            f"{server.name} do not hold the weights: {weights}, {gigabytes(load.weights_bytes(server.gpus))} on the"
            f" fullest GPU, of which {gigabytes(server.usable_bytes)} can be used"
        ]
    lines = [
        f"{server.name} hold {weights} and have {gigabytes(free * server.gpus)} left for KV cache"
        f" ({server.memory_gb:g} GB each, {100 * server.utilisation:g} % used, {server.reserve_gb:g} GB of it for"
        " activations and graphs)"
    ]
    base = next((r for r in usable if r.name == "bf16"), None)
    alike: dict[tuple, list[FormatRow]] = {}
    for r in usable:
        alike.setdefault((r.per_gpu, r.fit), []).append(r)
    if wanted is None:
        return lines + [_room(rows, base, found.context) for rows in alike.values()]
    return [*lines, _verdict(usable, wanted, found.context), *(_fits(rows, wanted, found) for rows in alike.values())]


def _names(rows: list[FormatRow]) -> str:
    return ", ".join(r.name for r in rows)


def _room(rows: list[FormatRow], base: FormatRow | None, context: int) -> str:
    more = ""
    if base is not None and base not in rows:
        more = f", {rows[0].fit / base.fit:.2f} times BF16's" if base.fit else " where BF16 fits none"
    return f"{_names(rows)}: {_count(rows[0].fit, context)} fit{more}"


def _verdict(usable: list[FormatRow], wanted: int, context: int) -> str:
    """The one line: which formats hold what is wanted, or else which comes nearest."""
    fitting = [r for r in usable if r.fit >= wanted]
    if fitting:
        return f"{_count(wanted, context)} fit in {_names(fitting)}"
    best = max(usable, key=lambda r: r.longest)
    near = f"{best.name} would hold {wanted:,} of at most {best.longest:,} tokens, or {best.fit:,} of {context:,}"
    return f"{_count(wanted, context)} fit in no format; nearest: {near}"


def _fits(rows: list[FormatRow], wanted: int, found: CapacityReport) -> str:
    r = rows[0]
    whose = " (target and draft)" if found.load.draft else ""
    need = f"{gigabytes(r.per_gpu * wanted * found.server.gpus)} of KV cache{whose} over all GPUs"
    if r.fit >= wanted:
        room = f"{r.fit:,} sequence{'' if r.fit == 1 else 's'}"
        return f"{_names(rows)}: {need}, fits; room for {room}, or {wanted:,} of {r.longest:,} tokens"
    would = f"{wanted:,} fit up to {r.longest:,} tokens" if r.longest else "no context is short enough"
    more = f", or on {r.servers} such servers side by side" if r.servers else ""
    return f"{_names(rows)}: {need}, does not fit; {r.fit:,} {'does' if r.fit == 1 else 'do'}, or {would}{more}"


def _count(sequences: int, context: int) -> str:
    return f"{sequences:,} sequence{'' if sequences == 1 else 's'} of {context:,} tokens"
