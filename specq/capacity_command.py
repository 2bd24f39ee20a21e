"""What `specq capacity` does: shapes from the registry or a configuration, one table, and the answer in sentences."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from specq import pairs
from specq.capacity import LONGEST, CapacityReport, FormatRow, Load, Server, explain, gigabytes, report
from specq.cost.gpus import parse_gpus
from specq.errors import SpecqError
from specq.kv import FORMATS, get_format
from specq.shape import ModelShape, shape_of_source, with_weight_bytes
from specq.terminal import Terminal


def capacity_command(
    *,
    pair: str | None,
    target: str | None,
    draft: str | None,
    dtypes: list[str],
    draft_dtype: str,
    gpus: str | None,
    context: int,
    sequences: int | None,
    weight_bytes: float | None,
    utilisation: float,
    reserve_gb: float,
    as_json: bool,
) -> None:
    """Print how much KV cache a sequence takes in every format and, with `gpus`, what fits."""
    formats = [get_format(d) for d in dtypes] or [f for f in FORMATS if f.vllm]
    if context < 1 or (sequences is not None and sequences < 1):
        raise SpecqError("--context and --sequences must be at least 1")
    server = _server(gpus, utilisation, reserve_gb)
    if sequences is not None and server is None:
        raise SpecqError("--sequences asks what fits: name the server with --gpus, e.g. --gpus 8xh100")
    shared = pairs.drafts_for_itself(pair, draft)
    load = Load(*pair_shapes(pair, target, draft, weight_bytes), get_format(draft_dtype).name, shared)
    found = report(load, formats, context, server, sequences)
    if as_json:
        print(json.dumps(as_dict(found), indent=2, allow_nan=False))
        return
    console = Terminal()
    console.print(_title(found), markup=False)
    table = _table(found)
    if console.measure(table, options=console.options.update(max_width=1000)).maximum > console.width:
        table = _table(found, vllm=False)  # `specq formats` has vLLM's names; no name or number is cut
    console.print(table)
    for line in explain(found):
        console.print(line, markup=False)


def _server(gpus: str | None, utilisation: float, reserve_gb: float) -> Server | None:
    if not 0 < utilisation <= 1:
        raise SpecqError(f"--memory-share {utilisation} must be above 0 and at most 1")
    if reserve_gb < 0:
        raise SpecqError(f"--reserve-gb {reserve_gb} must not be negative")
    if gpus is None:
        return None
    count, gpu = parse_gpus(gpus)
    return Server(gpu.name, count, gpu.memory, utilisation, reserve_gb)


def pair_shapes(
    pair: str | None, target: str | None, draft: str | None, weight_bytes: float | None
) -> tuple[ModelShape, ModelShape | None]:
    """Shapes of target and draft (None where it is no model): registered, else from the model's own configuration."""
    if weight_bytes is not None and not weight_bytes > 0:
        raise SpecqError(f"--weight-bytes {weight_bytes} must be above 0")
    named = None if target and (draft or pair is None) else pairs.find(pair or "tiny", None, None)
    main = shape_of_source(_source(target)) if target else _registered(named.target)
    main = with_weight_bytes(main, weight_bytes)
    side = draft or (named.draft.source if named else pairs.NGRAM)
    if side in (pairs.SELF, pairs.NGRAM):
        return main, main if side == pairs.SELF else None
    return main, shape_of_source(_source(draft)) if draft else _registered(named.draft)


def _source(given: str) -> str:
    looks_local = given.startswith((".", "/", "~")) or given.count("/") != 1
    if looks_local and not Path(given).is_dir():
        raise SpecqError(f"no model directory at {given}; give a directory with config.json or a hub id like org/name")
    return given


def _registered(side: pairs.Side) -> ModelShape:
    return ModelShape.of_registered(side.shape)


def _title(found: CapacityReport) -> str:
    t = found.load.target
    kept = ", ".join(f"{n} of window {w}" if w else f"{n} full" for w, n in t.layers)
    heads = f"a latent of {t.latent} elements" if t.latent else f"{_kv_heads(t.kv_heads)} x {t.head_dim}"
    over = f"; {found.server.gpus} GPUs keep {_copies(found)}" if found.server and found.server.gpus > 1 else ""
    beyond = (
        f" (beyond the model's {t.max_positions:,} positions)" if found.context > (t.max_positions or LONGEST) else ""
    )
    return (
        f"target: {t.weights / 1e9:.2f} B weights ({gigabytes(t.resident_bytes)}); layers: {kept}; {heads}{over}\n"
        f"one sequence of {found.context:,} tokens{beyond}:"
    )


def _copies(found: CapacityReport) -> str:
    t, n = found.load.target, found.server.gpus
    if t.latent:
        return f"a whole latent each ({n} copies)"
    return f"every KV head {n // t.kv_heads} times" if n > t.kv_heads else f"{_kv_heads(t.kv_heads // n)} each"


def _kv_heads(n: int) -> str:
    return f"{n} KV head{'' if n == 1 else 's'}"


def _table(found: CapacityReport, *, vllm: bool = True) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    headings = ["format", "vLLM", "KV cache", "of it\nscales"]
    if found.server:
        headings += ["per GPU\nwith draft" if found.load.draft else "per GPU", "sequences\nthat fit"]
    if found.sequences:
        headings.append(f"longest\ncontext\nof {found.sequences:,}")
    rows = [headings, *(_cells(row, found) for row in found.rows)]
    if not vllm:
        rows = [[row[0], *row[2:]] for row in rows]
    for heading in rows[0]:
        left = heading in ("format", "vLLM")
        table.add_column(heading, justify="left" if left else "right", vertical="bottom", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _cells(row: FormatRow, found: CapacityReport) -> list[str]:
    names = [row.name, row.vllm or "none"]
    if row.refused:
        return [*names, "refused"]
    cells = [
        gigabytes(row.target_codes + row.target_scales),
        gigabytes(row.target_scales) if row.target_scales else "0",
    ]
    if found.server:
        cells += [gigabytes(row.per_gpu), f"{row.fit:,}"]
    if found.sequences:
        cells.append(f"{row.longest:,}")
    return names + cells


def as_dict(found: CapacityReport) -> dict:
    """For JSON: everything in bytes, and the sentences."""
    server = None
    if found.server:
        free = found.load.free_bytes(found.server)
        server = asdict(found.server) | {"free_bytes_per_gpu": free, "weights_bytes": found.load.weights_bytes()}
    return {
        "target": found.load.target.as_dict(),
        "draft": found.load.draft.as_dict() if found.load.draft else None,
        "draft_kv_dtype": found.load.draft_format,
        "server": server,
        "context": found.context,
        "sequences": found.sequences,
        "formats": [asdict(r) for r in found.rows],
        "answer": explain(found),
    }
