"""The kernels as a cache layer: stored bytes and logits of models against the torch reference.

Models of one layer: a last bit of difference in one layer's attention can move a code of the next by one step.

Without a GPU the kernels run in Triton's interpreter; on one, on the hardware (there the tolerance is that of bf16
attention).
"""

import pytest
import torch
from conftest import save_model

pytest.importorskip("triton")
from specq_kernels.codec import INTERPRETED  # noqa: E402

from specq.kv import FORMATS, get_format
from specq.kv.attention import LazyMask
from specq.kv.cache import LayerScales, QuantizedCache, QuantizedLayer
from specq.kv.paged import PagedLayer, kernel_backend
from specq.models.loading import load

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="neither interpreter nor GPU"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = 2e-5 if INTERPRETED else 2e-2


def caches(model, name, batch, capacity=80, splits=1):
    """The same empty cache in torch and in pages, static scales as a calibration might give them."""
    heads, dim = model.geometry.kv_heads, model.geometry.head_dim
    g = torch.Generator().manual_seed(0)
    k = 0.02 + 0.02 * torch.rand(1, heads, 1, dim if "channel" in name else 1, generator=g)
    scales = [LayerScales(k, torch.full((1, heads, 1, 1), 0.03)) for _ in range(model.geometry.layers)]
    return [
        QuantizedCache(get_format(name), scales, batch, capacity, False, splits, kind)
        for kind in (QuantizedLayer, PagedLayer)
    ]


def rounds(model, cache):
    """Logits of a prompt of 40 tokens for three rows, a rollback to ragged lengths, 3 more tokens, and one row left out."""
    tokens = torch.randint(0, 20, (3, 40), generator=torch.Generator().manual_seed(1))
    out = [model.forward(tokens, cache)]
    cache.rollback(torch.tensor([40, 17, 31]))
    out.append(model.forward(tokens[:, :3], cache, counts=torch.tensor([3, 0, 2])))
    cache.select(torch.tensor([2, 0]))
    out.append(model.forward(tokens[:2, :2], cache))
    return out


def relative(a, b):
    """||a - b|| / ||b||."""
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("name", [f.name for f in FORMATS])
def test_a_paged_model_is_the_reference(tmp_path, name):
    """Every format: bytes in the pages read back as the reference's, and logits agree through prefill, rollback to ragged
    lengths, verification of three tokens, and a selection of rows."""
    model = load(str(save_model(tmp_path / "m", seed=3, head_dim=64, num_hidden_layers=1)), device=DEVICE)
    plain, paged = caches(model, name, 3)
    for a, b in zip(rounds(model, plain), rounds(model, paged), strict=True):
        assert relative(b, a) < TOLERANCE
    for a, b in zip(plain.layers[0].read(torch.float32), paged.layers[0].read(torch.float32), strict=True):
        for row, n in enumerate(paged.lengths):
            assert torch.equal(a[row, :, :n], b[row, :, :n])
    codes, scales = get_format(name).bytes_per_token(model.geometry.kv_heads, model.geometry.head_dim)
    assert paged.nbytes == 3 * 80 * model.geometry.layers * (codes + scales)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_models_of_other_makes(tmp_path, kind, monkeypatch):
    """Bias in K, QK norm, sliding windows: the paged model is the reference there as well, through the kernels."""
    monkeypatch.setattr(PagedLayer, "read", None)
    model = load(str(save_model(tmp_path / "m", kind, seed=3, head_dim=64, num_hidden_layers=1)), device=DEVICE)
    plain, paged = caches(model, "int8_per_token_head", 3)
    for a, b in zip(rounds(model, plain), rounds(model, paged), strict=True):
        assert relative(b, a) < TOLERANCE


def test_the_null_arm_sums_in_another_order(tmp_path):
    """More splits: other bits, the same numbers."""
    model = load(str(save_model(tmp_path / "m", seed=3, head_dim=64, num_hidden_layers=1)), device=DEVICE)
    tokens = torch.randint(0, 20, (1, 70), generator=torch.Generator().manual_seed(1))
    one, three = (model.forward(tokens, caches(model, "bf16", 1, splits=n)[1]) for n in (1, 3))
    assert not torch.equal(one, three) and relative(three, one) < TOLERANCE


def test_masks_that_the_kernels_know():
    """Causal and windowed masks are recognised by what they were built from; chunks and other masks are not."""
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        chunked_causal_mask_function,
        or_masks,
        sliding_window_causal_mask_function,
        sliding_window_overlay,
    )

    assert LazyMask(causal_mask_function, 1).window == 0
    assert LazyMask(sliding_window_causal_mask_function(4096), 1).window == 4096
    chunked = chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long))
    both = and_masks(sliding_window_overlay(5), causal_mask_function, lambda b, h, q, k: k > 2)
    for other in (chunked, both, or_masks(sliding_window_overlay(5), causal_mask_function), lambda b, h, q, k: k <= q):
        assert LazyMask(other, 1).window is None


def test_the_choice_of_a_backend_is_explained(caplog):
    """Q-29, no GPU: the torch reference runs, the reason is logged once."""
    kernel_backend.cache_clear()
    with caplog.at_level("INFO", "specq"):
        backends = {kernel_backend(torch.device("cpu"), 64, 1) for _ in range(3)}
    assert backends == {("torch", "the model is on a cpu device, the kernels need a CUDA GPU")}
    assert len([r for r in caplog.records if "need a CUDA GPU" in r.getMessage()]) == 1
