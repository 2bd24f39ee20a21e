"""A target split over two processes gives what one process gives: logits, scores, texts, counts and sizes of the whole.

Processes are forked here and talk through gloo; one test goes through torchrun and the command line.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS, FLOAT32, save_model

from specq import parallel, placement
from specq.acceptance import Rule
from specq.errors import SpecqError
from specq.kv import get_format
from specq.kv.calibration import measure_range
from specq.models.loading import load, load_random
from specq.models.vocabulary import check_pair
from specq.prompts import Prompt
from specq.replay import Arm, Setting, score_texts
from specq.rollout import roll_out
from specq.sampling import Transform

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
forked = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would split the model over GPUs")


def _process(rank, size, port, program, path):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    sys.stderr = open(f"{path}.{rank}", "w")  # noqa: SIM115 - for as long as the process lives
    torch.set_num_threads(1)

    def run():
        try:
            torch.save(program(), path)
        except SpecqError as error:
            torch.save(str(error), path)
            raise SystemExit(error.exit_code) from None

    parallel.run(run)


def split(program, size=2):
    """(what `program` returns on rank 0, or its SpecqError as text; exit codes; what each rank wrote to stderr)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=_process, args=(r, size, port, program, path)) for r in range(size)]
        for p in processes:
            p.start()
        for p in processes:
            p.join(60)
        stuck = [p for p in processes if p.is_alive()]
        for p in stuck:
            p.kill()
        assert not stuck, "a process waits for ever"
        errors = [Path(f"{path}.{r}").read_text() for r in range(size)]
        assert path.exists(), errors
        return torch.load(path, weights_only=False), [p.exitcode for p in processes], errors


def loaded(source):
    """The model at `source`, split where there are several processes."""
    share = parallel.share()
    return share.load(load, (str(source),)) if share else load(str(source))


def decode(model, fmt=FLOAT32, scales=None):
    """Logits of ragged prompts, of tokens behind a rollback, and of the rows that remain; then what the cache counts."""
    cache = model.new_cache(fmt, 3, 24, scales)
    rows = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18]]
    model.prefill(rows, cache, chunk=3)
    block = torch.tensor([[r[-1], 20, 21, 22] for r in rows])
    first = model.forward(block, cache, torch.tensor([4, 2, 3]))
    cache.rollback(torch.tensor([8, 3, 5]))
    cache.select(torch.tensor([2, 0]))
    second = model.forward(torch.tensor([[23, 24], [25, 26]]), cache)
    counts = (cache.lengths.tolist(), cache.nbytes, cache.saturated_per_layer(), cache.nonfinite())
    return torch.cat([first.flatten(), second.flatten()]), counts


KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")


@forked
def test_split_model_gives_whole_logits(tmp_path):
    """Every architecture with a plan, KV heads on two ranks: ragged rows, rollback and selection give one process's logits to
    float32 rounding (the ranks' sums are added in another order), and the sizes and counts of the whole."""
    paths = [save_model(tmp_path / kind, kind, num_key_value_heads=2) for kind in KINDS]

    def program():
        return [decode(loaded(p)) for p in paths]

    found, codes, _ = split(program)
    assert codes == [0, 0]
    for kind, (logits, counts), (expected, alone) in zip(KINDS, found, program(), strict=True):
        assert torch.allclose(logits, expected, rtol=1e-5, atol=2e-5), kind
        assert counts == alone, kind


