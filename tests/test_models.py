"""Pairs of models: vocabularies, tokenizers, scales of checkpoints, geometry, and what is refused."""

import pytest
import torch
from conftest import FLOAT32, VOCAB, edit_json, save_model
from safetensors.torch import load_file, save_file

from specq.errors import SpecqError
from specq.kv import get_format
from specq.models.geometry import geometry_of
from specq.models.loading import load, load_random
from specq.models.vocabulary import check_pair
from specq.prompts import Prompt, Text
from specq.replay import Arm, Setting, score_texts
from specq.rules import Rule, Transform
from specq.sampling import fit_width, log_probs
from specq.texts import sample_texts

BF16 = get_format("bf16")
WORDS = ["<s>", "</s>", *(f"w{i}" for i in range(2, 15))]  # a tokenizer of 15 ids


def padded_pair(root, target_vocab, draft_vocab):
    """A pair with one tokenizer of 15 ids and padded logits; the target's padding bias would win every argmax."""
    target = save_model(root / f"t{target_vocab}", seed=1, words=WORDS, vocab_size=20, tie_word_embeddings=False)
    draft = save_model(root / f"d{draft_vocab}", seed=2, words=WORDS, vocab_size=16, tie_word_embeddings=False)
    for path, vocab in ((target, target_vocab), (draft, draft_vocab)):
        weights = load_file(path / "model.safetensors")
        weights["lm_head.weight"] = weights["lm_head.weight"][:vocab].clone()
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:vocab].clone()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        edit_json(path / "config.json", vocab_size=vocab)
    return load(str(target)), load(str(draft))


def test_s10_padded_vocabularies_of_unequal_size(tmp_path):
    """S-10: draft 16 logits, target 20, tokenizer 15, target's padding at +5: runs, emits no id >= 15, q of padding is 0,
    p and q sum to 1, and acceptance equals that of the pair cut to 15 ids."""

    def run(target_vocab, draft_vocab, lift):
        target, draft = padded_pair(tmp_path, target_vocab, draft_vocab)
        if lift:
            head = target.model.lm_head
            target.model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=True)
            target.model.lm_head.weight = head.weight
            with torch.no_grad():
                target.model.lm_head.bias.zero_()
                target.model.lm_head.bias[15:] = 5.0
        vocabulary = check_pair(target, draft)
        prompt = Prompt("p", "p", None, (0, 4, 9, 7))
        texts = sample_texts(
            target,
            [prompt],
            BF16,
            transform=Transform(),
            vocabulary=vocabulary.size,
            max_tokens=40,
            seed=0,
            arm="bf16+bf16",
        )
        setting = Setting(Transform(), Transform(), Rule(), vocabulary, 0)
        return vocabulary, texts, score_texts(target, draft, texts, [Arm.of(BF16, BF16)], setting)

    vocabulary, texts, padded = run(20, 16, lift=True)
    assert (vocabulary.size, vocabulary.tokenizer, vocabulary.target_logits, vocabulary.draft_logits) == (
        15,
        15,
        20,
        16,
    )
    assert max(texts[0].response) < 15
    _, same_texts, cut = run(15, 15, lift=False)
    assert same_texts[0].response == texts[0].response
    a, b = (r.arms["bf16+bf16"].columns["alpha"] for r in (padded, cut))
    assert abs(a - b).max() < 1e-6
    q = log_probs(fit_width(torch.randn(3, 16), 20), Transform()).exp()
    assert (q[:, 16:] == 0).all() and torch.allclose(q.sum(-1), torch.ones(3))


def test_s12_different_token_maps_are_refused(tmp_path):
    """S-12: ids 5 and 6 swapped at equal size: refused, naming the first differing id and both strings."""
    words = [f"w{i}" for i in range(VOCAB)]
    swapped = [*words[:5], words[6], words[5], *words[7:]]
    a, b = (load(str(save_model(tmp_path / n, words=w))) for n, w in (("a", words), ("b", swapped)))
    with pytest.raises(
        SpecqError, match=r"id 5 is 'w5' in the target and 'w6' .* 2 of 48 ids .*draft of the target's own family"
    ):
        check_pair(a, b)


