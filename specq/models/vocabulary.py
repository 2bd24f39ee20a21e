"""Whether two models may speak for one another: one token map, and the ids that both distributions live on."""

from dataclasses import dataclass
from typing import Any, Protocol

from specq.errors import SpecqError
from specq.models.geometry import Geometry


class Described(Protocol):
    """What `check_pair` needs to know of a model, loaded or only examined; random weights have no tokenizer."""

    tokenizer: Any
    geometry: Geometry


@dataclass(frozen=True)
class Vocabulary:
    """Sizes that must be told apart: ids the tokenizer knows, and the (padded) logits of each model.

    Both distributions live on ids below `size`, the tokenizer's length capped by the target's logits; ids beyond `size` are
    never emitted. The draft has at least so many: it must be able to read what the target may emit.
    """

    size: int
    tokenizer: int
    target_logits: int
    draft_logits: int


def check_pair(target: Described, draft: Described) -> Vocabulary:
    """Common vocabulary of two models.

    Raises SpecqError when their token maps differ, naming the first differing id and both strings, when their special
    tokens do, and when the draft's embedding lacks ids that the target may emit. Models without tokenizers (random weights)
    share the ids both have logits for.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        size = min(target.geometry.vocab, draft.geometry.vocab)
        return Vocabulary(size, size, target.geometry.vocab, draft.geometry.vocab)
    a, b = ({i: t for t, i in m.tokenizer.get_vocab().items()} for m in (target, draft))
    differing = [i for i in sorted(a.keys() | b.keys()) if a.get(i) != b.get(i)]
    if differing:
        i, of = differing[0], len(a.keys() | b.keys())
        raise SpecqError(
            f"target and draft have different tokenizers: id {i} is {a.get(i)!r} in the target and {b.get(i)!r} in"
            f" the draft, and {len(differing):,} of {of:,} ids differ in all; speculative decoding compares probabilities id"
            " by id and needs one token map. What would do: a draft of the target's own family, or one trained with the"
            " target's tokenizer; drafting across tokenizers goes through text and is another method, which vLLM's draft"
            " models do not use"
        )
    for name in ("bos_token_id", "eos_token_id"):
        x, y = getattr(target.tokenizer, name, None), getattr(draft.tokenizer, name, None)
        if x != y:
            raise SpecqError(f"target and draft disagree on {name}: {x} and {y}; they need one tokenizer")
    length = len(target.tokenizer)
    size = min(length, target.geometry.vocab)
    if draft.geometry.vocab < size:
        raise SpecqError(
            f"the target may emit {size:,} ids and the draft's embedding has {draft.geometry.vocab:,}: it could not read id"
            f" {draft.geometry.vocab} ({b.get(draft.geometry.vocab)!r})"
        )
    return Vocabulary(size, length, target.geometry.vocab, draft.geometry.vocab)
