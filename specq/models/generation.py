"""What ends a text and how tokens are sampled unless the user says otherwise: generation_config.json, as vLLM reads it."""

import torch

from specq.errors import SpecqError
from specq.models.directory import read_json_object
from specq.models.examine import Examined

SAMPLING = ("temperature", "top_k", "top_p")
# settings that vLLM applies by default and specq does not model, with their values that do nothing
UNMODELLED = {"repetition_penalty": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def generation_settings(
    examined: Examined, model: torch.nn.Module, notes: list[str]
) -> tuple[frozenset[int], dict[str, float]]:
    """(EOS ids, sampling settings): generation_config.json where there is one, else what the model's config implies.

    The tokenizer's EOS ends a text as well, as in vLLM. Raises SpecqError for settings of the wrong type.
    """
    path = examined.checkpoint.directory / "generation_config.json"
    own = path.is_file() and not examined.checkpoint.is_gguf  # a GGUF file speaks for itself alone
    given = read_json_object(path) if own else model.generation_config.to_diff_dict()
    eos = given.get("eos_token_id", model.generation_config.eos_token_id)
    if eos is None:
        eos = examined.config.get_text_config().eos_token_id
    ids = [eos] if isinstance(eos, int) else list(eos or ())
    if examined.tokenizer.eos_token_id is not None:
        ids.append(examined.tokenizer.eos_token_id)
    sampling = {k: given[k] for k in SAMPLING if given.get(k) is not None}
    for name, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise SpecqError(f"{path}: {name} is {value!r:.40}, not a number a sampler can use")
    if not all(isinstance(i, int) for i in ids):
        raise SpecqError(f"{path}: eos_token_id is {eos!r:.40}, neither a token id nor a list of them")
    for name, nothing in UNMODELLED.items():
        if given.get(name) not in (None, nothing):
            notes.append(
                f"generation_config sets {name} {given[name]!r:.20}, which vLLM applies by default and specq does not model"
            )
    return frozenset(ids), sampling