@forked
def test_static_scales_are_sliced_to_the_ranks_heads(tmp_path):
    """Per-head scales of a checkpoint (1 and 10) and calibrated scales per channel reach the heads they belong to; the range
    measured over the ranks is that of all heads, in order; saturated elements are counted over all heads."""
    from safetensors.torch import load_file, save_file

    path = save_model(tmp_path / "scaled", num_key_value_heads=2, scale=3.0)
    weights = load_file(path / "model.safetensors")
    for part in "kv":
        weights[f"model.layers.1.self_attn.{part}_scale"] = torch.tensor([1e-3, 1e-2])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    def program():
        model = loaded(path)
        found = measure_range(model, [range(3, 30)])
        scales = found.scales(get_format("int8_per_channel"))
        static = decode(model, get_format("fp8_e4m3"))
        return static, decode(model, get_format("int8_per_channel"), scales), found.k + found.v

    (static, channel, ranges), codes, _ = split(program)
    expected = program()
    assert codes == [0, 0]
    assert static[1] == expected[0][1] and sum(static[1][2]) > 0  # e4m3 at 1e-3 saturates at 0.448
    for got, right in ((static, expected[0]), (channel, expected[1])):
        assert torch.allclose(got[0], right[0], rtol=1e-4, atol=1e-4)
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(ranges, expected[2], strict=True))


@forked
def test_the_embedded_pair_split_over_two_processes(tiny_pair):
    """Rollout and replay of the embedded pair, the target on two ranks and the draft whole on rank 0: the same texts and
    cycles, alpha and log p to float32 rounding, and the bytes per token of the whole cache."""
    source, draft = tiny_pair[0].name, tiny_pair[1]
    vocabulary = check_pair(*tiny_pair)
    prompts = [Prompt(f"p{i}", f"p{i}", None, tuple(range(100 + i, 130 + 3 * i))) for i in range(3)]
    setting = Setting(Transform(), Transform(), Rule(), vocabulary, seed=5)
    arm = Arm.of(FLOAT32, FLOAT32)

    def program():
        target = loaded(source)
        made = roll_out(target, draft, prompts, arm, setting, k=3, max_tokens=12)
        scores = score_texts(target, draft, made.texts, [arm], setting)
        columns = {n: scores.arms[arm.name].columns[n] for n in ("alpha", "logp")}
        return [t.response for t in made.texts], made.accepted, made.kv_bytes, columns, target.parameters, target.shape

    (texts, accepted, size, columns, *whole), codes, _ = split(program)
    expected = program()
    assert codes == [0, 0]
    assert texts == expected[0] and (accepted == expected[1]).all() and size == expected[2]
    for name in columns:
        assert torch.allclose(torch.tensor(columns[name]), torch.tensor(expected[3][name]), rtol=1e-4, atol=1e-4)
    assert whole == list(expected[4:])


