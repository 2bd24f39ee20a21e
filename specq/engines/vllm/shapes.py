"""Model directories that hold a config.json alone, for sweeps with dummy weights."""

from pathlib import Path

from specq import files, pairs
from specq.errors import SpecqError


def llama_config(shape: pairs.Shape) -> dict:
    """config.json of a Llama-architecture model of a registered geometry."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.positions or 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def config_directories(pair: pairs.Pair, folder: Path) -> tuple[tuple[str, str], pairs.Shape]:
    """((target, draft) directories, target's shape) with a config.json each: the pair's own where it is local.

    Raises SpecqError for a side without a registered geometry, and for unequal vocabularies, which vLLM refuses.
    """
    found, shapes = [], []
    for role, side in (("target", pair.target), ("draft", pair.draft)):
        if side.shape is None:
            raise SpecqError(f"the {role} {side.source} has no registered geometry: `specq pairs` lists what has")
        shapes.append(side.shape)
        if side.local:
            found.append(str(Path(side.source).resolve()))
            continue
        path = folder / role
        files.make_directory(folder)
        path.mkdir(exist_ok=True)
        files.write_json(path / "config.json", llama_config(side.shape))
        found.append(str(path.resolve()))
    if shapes[0].vocab != shapes[1].vocab:
        raise SpecqError(
            f"vLLM refuses draft_model pairs of unequal vocabulary size ({shapes[0].vocab} and {shapes[1].vocab})"
        )
    return (found[0], found[1]), shapes[0]
