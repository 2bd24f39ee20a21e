"""The quantized cache and the attention hook against transformers' own attention, on many architectures."""

import pytest
import torch
from conftest import CONFIGS, FLOAT32, VOCAB, edit_json, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specq.kv import FORMATS, get_format
from specq.kv.attention import LazyMask, attend_in_pieces, attention
from specq.kv.base import E4M3
from specq.kv.cache import LayerScales, QuantizedCache
from specq.models.loading import load

BF16 = get_format("bf16")


def tokens(seed, *shape):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def both(request, tmp_path_factory):
    """(our loaded model, transformers' eager model) of one architecture."""
    path = save_model(tmp_path_factory.mktemp(request.param), request.param, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return load(str(path)), reference


def test_one_pass_equals_the_models_own_attention(both):
    """With K and V untouched, a whole text in one pass gives the eager model's logits (window, soft cap, biases and all)."""
    ours, reference = both
    x = tokens(0, 2, 20)
    with torch.inference_mode():
        expected = reference(x, use_cache=False).logits
    got = ours.forward(x, ours.new_cache(FLOAT32, 2, 20))
    assert torch.allclose(got, expected, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("splits", [1, 3])
def test_chunks_and_single_tokens_equal_one_pass(both, splits):
    """Chunked prefill, then tokens one by one and in small blocks, with and without split attention: the same logits."""
    ours, _ = both
    x = tokens(1, 2, 24)
    whole = ours.forward(x, ours.new_cache(FLOAT32, 2, 24))
    cache = ours.new_cache(FLOAT32, 2, 24, splits=splits)
    parts = [ours.forward(piece, cache) for piece in x.split([7, 1, 1, 5, 10], dim=1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-4 * float(whole.abs().max()))


def test_s25_unequal_rows_equal_single_rows(both):
    """S-25: prompts of 3, 7 and 11 tokens in one batch, then two more tokens, give each prompt's own logits.

    The learned positions of GPT-2 are among the models.
    """
    ours, _ = both
    lengths = torch.tensor([3, 7, 11])
    x, more = tokens(2, 3, 11), tokens(3, 3, 2)
    cache = ours.new_cache(FLOAT32, 3, 16)
    ours.forward(x, cache, counts=lengths)
    together = ours.forward(more, cache)
    for row, n in enumerate(lengths.tolist()):
        alone = ours.new_cache(FLOAT32, 1, 16)
        ours.forward(x[row : row + 1, :n], alone)
        expected = ours.forward(more[row : row + 1], alone)
        assert torch.allclose(together[row], expected[0], atol=2e-4 * float(expected.abs().max()))
    assert cache.lengths.tolist() == [5, 9, 13]


def test_rollback_forgets_and_select_keeps(both):
    """After a rollback the next logits are those of the shorter text, and `select` keeps the right rows."""
    ours, _ = both
    x, more = tokens(4, 3, 12), tokens(5, 3, 1)
    cache = ours.new_cache(FLOAT32, 3, 20)
    ours.forward(x, cache)
    keep = torch.tensor([12, 4, 9])
    cache.rollback(keep)
    cache.select(torch.tensor([0, 2]))
    got = ours.forward(more[[0, 2]], cache)
    for i, row in enumerate((0, 2)):
        alone = ours.new_cache(FLOAT32, 1, 20)
        ours.forward(x[row : row + 1, : keep[row]], alone)
        expected = ours.forward(more[row : row + 1], alone)
        assert torch.allclose(got[i], expected[0], atol=2e-4 * float(expected.abs().max()))
    with pytest.raises(ValueError, match="shorten"):
        cache.rollback(torch.tensor([99, 1]))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_rows_do_not_depend_on_their_neighbours(fmt, small_pair):
    """Check 4: what a row stores does not depend on which rows share its batch, nor on their order."""
    target, _ = small_pair
    heads, dim = target.geometry.kv_heads, target.geometry.head_dim
    x = torch.randn(3, heads, 9, dim, generator=torch.Generator().manual_seed(6))
    scales = [LayerScales(torch.full((1, heads, 1, dim), 0.03), torch.full((1, 1, 1, 1), 0.03))]

    def stored(rows):
        cache = QuantizedCache(fmt, scales, len(rows), 9)
        layer = cache.layers[0]
        layer.update(x[rows], x[rows].flip(-1))
        return layer.read(torch.float32)

    k, v = stored([0, 1, 2])
    for rows in ([2, 0, 1], [1], [0, 2]):
        kk, vv = stored(rows)
        assert torch.equal(kk, k[rows]) and torch.equal(vv, v[rows])


def test_q20_query_heads_find_their_kv_head():
    """Q-20: Hq=8, Hkv=2, V of KV head h constant h+1: query head i gives floor(i/4)+1; per-head scales 1 and 10 too."""
    scales = LayerScales(v=torch.tensor([1.0, 10.0]).view(1, 2, 1, 1))
    for fmt, v_scales in ((FLOAT32, LayerScales()), (get_format("fp8"), scales)):
        cache = QuantizedCache(fmt, [v_scales], 1, 5)
        layer = cache.layers[0]
        v = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 5, 8)
        if fmt is not FLOAT32:
            v = v * torch.tensor([1.0, 10.0]).view(1, 2, 1, 1)
        layer.update(torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)), v.contiguous())
        q = torch.randn(1, 8, 5, 8, generator=torch.Generator().manual_seed(1))
        out, _ = attention(torch.nn.Module(), q, layer, layer, LazyMask(causal(), 5))
        expected = torch.tensor([1.0] * 4 + [2.0] * 4)
        if fmt is not FLOAT32:
            expected = expected * torch.tensor([1.0] * 4 + [10.0] * 4)
        assert torch.allclose(out, expected.view(1, 1, 8, 1).expand_as(out))


