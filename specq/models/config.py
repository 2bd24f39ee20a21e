"""A model's transformers configuration: read from its files without network or code of its own, or made from the registry."""

from pathlib import Path
from typing import Any

from specq.errors import SpecqError, first_line
from specq.models.directory import read_json_object
from specq.pairs import Side

# library calls on a directory: no network, no code of the checkpoint's
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def read_config(
    source: str,
    raw: dict[str, Any],
    where: str | None = None,
    local: bool = True,
    **more: str,
) -> Any:  # noqa: ANN401
    """The transformers config of `source`, read from `where` (itself by default); `raw` is its config.json.

    A hub id is looked up on the network when it is not `local`. Raises SpecqError: for files that describe no model, and for
    those that want code of their own to be run.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where or source, **more, **LOCAL | {"local_files_only": local})
    except Exception as error:  # transformers raises many kinds here; the reason is in the text
        code = " (it wants to run code of its own, auto_map, which specq does not do)" if "auto_map" in raw else ""
        raise SpecqError(f"cannot read a model configuration from {source}{code}: {first_line(error)}") from error


def config_of_side(side: Side) -> Any:  # noqa: ANN401
    """The transformers config of one side of a pair without its weights, for weights drawn at random.

    A directory's config.json, or the registered shape of a hub id or package. Raises SpecqError where neither is there.
    """
    from transformers import AutoConfig

    if side.local:
        return read_config(side.source, read_json_object(Path(side.source) / "config.json"))
    if side.shape is None:
        raise SpecqError(
            f"--random-weights: the shape of {side.source} is not registered; give a directory with config.json"
        )
    shape = side.shape
    windows = {} if shape.window is None else {"sliding_window": shape.window}
    return AutoConfig.for_model(
        shape.model_type,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131072,
        **windows,
    )