def test_a_draft_that_cannot_read_every_token_is_refused(tmp_path):
    """One token map of 48 ids, and a draft whose embedding ends at 40: the target would emit ids that it cannot read."""
    words = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, VOCAB))]
    target, draft = (
        load(str(save_model(tmp_path / n, words=words, vocab_size=v))) for n, v in (("a", VOCAB), ("b", 40))
    )
    with pytest.raises(SpecqError, match=r"may emit 48 ids and the draft's embedding has 40: .* id 40 \('w40'\)"):
        check_pair(target, draft)
    assert check_pair(draft, target).size == 40


def test_s12_different_special_tokens_are_refused(tmp_path):
    """S-12: the same token map with another EOS is no pair either."""
    a, b = (load(str(save_model(tmp_path / n))) for n in "ab")
    b.tokenizer.eos_token = "w7"
    with pytest.raises(SpecqError, match="eos_token_id: 1 and 7"):
        check_pair(a, b)


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.{}_scale",
        "self_attn.attn.{}_scale",
        "self_attn.{}_proj.{}_scale",
        "self_attn.{}_proj.output_scale",
        "self_attn.qkv_proj.{}_scale",
    ],
)
def test_q07_checkpoint_scales_are_found_under_every_name(tmp_path, name):
    """Q-07: k = 0.02 and v = 0.03 under each of the names in use load alike; a scale that is no positive number is refused."""
    path = save_model(tmp_path / "m", seed=7)
    weights = load_file(path / "model.safetensors")
    for layer in range(2):
        weights[f"model.layers.{layer}." + name.format("k", "k")] = torch.tensor([0.02])
        weights[f"model.layers.{layer}." + name.format("v", "v")] = torch.tensor([0.03])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for s in load(str(path)).scales:
        assert (s.k.item(), s.v.item(), s.source) == (pytest.approx(0.02), pytest.approx(0.03), "checkpoint")
    weights["model.layers.1." + name.format("k", "k")] = torch.tensor([0.0])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecqError, match="k_scale of layer 1"):
        load(str(path))


def test_geometry_reads_head_dim_and_refuses_latent_attention():
    """head_dim is the config's, not hidden / heads, unless absent; MLA (by its keys) is refused with the reason."""
    from conftest import CONFIGS

    g = geometry_of(CONFIGS["llama"](hidden_size=40, num_attention_heads=4, head_dim=16))
    assert (g.head_dim, g.kv_heads, g.heads) == (16, 2, 4)
    assert g.kv_bytes_per_token(BF16) == (2 * 2 * 2 * 16 * 2, 0)
    assert geometry_of(CONFIGS["gpt2"]()).head_dim == 8
    latent = CONFIGS["llama"]()
    latent.kv_lora_rank = 512
    with pytest.raises(SpecqError, match="MLA"):
        geometry_of(latent)


def test_attention_out_of_reach_and_unequal_layers_are_refused():
    """Models that do not call transformers' attention interface, whose layers share K and V, or differ in head_dim: one
    sentence before any weight is read, no exception of a library in the middle of a pass."""
    from transformers import BloomConfig, FalconConfig, Gemma3nTextConfig, Gemma4TextConfig, MptConfig

    shape = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    for kind in (BloomConfig, FalconConfig, MptConfig):
        with pytest.raises(SpecqError, match="models do not go through transformers' attention interface"):
            geometry_of(kind(**shape))
    with pytest.raises(SpecqError, match="whose layers share K and V are not supported .2 layers"):
        geometry_of(Gemma3nTextConfig(**shape, num_kv_shared_layers=2))
    with pytest.raises(SpecqError, match="layers of unequal sizes are not supported"):
        geometry_of(Gemma4TextConfig(**shape, head_dim=8, global_head_dim=16))