def causal():
    from transformers.masking_utils import causal_mask_function

    return causal_mask_function


def test_split_attention_merges_exactly():
    """Cutting K/V into pieces and merging by log-sum-exp gives the softmax of the whole, masked rows and sinks included."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 16, generator=g, dtype=torch.float64).float()
    k, v = (torch.randn(2, 2, 23, 16, generator=g) for _ in range(2))
    allowed = (torch.arange(23)[None, :] <= torch.arange(18, 23)[:, None])[None, None].expand(2, 1, 5, 23).clone()
    allowed[1, :, :, 8:16] = False  # one piece wholly masked for the second row
    sinks = torch.randn(6, generator=g)
    kk, vv = (t.repeat_interleave(3, 1).double() for t in (k, v))
    s = (q.double() @ kk.transpose(-1, -2) * 0.25).masked_fill(~allowed, float("-inf"))
    plain = s.softmax(-1) @ vv
    with_sink = torch.cat([s, sinks.double().view(1, 6, 1, 1).expand(2, 6, 5, 1)], -1).softmax(-1)[..., :-1] @ vv
    for splits in (1, 2, 3, 7, 23, 40):
        assert torch.allclose(attend_in_pieces(q, k, v, allowed, 0.25, splits=splits).double(), plain, atol=1e-5)
        got = attend_in_pieces(q, k, v, allowed, 0.25, sinks=sinks, splits=splits)
        assert torch.allclose(got.double(), with_sink, atol=1e-5)


def test_q09_checkpoint_scales_do_not_touch_a_bf16_cache(tmp_path):
    """Q-09: a checkpoint with k_scale 0.02 and a BF16 cache gives bit-identical logits to one without scales."""
    plain = save_model(tmp_path / "plain", seed=7)
    scaled = save_model(tmp_path / "scaled", seed=7)
    weights = load_file(scaled / "model.safetensors")
    for layer in range(2):
        for part in "kv":
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(0.02)
    save_file(weights, scaled / "model.safetensors", metadata={"format": "pt"})
    a, b = load(str(plain)), load(str(scaled))
    x = tokens(8, 1, 30)
    assert torch.equal(a.forward(x, a.new_cache(BF16, 1, 30)), b.forward(x, b.new_cache(BF16, 1, 30)))
    assert [s.source for s in b.scales] == ["checkpoint"] * 2 and [s.source for s in a.scales] == ["one"] * 2
    fp8 = get_format("fp8")
    assert not torch.equal(a.forward(x, a.new_cache(fp8, 1, 30)), b.forward(x, b.new_cache(fp8, 1, 30)))
    assert b.scales[0].k.item() == pytest.approx(0.02)


def test_bytes_are_those_of_the_format(small_pair):
    """FP8 really stores half of BF16's bytes; per-token-head formats add their float32 scales and nothing else."""
    target, _ = small_pair
    x = tokens(9, 2, 16)
    for fmt in FORMATS:
        cache = target.new_cache(fmt, 2, 16)
        target.forward(x, cache)
        assert cache.nbytes == 2 * 16 * sum(target.geometry.kv_bytes_per_token(fmt)), fmt.name
    assert target.geometry.kv_bytes_per_token(get_format("fp8"))[0] * 2 == target.geometry.kv_bytes_per_token(BF16)[0]