@forked
def test_random_weights_are_made_in_shares():
    """No rank holds the whole of a split projection; parameters, shape and bytes per token are the whole model's."""
    config = CONFIGS["llama"](num_key_value_heads=2)

    def program():
        share = parallel.share()
        arguments = ("random", config, "cpu", 0)
        model = share.load(load_random, arguments) if share else load_random(*arguments)
        weight = model.model.model.layers[0].self_attn.k_proj.weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        logits, counts = decode(model, get_format("bf16"))
        return tuple(local.shape), model.parameters, model.shape, counts, bool(logits.isfinite().all())

    (local, *facts), codes, _ = split(program)
    whole, *expected = program()
    assert codes == [0, 0]
    assert local == (whole[0] // 2, whole[1])
    assert facts == expected


REFUSED = {
    "gpt2": ("no tensor parallel plan for gpt2", {}),
    "gemma3": ("1 KV heads and 4 query heads", {}),
}


@forked
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_split_is_refused(tmp_path, kind):
    """A model without a plan, and fewer KV heads than processes: one sentence, exit code 2 on every rank."""
    reason, config = REFUSED[kind]
    path = save_model(tmp_path / kind, kind, **config)
    found, codes, errors = split(lambda: loaded(path))
    assert reason in found and codes == [2, 2]
    assert not errors[1]  # rank 0 speaks for all


@forked
def test_device_auto_under_torchrun_is_refused(tmp_path):
    """--device auto is one process's way, torchrun another."""
    path = save_model(tmp_path / "m")
    found, codes, _ = split(lambda: parallel.share().load(load, (str(path), "auto")))
    assert "--device auto" in found and codes == [2, 2]


@forked
def test_a_rank_that_fails_ends_all(tmp_path):
    """A pass that fails on rank 1 alone ends rank 0 with a sentence, and weights that rank 1 alone cannot read are refused by
    all: exit code 2, nobody waits."""
    path = save_model(tmp_path / "m")

    def in_a_pass():
        model = loaded(path)
        share = parallel.share()
        share.tell("on_cache", -1, "nothing")  # what rank 1 does not know stands for any bug of its own
        cache = model.new_cache(FLOAT32, 1, 8)
        for _ in range(4):
            model.forward(torch.tensor([[3, 4]]), cache)

    found, codes, errors = split(in_a_pass)
    assert codes == [2, 2] and "process" in found
    assert "KeyError" in errors[1]

    def in_loading():
        return parallel.share().load(_only_rank_0, (str(path),))

    found, codes, errors = split(in_loading)
    assert codes == [2, 2] and found == "rank 1 has no such file" and not errors[1]


@forked
def test_rank_0_failing_in_a_pass_ends_all(tmp_path):
    """Memory that runs out on rank 0 alone, in the middle of a pass: the others wait for it there, hear no word, and end with
    it: exit code 2, nobody waits."""
    path = save_model(tmp_path / "m")

    def program():
        model = loaded(path)
        cache = model.new_cache(FLOAT32, 1, 8)
        model.forward(torch.tensor([[3, 4]]), cache)

        def full(*args, **more):
            raise torch.OutOfMemoryError("CUDA out of memory")

        model.model.model.layers[1].self_attn.forward = full  # rank 1 has its own
        model.forward(torch.tensor([[3, 4]]), cache)

    found, codes, _ = split(program)
    assert codes == [2, 2] and "a pass over 2 processes failed: CUDA out of memory" in found


def _only_rank_0(source, share):
    if share.rank:
        raise SpecqError("rank 1 has no such file")
    return load(source, share=share)


@forked
def test_what_rank_0_drops_is_dropped_everywhere(tmp_path):
    """Caches that rank 0 no longer holds leave the other ranks' memory with the next word."""
    path = save_model(tmp_path / "m")

    def program():
        model, share = loaded(path), parallel.share()
        for _ in range(5):
            model.forward(torch.tensor([[3, 4]]), model.new_cache(FLOAT32, 1, 8))
        cache = model.new_cache(FLOAT32, 1, 8)
        share.tell("on_cache", cache.number, "whole_known")
        return None

    def known(self):
        raise SpecqError(f"knows {len(self.share.known)}")

    parallel.SharedCache.whole_known = known
    try:
        _, codes, errors = split(program)
    finally:
        del parallel.SharedCache.whole_known
    assert codes[1] == 2 and "knows 2" in errors[1]  # the model and the last cache


def command_environment():
    """The environment of a command: this checkout ahead of what this process finds its packages by."""
    root = Path(__file__).parents[1]
    return os.environ | {"PYTHONPATH": f"{root}:{root / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"}


def test_torchrun_command_line(tmp_path):
    """`torchrun -m specq.cli rollout`: one answer printed, one directory written, whole sizes in it. The GPUs, if
    any, are hidden: it means the CPU."""
    env = command_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run += [
        "-m",
        "specq",
        "rollout",
        "--quiet",
        "--num-prompts",
        "2",
        "--prompt-tokens",
        "12",
        "--output-tokens",
        "8",
    ]
    out = tmp_path / "out"
    done = subprocess.run([*run, "--out", out], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("KV bytes per token") == 1 and "(50 % of BF16's)" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ["cycles.parquet", "rollout.json", "texts.parquet"]


def test_device_auto_needs_gpus_and_accelerate(monkeypatch):
    """--device auto is refused on a machine without GPUs, and without the package that transformers spreads models with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecqError, match="sees no CUDA device"):
        placement.require("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecqError, match=r"specq\[gpu\]"):
        placement.require("auto")
    placement.require("cuda")


def test_device_auto_fills_gpus_evenly_and_nothing_else(monkeypatch):
    """A target is spread over the free memory of all GPUs, a small draft goes whole to the roomiest; what does not fit is
    refused before a weight is read, with both sizes."""
    config = CONFIGS["llama"]()
    size = placement.weight_bytes(config, torch.bfloat16)
    assert size == 2 * sum(p.numel() for p in load_random("m", config).model.parameters())
    free = [size, 3 * size]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free[i], 4 * size))
    assert placement.spread("m", config, torch.bfloat16) == {
        "device_map": "balanced", "max_memory": {0: int(0.9 * size), 1: int(2.7 * size)},
    }  # fmt: skip
    assert placement.spread("m", config, torch.bfloat16, draft=True) == {"device_map": {"": 1}}
    free[:] = [size // 2, size // 2]
    with pytest.raises(SpecqError, match="2 GPUs here have"):
        placement.spread("m", config, torch.bfloat16)


def test_what_transformers_would_leave_to_the_cpu_is_refused():
    """A device map that ends on the CPU or the disk is no spread model."""
    model = torch.nn.Linear(1, 1)
    placement.refuse_left_over("m", model)
    model.hf_device_map = {"a": 0, "b": torch.device("cuda", 1)}
    placement.refuse_left_over("m", model)
    for place in ("cpu", "disk"):
        model.hf_device_map["c"] = place
        with pytest.raises(SpecqError, match=f"to the {place}"):
            placement.refuse_left_over("m", model)


@pytest.mark.parametrize("kind", KINDS)
def test_the_hooks_of_a_spread_model_let_cache_and_mask_through(tmp_path, kind):
    """transformers moves the inputs of every module of a spread model to its device; our cache, its layers as K and V, and the
    mask pass unchanged, so logits are those of the model as it was."""
    from accelerate import dispatch_model

    model = load(str(save_model(tmp_path / kind, kind, num_key_value_heads=2)))
    expected, counts = decode(model)
    names = [f"model.layers.{i}" for i in range(model.geometry.layers)]
    where = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *names], "cpu")
    skip = model.model._skip_keys_device_placement
    model.model = dispatch_model(model.model, where, main_device="cpu", force_hooks=True, skip_keys=skip)
    found, same = decode(model)
    assert torch.equal(found, expected) and same == counts


def test_masks_are_built_for_every_device():
    """Layers on several devices share one mask object, which is built once on each."""
    from specq.kv import attention
    from specq.kv.cache import LayerScales, QuantizedCache

    cache = QuantizedCache(FLOAT32, [LayerScales()], 1, 8)
    cache.rows.set(torch.tensor([3]))
    mask = attention.mask(2)
    here, there = (mask.build(cache.layers[0], torch.device(d)) for d in ("cpu", "meta"))
    assert (here.device.type, there.device.type) == ("cpu", "meta") and here.shape == there.shape
    assert mask.build(cache.layers[0], torch.device("cpu")) is here


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_logits_of_one(tmp_path):
    """--device auto spreads the layers over both GPUs, and what comes back is one GPU's."""
    path = save_model(tmp_path / "m", num_hidden_layers=4, hidden_size=256, head_dim=64, num_key_value_heads=2)
    alone, spread = load(str(path), "cuda"), load(str(path), "auto")
    assert len(spread.devices) == 2
    for fmt in ("bf16", "fp8_e4m3", "int8_per_token_head"):
        (expected, counts), (found, same) = (decode(m, get_format(fmt)) for m in (alone, spread))
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5) and same == counts
    random = load_random("m", spread.model.config, "auto")
    assert len(random.devices) == 2 and random.parameters == spread.parameters


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_a_model_under_torchrun(tmp_path):
    """The embedded pair, its target split over two GPUs through NCCL, gives a rollout that replay agrees with."""
    env = command_environment()
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "specq"]
    run += ["rollout", "--quiet", "--device", "cuda", "--num-prompts", "24", "--prompt-tokens", "48"]
    done = subprocess.run(
        [*run, "--output-tokens", "48", "--out", tmp_path / "o"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "agrees" in done.stdout and "DISAGREES" not in done.stdout
