"""The device of a run for which none was given, and the refusal of models that one GPU cannot hold."""

import json

import pytest
import torch
from conftest import save_model

from specq import device, inputs, placement, study
from specq.command import study_command
from specq.config import RolloutConfig, StudyConfig
from specq.device import default_device, on_device
from specq.errors import SpecqError
from specq.models.examine import Examined, examine
from specq.models.geometry import geometry_of
from specq.models.loading import load, load_random, weight_bytes
from specq.progress import Reporter
from specq.rollout_command import rollout_command

SMALL = {"pair": "tiny", "num_prompts": 40, "prompt_tokens": 8, "output_tokens": 8}
QUIET = Reporter(quiet=True)


def options(kind, **given):
    base = {k: None for k in kind.model_fields if k != "dtypes" and not k.endswith("sha256")}
    few = {"k_max": 3, "current_k": 2, "cost": "roofline:h100"} if kind is StudyConfig else {"k": 2}
    return base | SMALL | few | given


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as the default goes."""
    monkeypatch.setattr(device, "default_device", lambda: "cuda")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    (root / "p.txt").write_text("\n".join(f"w{i} w{i + 1} w{i + 2}" for i in range(3, 43)))
    target, draft = save_model(root / "t", seed=1), save_model(root / "d", seed=2, num_hidden_layers=1)
    return {"target": str(target), "draft": str(draft), "prompts": str(root / "p.txt")}


@pytest.mark.parametrize(("there", "name"), [(True, "cuda"), (False, "cpu")])
def test_the_default_is_a_gpu_where_there_is_one(monkeypatch, there, name):
    """cuda where PyTorch sees a CUDA device, else cpu; never auto."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert default_device() == name


def test_the_device_given_counts(tmp_path, gpu):
    """--device is taken as given, whatever lies there; without it the default is, and nothing else changes."""
    config = StudyConfig(device="auto")
    assert on_device(config, "auto", tmp_path / "o", overwrite=False) is config
    settled = on_device(StudyConfig(), None, tmp_path / "o", overwrite=False)
    assert settled == StudyConfig(device="cuda")


@pytest.mark.parametrize("stored", [None, [], {}, {"configuration": None}, {"configuration": {"device": "tpu"}}])
def test_a_summary_that_names_no_device_says_nothing(tmp_path, gpu, stored):
    """The default counts where study.json is of another kind of content."""
    (tmp_path / "study.json").write_text(json.dumps(stored))
    assert on_device(StudyConfig(), None, tmp_path, overwrite=False).device == "cuda"


@pytest.mark.parametrize(("command", "kind"), [(study_command, StudyConfig), (rollout_command, RolloutConfig)])
def test_a_command_without_device_takes_the_default(tmp_path, gpu, monkeypatch, command, kind):
    """Both commands resolve it: here cuda, which this machine is then found not to have; nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecqError, match="--device cuda: PyTorch sees no CUDA device"):
        command(options(kind), ["fp8"], tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_finished_is_found_again_on_any_machine(pair, tmp_path, gpu, monkeypatch, capsys):
    """A study and a rollout made on a CPU are shown by the same command where the default is a GPU, and by `--device cpu`;
    with `--device cuda` it is another configuration, and --overwrite starts anew on the default."""
    monkeypatch.setattr(study, "draw", lambda out: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command, kind, name in (
        (study_command, StudyConfig, "study.json"),
        (rollout_command, RolloutConfig, "rollout.json"),
    ):
        out = tmp_path / name.split(".")[0]
        command(options(kind, device="cpu", **pair), ["fp8"], out, quiet=True)
        stored = (out / name).read_text()
        assert json.loads(stored)["configuration"]["device"] == "cpu"
        for given in ({}, {"device": "cpu"}):
            command(options(kind, **pair, **given), ["fp8"], out, quiet=True)
        assert (out / name).read_text() == stored
        with pytest.raises(SpecqError, match="another configuration"):
            command(options(kind, device="cuda", **pair), ["fp8"], out, quiet=True)
        with pytest.raises(SpecqError, match="--device cuda: PyTorch sees no CUDA device"):
            command(options(kind, **pair), ["fp8"], out, overwrite=True, quiet=True)
        assert (out / name).read_text() == stored
    capsys.readouterr()


def test_an_interrupted_study_goes_on_where_it_began(pair, tmp_path, gpu, monkeypatch, capsys):
    """--resume without --device continues a CPU's pieces on the CPU; without --resume it is offered, not called another
    configuration; with another device it is one."""
    monkeypatch.setattr(study, "draw", lambda out: None)
    out = tmp_path / "out"
    measured = study.measure

    def interrupted(*arguments):
        measured(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "measure", interrupted)
    with pytest.raises(SpecqError, match="interrupted"):
        study_command(options(StudyConfig, device="cpu", **pair), ["fp8"], out, quiet=True)
    monkeypatch.setattr(study, "measure", measured)
    with pytest.raises(SpecqError, match="--resume continues it"):
        study_command(options(StudyConfig, **pair), ["fp8"], out, quiet=True)
    with pytest.raises(SpecqError, match="another configuration"):
        study_command(options(StudyConfig, device="cuda", **pair), ["fp8"], out, resume=True, quiet=True)
    study_command(options(StudyConfig, **pair), ["fp8"], out, resume=True, quiet=True)
    assert json.loads((out / "study.json").read_text())["configuration"]["device"] == "cpu"
    capsys.readouterr()


def test_showing_a_finished_study_imports_no_torch(pair, tmp_path, capsys):
    """The device is read from the study then."""
    from test_cli import python

    out = tmp_path / "out"
    study_command(options(StudyConfig, **pair), ["fp8"], out, quiet=True)
    capsys.readouterr()
    words = [
        "study",
        *(x for k, v in pair.items() for x in (f"--{k}", v)),
        "--num-prompts",
        "40",
        "--prompt-tokens",
        "8",
    ]
    words += ["--output-tokens", "8", "--k-max", "3", "--current-k", "2", "--cost", "roofline:h100", "--out", str(out)]
    code = (
        f"import sys; sys.argv = {['specq', *words]!r}\n"
        "from specq.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert python(code, tmp_path) == (0, "")


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU whose free bytes are `one_gpu.free`, on which nothing can be loaded."""

    class OneGpu:
        free = 0

    def refused(*arguments, **more):
        raise AssertionError("loaded")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (OneGpu.free, 1 << 40))
    monkeypatch.setattr(inputs, "load", refused)
    monkeypatch.setattr(inputs, "load_random", refused)
    return OneGpu