def test_saturation_and_nonfinite_are_counted_per_layer(small_pair):
    """Static scales count elements beyond the largest code per layer; NaN handed to the cache is counted, not hidden."""
    target, _ = small_pair
    heads, dim = target.geometry.kv_heads, target.geometry.head_dim
    cache = QuantizedCache(get_format("fp8"), [LayerScales(), LayerScales()], 1, 4)
    k = torch.zeros(1, heads, 4, dim)
    k[0, 0, 0, :3] = torch.tensor([449.0, -1e6, 448.0])
    cache.layers[1].update(k, torch.zeros_like(k))
    cache.layers[0].update(torch.zeros_like(k), torch.zeros_like(k))
    assert cache.saturated_per_layer() == [0, 2] and cache.nonfinite() == 0
    k[0, 1, 2, 0] = float("nan")
    cache.layers[0].update(k, k)
    assert cache.nonfinite() == 2


def test_query_rounding_is_e4m3(small_pair):
    """`round_query` makes attention see the query's nearest e4m3 value; off, it sees the query."""
    cache = QuantizedCache(get_format("fp8"), [LayerScales()], 1, 4, round_query=True)
    q = torch.tensor([1.06, 17.0, -0.3, 500.0]).view(1, 1, 1, 4)
    assert cache.layers[0].round_query(q).flatten().tolist() == pytest.approx([1.0, 16.0, -0.3125, 448.0])
    cache.rows.round_query = False
    assert cache.layers[0].round_query(q) is q


def test_a_bf16_query_is_rounded_once():
    """With a query scale the codes are those of the exact quotient: a quotient rounded to bfloat16 first would reach a tie."""
    scale = torch.full((1, 1, 1, 1), 0.0213)
    cache = QuantizedCache(get_format("fp8"), [LayerScales(q=scale)], 1, 4, round_query=True)
    q = torch.randn(1, 1, 512, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = E4M3.encode(q.double() / scale.double()).double() * scale.double()
    assert torch.equal(cache.layers[0].round_query(q), exact.float().bfloat16())
    assert not torch.equal(E4M3.encode(q / scale.bfloat16()).float() * scale, exact.float())


def test_a_cache_is_freed_with_its_last_reference(small_pair):
    """No reference cycle keeps a cache's tensors alive: a long study would otherwise grow with every text."""
    import gc
    import weakref

    target, _ = small_pair
    gc.disable()
    try:
        cache = target.new_cache(BF16, 1, 8)
        target.forward(tokens(0, 1, 8), cache)
        gone = weakref.ref(cache.layers[0].stored["k"][0])
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_writing_past_the_capacity_is_refused(small_pair):
    """A cache never silently drops tokens: exceeding its capacity raises."""
    target, _ = small_pair
    with pytest.raises((ValueError, RuntimeError)):
        target.forward(tokens(1, 1, 9), target.new_cache(BF16, 1, 8))


def test_rope_settings_reach_the_model(tmp_path):
    """Changing rope_theta in config.json changes the logits: the configuration is the model's, not ours."""
    path = save_model(tmp_path / "m", seed=3)
    x = tokens(0, 1, 100)
    first = load(str(path))
    before = first.forward(x, first.new_cache(BF16, 1, 100))
    edit_json(path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    second = load(str(path))
    assert not torch.allclose(before, second.forward(x, second.new_cache(BF16, 1, 100)))
