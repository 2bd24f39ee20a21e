"""Model directories whose config.json alone is read, for sweeps with dummy weights."""

from pathlib import Path

from specq import files, pairs
from specq.errors import SpecqError
from specq.shape import ModelShape, shape_of_source


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


def config_directories(pair: pairs.Pair, folder: Path) -> tuple[tuple[str, str], ModelShape]:
    """((target, draft) directories, target's shape) with a config.json each: the pair's own where it is local, else one of the
    registered geometry.

    Raises SpecqError for a side with neither, and for unequal vocabularies, which vLLM refuses.
    """
    found, shapes = [], []
    for role, side in (("target", pair.target), ("draft", pair.draft)):
        if side.local and Path(side.source).is_dir():
            shapes.append(shape_of_source(side.source))
            found.append(str(Path(side.source).resolve()))
            continue
        if side.shape is None:
            raise SpecqError(
                f"the {role} {side.source} is neither a directory nor registered, so its shape is not known: choose one with"
                " --pair, `specq pairs` lists them"
            )
        shapes.append(ModelShape.of_registered(side.shape))
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
