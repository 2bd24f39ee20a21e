"""Outlier key channels made on purpose: a stress that leaves the model with a BF16 cache what it was, to the bit."""

from pathlib import Path

import torch

from specq import pairs
from specq.models.loaded import LoadedModel
from specq.models.loading import load

CHANNELS, HEAD = (5, 11), 0


def add_outliers(model: LoadedModel, factor: float) -> None:
    """Scale both channels of some rotary pairs of KV head 0 by `factor` in k_proj and by 1 / factor in its queries' q_proj.

    Every layer gets them. Powers of two are exact and q k is unchanged, so nothing changes but what a KV format makes of it.
    For models of the Llama layout with separate q_proj and k_proj and no norm behind them.
    """
    g = model.geometry
    half, group = g.head_dim // 2, g.heads // g.kv_heads
    with torch.no_grad():
        for layer in model.model.model.layers:
            for channel in (c + offset for c in CHANNELS for offset in (0, half)):
                layer.self_attn.k_proj.weight[HEAD * g.head_dim + channel] *= factor
                for head in range(HEAD * group, (HEAD + 1) * group):
                    layer.self_attn.q_proj.weight[head * g.head_dim + channel] /= factor


def stressed_target(pair: str, factor: float, folder: Path) -> Path:
    """The pair's target with outliers as a model directory; taken from `folder` where it was written before."""
    if not (folder / "tokenizer.json").is_file():  # written last
        model = load(pairs.locate(pairs.find(pair, None, None))[0])
        add_outliers(model, factor)
        model.model.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
    return folder
