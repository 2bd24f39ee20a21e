"""Everything of a model directory or GGUF file but its weights: files, configuration, geometry, tokenizer.

Nothing here goes to the network, runs code of a checkpoint or reads a pickle.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from specq.errors import SpecqError, first_line
from specq.models.checkpoint import Checkpoint, open_checkpoint, staged
from specq.models.config import LOCAL, read_config
from specq.models.geometry import Geometry, geometry_of
from specq.models.weight_files import GGUF

GGUF_FILE = {"gguf_file": f"model{GGUF}"}  # as `staged` names it
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass
class Examined:
    """A model without its weights: transformers config, geometry; checked files and tokenizer unless it will be random."""

    config: Any
    geometry: Geometry
    checkpoint: Checkpoint | None = None
    tokenizer: Any = None


def quiet() -> None:
    """Keep transformers from writing bars and warnings between specq's own lines."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def _readable(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, str]]]:
    """(directory, further arguments) that the library reads configuration and tokenizer with."""
    if not checkpoint.is_gguf:
        yield str(checkpoint.directory), {}
        return
    with staged(checkpoint) as view:
        yield str(view), GGUF_FILE


def examine(source: str) -> Examined:
    """Read everything of a model directory or GGUF file but its weights. Raises SpecqError when it cannot be used."""
    quiet()
    checkpoint = open_checkpoint(source)
    with _readable(checkpoint) as (where, more):
        config = read_config(source, checkpoint.config, where, **more)
        geometry = geometry_of(config)
        if not checkpoint.is_gguf:
            _refuse_implausible(checkpoint, config, geometry)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise SpecqError(f"{source} holds a {config.model_type} model, which transformers knows no causal LM for")
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, **more, **LOCAL)
        except Exception as error:  # transformers raises many kinds here; the reason is in the text
            known = any((checkpoint.directory / name).is_file() for name in _TOKENIZERS) or checkpoint.is_gguf
            reason = first_line(error) if known else f"it has none of {', '.join(_TOKENIZERS)}"
            raise SpecqError(f"no usable tokenizer in {source}: {reason}") from error
    return Examined(config, geometry, checkpoint, tokenizer)


def _refuse_implausible(checkpoint: Checkpoint, config: Any, geometry: Geometry) -> None:  # noqa: ANN401
    """Raises SpecqError when config.json describes a far larger model than the weights hold.

    transformers would allocate what config.json says before it noticed. The count is a lower bound on the described
    model; the weights may be packed 8 to one element.
    """
    inner = getattr(config.get_text_config(), "intermediate_size", None)
    per_layer = geometry.hidden * (geometry.heads * geometry.head_dim + (inner if isinstance(inner, int) else 0))
    described = geometry.vocab * geometry.hidden + geometry.layers * per_layer
    stored = sum(prod(t.shape) for t in checkpoint.tensors.values())
    if described > 16 * stored or geometry.layers > len(checkpoint.tensors):
        raise SpecqError(
            f"config.json in {checkpoint.directory} describes at least {described:,} parameters in {geometry.layers} layers,"
            f" and the weights hold {stored:,} in {len(checkpoint.tensors)} tensors; they do not belong together"
        )