def test_longrope_ends_where_its_frequencies_would_change():
    """Phi-3: beyond the original length transformers rotates by other frequencies, but for what is cached already. Up to there
    chunks and rollbacks give a single pass's logits; a pass beyond it is refused."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM, Phi3Config

    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = Phi3Config(
        vocab_size=VOCAB, **shape, max_position_embeddings=64, original_max_position_embeddings=16, rope_scaling=rope,
        pad_token_id=0,
    )  # fmt: skip
    assert geometry_of(config).max_positions == 16
    model = load_random("phi3", config)
    whole = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="sdpa").eval()
    whole.load_state_dict(model.model.state_dict())
    ids = torch.randint(3, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(FLOAT32, 1, 20)
    got = torch.cat([model.forward(piece, cache) for piece in ids.split(5, dim=1)], dim=1)
    assert torch.allclose(got, whole(input_ids=ids, use_cache=False).logits, atol=1e-5)
    with pytest.raises(ValueError, match="16 positions"):
        model.forward(ids[:, :1], cache)


def test_what_cannot_be_loaded_is_refused_in_one_sentence(tmp_path):
    """No config, no weights, no tokenizer: SpecqError naming the directory, not a traceback of a library."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecqError, match="no config.json"):
        load(str(tmp_path / "empty"))
    path = save_model(tmp_path / "m")
    (path / "model.safetensors").rename(path / "kept")
    with pytest.raises(SpecqError, match="no weights in"):
        load(str(path))
    (path / "kept").rename(path / "model.safetensors")
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(SpecqError, match="no usable tokenizer"):
        load(str(path))


def test_several_eos_ids_and_sampling_defaults(tmp_path):
    """generation_config's EOS list and its sampling settings are taken over; absent settings stay absent."""
    path = save_model(tmp_path / "m")
    edit_json(path / "generation_config.json", eos_token_id=[1, 7], temperature=0.6, top_p=0.9)
    model = load(str(path))
    assert model.eos_ids == {1, 7} and model.notes == []
    assert model.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}
    edit_json(path / "generation_config.json", repetition_penalty=1.05)
    assert any("repetition_penalty 1.05" in n for n in load(str(path)).notes)
    edit_json(path / "generation_config.json", temperature="warm")
    with pytest.raises(SpecqError, match="temperature is 'warm'"):
        load(str(path))


def test_sampling_stops_at_any_eos(tmp_path):
    """A text ends with the first EOS of the list, which belongs to it; others run to the limit."""
    model = load(str(save_model(tmp_path / "m", seed=5)))
    model.eos_ids = frozenset({1, 7, 9, 11, 13})
    prompts = [Prompt(str(i), str(i), None, (0, 3 + i, 5)) for i in range(8)]
    texts = sample_texts(
        model, prompts, BF16, transform=Transform(), vocabulary=VOCAB, max_tokens=30, seed=0, arm="x", batch=3
    )
    for t in texts:
        assert isinstance(t, Text) and not set(t.response[:-1]) & model.eos_ids
        assert t.ended == (t.response[-1] in model.eos_ids) and (t.ended or len(t.response) == 30)
    assert any(t.ended for t in texts)


def test_s09_nan_logits_while_sampling_name_prompt_and_position(tmp_path, monkeypatch):
    """S-09: a NaN row while text is sampled stops with the arm, the prompt and the position; no token comes of it."""
    model = load(str(save_model(tmp_path / "m", seed=5)))
    model.eos_ids = frozenset()
    forward, calls = model.forward, []

    def poisoned(tokens, cache, counts=None, keep=0):
        logits = forward(tokens, cache, counts, keep)
        if keep == 0:
            calls.append(1)
            if len(calls) == 4:
                logits = logits.clone()
                logits[1] = float("nan")
        return logits

    monkeypatch.setattr(model, "forward", poisoned)
    prompts = [Prompt(f"p{i}", f"p{i}", None, (0, 3 + i, 5)) for i in range(3)]
    with pytest.raises(
        SpecqError, match=r"arm bf16\+bf16: the target gave NaN logits for prompt p1 at response position 3"
    ):
        sample_texts(
            model, prompts, BF16, transform=Transform(), vocabulary=VOCAB, max_tokens=9, seed=0, arm="bf16+bf16"
        )


def test_texts_do_not_depend_on_the_batch(tmp_path):
    """Check 4 for sampling: every prompt has its own noise, so batches of 1, 3 and 8 give the same texts."""
    model = load(str(save_model(tmp_path / "m", seed=5)))
    prompts = [Prompt(str(i), str(i), None, (0, *range(3, 4 + i))) for i in range(8)]

    def run(batch, order):
        texts = sample_texts(
            model, [prompts[i] for i in order], BF16, transform=Transform(), vocabulary=VOCAB, max_tokens=25, seed=1,
            arm="x", batch=batch,
        )  # fmt: skip
        return {t.prompt.id: t.response for t in texts}

    first = run(8, range(8))
    assert first == run(1, range(8)) == run(3, reversed(range(8)))