@pytest.mark.parametrize("random_weights", [False, True])
def test_weights_beyond_one_gpu_are_refused_before_loading(pair, one_gpu, random_weights):
    """Target and draft together against the free memory: the sentence has all three sizes, and names --device auto and
    torchrun; what just fits is loaded."""
    given = {k: v for k, v in pair.items() if k != "prompts"} | {"prompt_tokens": 8, "output_tokens": 8, "pair": None}
    config = StudyConfig(**given, device="cuda", random_weights=random_weights)
    width = 2 if random_weights else 4  # float32 checkpoints; random weights are bfloat16 on a GPU
    sizes = [width * load(given[role]).parameters for role in ("target", "draft")]
    one_gpu.free = sum(sizes) - 1
    with pytest.raises(SpecqError, match=r"do not fit one GPU.*--device auto.*torchrun") as told:
        inputs.load_models(config, QUIET)
    for role in ("target", "draft"):
        assert given[role] in str(told.value)
    assert str(told.value).count(" GB") == 3
    one_gpu.free = sum(sizes)
    with pytest.raises(AssertionError, match="loaded"):
        inputs.load_models(config, QUIET)


def test_a_draft_that_is_the_target_is_counted_once(pair, one_gpu):
    """--draft self, and the same directory on both sides, load one model."""
    one_gpu.free = 4 * load(pair["target"]).parameters
    for draft in ("self", pair["target"]):
        config = StudyConfig(
            pair=None, target=pair["target"], draft=draft, device="cuda", prompt_tokens=8, output_tokens=8
        )
        with pytest.raises(AssertionError, match="loaded"):
            inputs.load_models(config, QUIET)


def test_sizes_are_those_on_the_device(pair):
    """In the dtype computed in: float32 on a CPU, on a GPU the checkpoint's, bfloat16 for random weights. Quantized weights
    count as stored; nothing is known of those that will be random."""
    found = examine(pair["target"])
    count = load(pair["target"]).parameters
    assert weight_bytes(found, "cpu") == weight_bytes(found, "cuda") == 4 * count
    random = Examined(found.config, geometry_of(found.config))
    assert weight_bytes(random, "cuda") == 2 * load_random("m", found.config).parameters == 2 * count
    found.config.quantization_config = {"quant_method": "fp8"}
    assert weight_bytes(random, "cuda") == 0
    stored = sum(t.end - t.start for t in found.checkpoint.tensors.values())
    assert weight_bytes(found, "cuda") == stored > 0


def test_70b_on_one_80_gb_gpu(monkeypatch):
    """The sentence that `make study PAIR=llama70b-1b` ends with there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (79_500_000_000, 80_000_000_000))
    with pytest.raises(SpecqError) as told:
        placement.require_room({"meta-llama/T": 141_107_412_992, "meta-llama/D": 2_471_645_608})
    assert str(told.value) == (
        "the weights of meta-llama/T (141.1 GB) and meta-llama/D (2.5 GB) do not fit one GPU, which has 79.5 GB free:"
        " --device auto spreads a model over all visible GPUs, torchrun splits the target over its processes"
    )
