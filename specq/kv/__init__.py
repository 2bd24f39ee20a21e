"""KV formats and the cache that stores them. `get_format("fp8")` is the way in; one format lives in one file."""

from specq.errors import SpecqError
from specq.kv.base import KVFormat
from specq.kv.bf16 import BF16Format
from specq.kv.fp8_e4m3 import FP8E4M3
from specq.kv.fp8_e5m2 import FP8E5M2
from specq.kv.fp8_per_token_head import FP8PerTokenHead
from specq.kv.int8_k_channel_v_token import INT8KChannelVToken
from specq.kv.int8_per_channel import INT8PerChannel
from specq.kv.int8_per_tensor import INT8PerTensor
from specq.kv.int8_per_token_asym import INT8PerTokenAsym
from specq.kv.int8_per_token_head import INT8PerTokenHead

FORMATS: tuple[KVFormat, ...] = tuple(
    cls()
    for cls in (
        BF16Format,
        FP8E4M3,
        FP8E5M2,
        FP8PerTokenHead,
        INT8PerTokenHead,
        INT8PerTokenAsym,
        INT8PerChannel,
        INT8PerTensor,
        INT8KChannelVToken,
    )
)
_BY_NAME = {name: fmt for fmt in FORMATS for name in (fmt.name, *fmt.aliases)}


def get_format(name: str) -> KVFormat:
    """The format called `name` (or an alias). Raises SpecqError listing what is accepted."""
    try:
        return _BY_NAME[name.strip().lower()]
    except KeyError:
        known = ", ".join(f.name + (f" ({', '.join(f.aliases)})" if f.aliases else "") for f in FORMATS)
        raise SpecqError(f"unknown KV format {name!r}; accepted are {known}") from None


__all__ = ["FORMATS", "KVFormat", "get_format"]
