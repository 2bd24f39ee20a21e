"""`--vllm-command`: what a study takes over from a server's command line, and the line it gives back."""

import json
import shlex
import subprocess
from types import SimpleNamespace

import pytest
from conftest import save_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interruptions import interrupted_after, raising
from test_retune import write_prompts
from test_study import strict_json
from typer.testing import CliRunner

from specq import cli
from specq.command import resolve
from specq.conclude import conclude
from specq.config import StudyConfig
from specq.errors import Interrupted, SpecqError
from specq.finished import load as load_study
from specq.finished import reconfigured
from specq.from_server import changed, notes, study_options, text_of, without_secrets, words_without_secrets
from specq.kv import get_format
from specq.report.schema import VllmBlock
from specq.serve_command import read
from specq.shell_words import joined, split
from specq.wording import sentence

SPEC = '{"model": "org/draft", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}'
PLAIN = "vllm serve org/target"
SPELLINGS = [
    f"{PLAIN} --kv-cache-dtype fp8 -tp 4 --speculative-config '{SPEC}'",
    f"{PLAIN} --kv_cache_dtype=fp8 --tensor_parallel_size=4 --speculative_config='{SPEC}'",
    f"{PLAIN} \\\n  --kv-cache-dtype fp8_e4m3 \\\n  -tp=4 \\\r\n  -sc '{SPEC}'\n",
    f"# the server\nexport X=1 && CUDA_DEVICES=0 exec /opt/bin/{PLAIN} -tp 4 -sc '{SPEC}' --kv-cache-dtype fp8 > log 2>&1",
    "vllm serve --model org/target --kv-cache-dtype fp8 -tp 4 --spec-method draft_model --spec-model org/draft --spec-tokens 3"
    " --speculative-config.draft_sample_method probabilistic",
    "vllm serve --enforce-eager org/target -sc.model org/draft -sc.num-speculative-tokens=3 --kv-cache-dtype fp8"
    " --tensor-parallel-size 4 --speculative_config.draft_sample_method=probabilistic",
    f"docker run --rm --gpus all -e HF_HOME=/x -v /a:/b vllm/vllm-openai:v0.32.0 --model org/target -tp 4 --kv-cache-dtype fp8"
    f" -sc '{SPEC}'",
    f"python3 -m vllm.entrypoints.openai.api_server --model=org/target -tp 4 --kv-cache-dtype fp8 -sc '{SPEC}'",
    f"uvx vllm@0.32.0 serve org/target --kv-cache-dtype bfloat16 --kv-cache-dtype fp8 -tp 4 -sc '{SPEC}'; echo done",
]
TAKEN = {"target": "org/target", "draft": "org/draft", "current_k": 3, "draft_sampling": "probabilistic",
         "draft_transform": "temperature", "tensor_parallel": 4}  # fmt: skip


def block(k=2, backend=None, schedule=None, fmt="fp8"):
    args = ["/abs/target", "--kv-cache-dtype", fmt, *(["--attention-backend", backend] if backend else [])]
    config = {
        "method": "draft_model",
        "model": "/abs/draft",
        "num_speculative_tokens": k,
        "draft_sample_method": "greedy",
    }
    if schedule:
        config["num_speculative_tokens_per_batch_size"] = schedule
    return VllmBlock(
        version="0.32", serve_args=args, speculative_config=config if k else None, synthetic_acceptance_rates=[]
    )


@pytest.mark.parametrize("text", SPELLINGS)
def test_every_spelling_of_one_server_reads_alike(text):
    """Pair, K, drafting, KV format and ranks, however vLLM lets one write them; a launcher's version where it says one."""
    command = read(text)
    assert {k: v for k, v in command.taken.items() if k != "vllm_version"} == TAKEN
    assert command.taken.get("vllm_version") == ("0.32" if "0.32" in text else None)
    assert command.dtype == "fp8_e4m3" and command.notes == []


@pytest.mark.parametrize("text", SPELLINGS)
def test_the_changed_line_reads_as_what_was_recommended(text):
    """Read again, the changed line is the same server with the recommended K, drafting and format; the old one is unchanged."""
    now, then = changed(text, block(schedule=[[1, 8, 2], [9, 64, 1]], backend="TRITON_ATTN", fmt="int8_per_token_head"))
    old, new = read(now), read(then)
    assert old.taken == read(text).taken and old.dtype == "fp8_e4m3"
    assert new.taken == old.taken | {"current_k": 2, "draft_sampling": "greedy"}
    assert new.dtype == "int8_per_token_head" and new.speculative["num_speculative_tokens_per_batch_size"][1] == [
        9,
        64,
        1,
    ]
    assert then.count("--speculative") == 1 and then.count("kv-cache-dtype") == 1 and "TRITON_ATTN" in then
    assert [w for w in shlex.split(now) if w in ("&&", "log", "done")] == [
        w for w in shlex.split(then) if w in ("&&", "log", "done")
    ]


def test_dropping_speculation_and_what_stays():
    """K = 0 leaves no speculative option; the user's other options and keys stay, backends do not clash."""
    text = (
        PLAIN
        + ' --port 80 -sc \'{"model": "d", "num_speculative_tokens": 3, "max_model_len": 99}\' -ac.backend FLASH_ATTN'
    )
    assert "specul" not in changed(text, block(k=0))[1] and "-ac.backend FLASH_ATTN" in changed(text, block(k=0))[1]
    then = changed(text, block(backend="TRITON_ATTN"))[1]
    assert "--port 80" in then and "FLASH_ATTN" not in then
    assert read(then).speculative == {"max_model_len": 99, **block().speculative_config, "model": "d"}
    whole = changed(PLAIN + ' --attention-config \'{"backend": "FLASH_ATTN", "x": 1}\'', block(backend="TRITON_ATTN"))[
        1
    ]
    assert "FLASH_ATTN" not in whole and '{"x": 1}' in whole


def test_ranks_in_a_variable_count_as_one():
    """Said, and no reason to refuse the rest; the cost stays as it was."""
    text = f"{PLAIN} -sc '{SPEC}' -tp $TP"
    assert "tensor_parallel" not in read(text).taken
    (note,) = read(text).notes
    assert "variables are not expanded: --tensor-parallel-size $TP counts as 1" in note
    made = study_options(text, dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}, [])[0]
    assert made["cost"] is None and "-tp $TP" in made["vllm_command"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [("--attention-config.backend FLASH_ATTN", False), ("-ac '{\"backend\": \"FLASH_ATTN\"}'", False),
     ("--attention-config '{\"backend\": \"FLASH_ATTN\", \"x\": 1}'", True), ("-ac.x 1 -ac.backend FLASH_ATTN", True)],
)  # fmt: skip
def test_only_what_stays_is_said_to_be_kept(options, kept):
    """An attention backend goes where a format needs another one, so no note promises that it stays."""
    text = f"{PLAIN} -sc '{SPEC}' {options}"
    then = changed(text, block(backend="TRITON_ATTN"))[1]
    assert "FLASH_ATTN" not in then and ("attention-config" in then or "-ac.x" in then) == kept
    said = "".join(read(text).notes)
    assert ("kept in the changed command: --attention-config" in said) == kept and ".backend" not in said


@pytest.mark.parametrize("runs", [None, "bfloat16", "fp8"])
def test_a_format_that_the_server_runs_already_is_kept(runs):
    """The decision says `keep` of the format in the server's own command, `enable` of any other."""
    made = SimpleNamespace(
        format=get_format("fp8"), recommended=3, at=(1, 2048), base_at=(1, 2048), pay=1.1, pay_ci95=[1.0, 1.2],
        capacity=None, action="enable", more_prompts=9,
    )  # fmt: skip
    command = runs and f"{PLAIN} -sc '{SPEC}' --kv-cache-dtype {runs}"
    facts = SimpleNamespace(config=StudyConfig(current_k=3, vllm_command=command))
    verb = {"enable": "keep", "enabling": "keeping"} if runs == "fp8" else {"enable": "enable", "enabling": "enabling"}
    for action, start in (
        ("enable", f"{verb['enable']} fp8_e4m3, "),
        ("enable_and_retune", f"{verb['enable']} fp8_e4m3 and retune, "),
        ("do_not_enable", f"do not {verb['enable']} fp8_e4m3 for speed: "),
        ("measure_more", f"measure more before {verb['enabling']} fp8_e4m3, "),
    ):
        made.action = action
        assert sentence(facts, made, 5, "roofline", 0.5, 0.0).startswith(start)


@pytest.mark.parametrize(
    ("image", "version"),
    [("vllm/vllm-openai:v0.24.0", "0.24"), ("mirror:5000/x/vllm-openai-cpu:v1.2.0-x", "1.2"), ("me/vllm:0.26.1-mine", "0.26"),
     ("vllm/vllm-openai:latest", None), ("vllm/vllm-openai", None), ("nvcr.io/nvidia/vllm:25.09-py3", "foreign"),
     ("registry.redhat.io/rhaiis/vllm-cuda-rhel9:3.2.1", "foreign"), ("me/vllm:latest", "foreign")],
)  # fmt: skip
def test_a_foreign_images_tag_is_no_version(image, version):
    """The tag of vLLM's own image is its version; of another image only where it is 0.N, as vLLM's releases are."""
    command = read(f"docker run {image} --model org/target -sc '{SPEC}'")
    assert command.taken.get("vllm_version") == (None if version == "foreign" else version)
    assert any("is not taken for vLLM's version" in n for n in command.notes) == (version == "foreign")
    assert any("vLLM v1.2 is newer than any" in n for n in command.notes) == (version == "1.2")


@pytest.mark.parametrize(
    ("run", "version"),
    [("docker run vllm/vllm-openai:v0.24.0 vllm serve org/target", "0.24"),
     ("docker run --entrypoint python3 vllm/vllm-openai:v0.24.0 -m vllm.entrypoints.openai.api_server --model=org/target",
      "0.24"),
     ("docker pull vllm/vllm-openai:v0.24.0 && docker run vllm/vllm-openai:v0.25.0 --model org/target", "0.25"),
     ("docker run vllm/vllm-openai:v0.24.0 true; vllm serve org/target", "several"),
     ("docker run vllm/vllm-openai:v0.24.0 uvx vllm@0.26.0 serve org/target", "0.26"),
     ("docker run me/vllm:v25.9 vllm serve org/target", "foreign"),
     ("docker run --name vllm me/a:v0.24.0 vllm serve org/target", None)],
)  # fmt: skip
def test_an_image_says_the_version_of_a_launcher_in_it(run, version):
    """Of a launcher in the same command; one that states its own version comes first."""
    command = read(f"{run} -sc '{SPEC}'")
    assert command.taken["target"] == "org/target" and len(command.notes) == (version in ("foreign", "several"))
    assert command.taken.get("vllm_version") == (None if version in ("foreign", "several") else version)


@pytest.mark.parametrize(
    "flag", ["-itd", "-dit", "-P", "-dP", "--read-only", "--rm", "-p 80:80", "--gpus=all", "--publish-all"]
)
def test_a_flag_may_stand_before_the_image(flag):
    assert (
        read(f"docker run {flag} vllm/vllm-openai:v0.24.0 --model org/target -sc '{SPEC}'").taken["vllm_version"]
        == "0.24"
    )
    with pytest.raises(SpecqError, match="no `vllm serve"):
        read(f"docker run {flag} --name vllm other --model m")


@pytest.mark.parametrize("text", ["vllm serve ~/t", "vllm serve --model ~/t"])
def test_a_home_directory_is_what_a_shell_makes_of_it(text, monkeypatch):
    """For the target and the draft, where a word begins with ~/ out of quotes; other words of the line stay as they were."""
    monkeypatch.setenv("HOME", "/home/me")
    command = f"{text} -sc.model ~/d -sc.num_speculative_tokens 3"
    assert (read(command).taken["target"], read(command).taken["draft"]) == ("/home/me/t", "/home/me/d")
    now, then = changed(command, block())
    assert now == command and "~/t" in then and read(then).taken["draft"] == "/home/me/d"
    quoted = read("vllm serve '~/t' -sc.model=~/d -sc.num_speculative_tokens 3").taken
    assert (quoted["target"], quoted["draft"]) == ("~/t", "~/d")


@pytest.mark.parametrize(
    ("after", "several"),
    [("& vllm serve other", True), ("; docker run vllm/vllm-openai:v0.24.0 --model b", True), ("\nwait", False),
     ("&& docker logs vllm", False), ("|| docker stop vllm; echo vllm server", False)],
)  # fmt: skip
def test_of_several_servers_one_is_read_and_said_to_be(after, several):
    command = read(f"{PLAIN} -sc '{SPEC}' {after}")
    assert command.taken["target"] == "org/target"
    assert [n for n in command.notes if "another server stands" in n] == command.notes
    assert len(command.notes) == several
    text = f"docker run vllm/vllm-openai:v0.24.0 --model other & {PLAIN} -sc '{SPEC}'"
    assert "another server stands in it: what is read and changed is that of org/target" in read(text).notes[0]


def test_sampling_of_the_server():
    """--override-generation-config and --generation-config vllm; top_k -1 is off; what is not known is named."""
    text = f"{PLAIN} -sc '{SPEC}' --override-generation-config " + '\'{"temperature": 0.7, "top_k": -1, "min_p": 0.1}\''
    command = read(text)
    assert (command.taken["temperature"], command.taken["top_k"]) == (0.7, 0) and "top_p" not in command.taken
    assert any("min_p" in n for n in command.notes)
    neutral = read(f"{PLAIN} -sc '{SPEC}' --generation-config vllm").taken
    assert (neutral["temperature"], neutral["top_p"], neutral["top_k"]) == (1.0, 1.0, 0)


def test_ngram_and_vllms_defaults():
    """n-gram lookup with vLLM's 5..5, or one end for both; greedy is vLLM's default draft_sample_method."""
    ngram = read(PLAIN + ' -sc \'{"method": "ngram", "num_speculative_tokens": 4}\'').taken
    assert (ngram["draft"], ngram["ngram"], ngram["current_k"]) == ("ngram", (5, 5), 4)
    one = read(PLAIN + ' -sc \'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}\'').taken
    assert one["ngram"] == (3, 3)
    assert read(PLAIN + ' -sc \'{"model": "d", "num_speculative_tokens": 1}\'').taken["draft_sampling"] == "greedy"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no `vllm serve MODEL"),
        ("vllm bench serve --model x", "no `vllm serve MODEL"),
        ("vllm serve --port 80", "no model in it"),
        ("vllm serve --config server.yaml", "is not read"),
        (
            "vllm serve --fully-sharded-loras m/M --port 80",
            "no model in it: the word behind --fully-sharded-loras counts as its",
        ),
        (f'{PLAIN} -sc \'{{"model": "d"', "cannot be split"),
        (PLAIN + " -sc {model:d}", "is not JSON"),
        (PLAIN + " -sc '[1]'", "is not a JSON object"),
        (PLAIN + " -sc " + "'" + "[" * 100_000 + "'", "is not JSON"),
        (PLAIN + ' -sc \'{"model": "d"}\'', "whole number"),
        (PLAIN + ' -sc \'{"model": "d", "num_speculative_tokens": true}\'', "whole number"),
        (PLAIN + ' -sc \'{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}\'', "import-metrics"),
        (PLAIN + ' -sc \'{"model": "yuhuili/EAGLE3-x", "num_speculative_tokens": 3}\'', "import-metrics"),
        (PLAIN + ' -sc \'{"model": "d", "num_speculative_tokens": 3}\' --spec-tokens 4', "both give"),
        (PLAIN + " -sc.model d -sc.num_speculative_tokens 3 -sc.rejection_sample_method synthetic", "synthetic"),
        (f"{PLAIN} -sc '{SPEC}' -tp two", "whole number"),
        (
            f"{PLAIN} --speculative-model d --num-speculative-tokens 5",
            "--speculative-model is a spelling of old versions",
        ),
        (f"{PLAIN} --num_speculative_tokens=5 -sc '{SPEC}'", "what is read is --speculative-config '{"),
        (f"{PLAIN} -ac '[1]'", "--attention-config is not a JSON object"),
        (f"{PLAIN} -sc '{SPEC}' --max-model-len long", "--max-model-len must be a whole number"),
        (f"{PLAIN} -sc '{SPEC}' --max-model-len 2.5K", "--max-model-len must be a whole number"),
        (f"{PLAIN} -sc '{SPEC}' --max-num-seqs 0", "--max-num-seqs must be a whole number"),
        (f"{PLAIN} -sc '{SPEC}' --override-generation-config " + '\'{"temperature": "hot"}\'', "not a number"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(text, said):
    with pytest.raises(SpecqError, match="--vllm-command") as caught:
        read(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ['bash -c "vllm serve m/M"', "ssh h 'cd /x && /opt/bin/vllm serve m/M'", '["vllm","serve","m/M"]', "- vllm\n- serve\n- m/M",
     'docker run --entrypoint bash vllm/vllm-openai:v0.24.0 -c "vllm serve m/M"', "nohup sh -c 'python3 -m vllm.entrypoints.x'",
     "docker run vllm/vllm-openai:v0.24.0 bash -c 'vllm serve m/M'"],
)  # fmt: skip
def test_a_server_within_quotes_or_a_list_is_refused(text):
    """And said to be there: neither `no model in it`, nor the shell as a model."""
    with pytest.raises(SpecqError, match="within quotes or a list, which are not read: give the command by itself"):
        read(text)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (' -sc \'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 6, "prompt_lookup_max": 4}\'', {},
         "prompt_lookup_min 6 is larger than prompt_lookup_max 4"),
        (" -sc.model d -sc.num_speculative_tokens 65", {}, "num_speculative_tokens: Input should be less than"),
        (" -sc.model d -sc.num_speculative_tokens 5", {"k_max": 3}, "num_speculative_tokens 5 is beyond --k-max 3"),
        (f" -sc '{SPEC}' --override-generation-config.temperature=-1", {}, "--override-generation-config temperature: "),
        (f" -sc '{SPEC}' --override-generation-config.top_p=1.5", {}, "--override-generation-config top_p: "),
        (f" -sc '{SPEC}' --override-generation-config.top_k=-7", {"top_p": 0.5}, "--override-generation-config top_k: "),
    ],
)  # fmt: skip
def test_values_are_refused_in_the_commands_own_words(text, options, said):
    """No option of specq is named that was not given; one that was keeps its name."""
    options = dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"} | options
    with pytest.raises(SpecqError) as caught:
        study_options(PLAIN + text, options, [])
    assert str(caught.value).startswith(f"--vllm-command: {said}")
    for own, word in (("temperature", -1.0), ("current_k", 70)):
        with pytest.raises(SpecqError, match="^--(temperature|k-max): "):
            study_options(SPELLINGS[0], dict.fromkeys(options) | {"pair": "tiny", own: word}, [])


@pytest.mark.parametrize("words", ["{}", "{} --port 80", "--port 80 {} --enforce-eager", "{} > log"])
@pytest.mark.parametrize(
    "option",
    ["--kv-cache-dtype", "--kv_cache_dtype", "--kv-cache-dtype=", "--kv-cache-dtype ''", "-tp", "-pp", "-sc", "-sc.model",
     "--override-generation-config", "--generation-config", "--max-model-len", "--max-num-seqs=", "--attention-backend", "-q",
     "--config", "--host", "--api-key", "--gpu-memory-utilization", "--spec-tokens", "-ac.backend"],
)  # fmt: skip
def test_an_option_without_its_value_is_refused(option, words):
    """As vLLM does, and not read as if it were not there: `--kv-cache-dtype` alone is no BF16 cache."""
    spec = "" if option.startswith(("-sc", "--spec")) else f" -sc '{SPEC}'"
    with pytest.raises(SpecqError, match="has no value") as caught:
        read(f"{PLAIN}{spec} {words.format(option)}")
    assert "\n" not in str(caught.value)


def test_flags_and_optional_values_need_none():
    """Flags stand alone, --hf-token may, and a negative number is a value."""
    text = f"{PLAIN} -sc '{SPEC}' --enforce-eager --trust-remote-code --hf-token --no-enable-prefix-caching --max-model-len -1"
    assert read(text).notes == [] and read(text).taken["current_k"] == 3


def test_what_is_not_taken_over_is_said():
    text = PLAIN + (
        " --quantization fp8 --max-num-seqs 64 -pp 2 --kv-cache-dtype turboquant_4bit_nc -sc '"
        '{"model": "d", "num_speculative_tokens": 3, "kv_cache_dtype": "fp8", "rejection_sample_method": "block",'
        ' "num_speculative_tokens_per_batch_size": [[1, 4, 3]], "quantization": "awq"}\''
    )
    said = " ".join(read(text).notes)
    for word in ("--quantization", "--pipeline-parallel-size", "turboquant_4bit_nc", "draft's own KV format fp8", "block",
                 "[[1, 4, 3]]", "of speculative_config not taken over: quantization"):  # fmt: skip
        assert word in said
    assert "--max-num-seqs" not in said and read(text).dtype is None


@pytest.mark.parametrize(
    ("word", "contexts"),
    [("512", (512,)), ("4096", (2048, 4096)), ("8k", (2048, 8000)), ("8K", (2048, 8192)), ("2.5k", (2048, 2500)),
     ("1m", (2048, 8192, 32768)), ("auto", None), ("-1", None), ("$LEN", None)],
)  # fmt: skip
def test_contexts_are_those_the_server_holds(word, contexts):
    """--max-model-len in vLLM's spellings caps the contexts decided for; what vLLM chooses or a variable holds does not."""
    options = dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}
    text = f"{PLAIN} -sc '{SPEC}' --max-model-len {word}"
    assert study_options(text, options, [])[0]["context"] == contexts
    assert any("--max-model-len $LEN is not taken over" in n for n in read(text).notes) == (word == "$LEN")


def test_batches_are_those_the_server_holds():
    """--max-num-seqs caps the batches; one's own --batch and --context come first, with a word where they go beyond."""
    options = dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}
    text = f"{PLAIN} -sc '{SPEC}' --max-num-seqs 64 --max_model_len=512"
    made = study_options(text, options, [])[0]
    assert made["batch"] == (1, 8, 32, 64) and made["context"] == (512,)

    def said(**changes):
        own = {k: v for k, v in study_options(text, options | changes, [])[0].items() if v is not None}
        return " ".join(notes(StudyConfig(**{k: own[k] for k in own if k not in ("target", "draft", "pair")})))

    assert "beyond" not in said() and "1024 + 256 tokens are scored" in said()
    assert "tokens are scored" not in said(prompt_tokens=256)
    own = said(batch=(8, 256), context=(256, 2048, 4096))
    assert "--batch 256 is beyond the --max-num-seqs 64" in own
    assert "--context 2048,4096 is beyond the --max-model-len 512" in own


def test_the_users_own_options_come_first():
    """Options and formats given beside the command override it; ranks go into the roofline that is used."""
    text = SPELLINGS[0]
    options = dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}
    plain, dtypes = study_options(text, options, [])
    assert dtypes == ["fp8_e4m3"] and plain["cost"] == "roofline:4xh100" and plain["target"] == "org/target"
    own, dtypes = study_options(
        text,
        options | {"target": "/here", "current_k": 7, "cost": "roofline:h200", "draft_sampling": "greedy"},
        ["int8"],
    )
    assert (own["target"], own["draft"], own["current_k"], own["draft_sampling"]) == ("/here", "org/draft", 7, "greedy")
    assert own["cost"] == "roofline:4xh200" and dtypes == ["int8"]
    assert study_options(text, options | {"cost": "roofline:2xh200"}, [])[0]["cost"] == "roofline:2xh200"
    with pytest.raises(SpecqError, match="--draft"):
        study_options(PLAIN, options, [])
    assert study_options(PLAIN, options | {"draft": "d"}, [])[0]["current_k"] == 0
    with pytest.raises(SpecqError, match="give --target"):
        study_options(text.replace("org/target", "$MODEL"), options, [])
    assert study_options(text.replace("org/target", "$MODEL"), options | {"target": "t"}, [])[0]["target"] == "t"


def test_a_draft_that_is_only_considered_gets_what_vllm_would_give_it():
    """A server that does not speculate, or by lookup: a draft model named beside it gets the temperature alone, as in vLLM."""
    options = dict.fromkeys(StudyConfig.model_fields) | {"draft": "org/draft"}
    for more in ("", """ -sc '{"method": "ngram", "num_speculative_tokens": 3}'"""):
        assert study_options(f"vllm serve org/target{more}", options, [])[0]["draft_transform"] == "temperature"


def test_secrets_are_not_kept():
    """Keys and tokens become variables in what study.json keeps; other words are as they were."""
    text = f"HF_TOKEN=hf_secret VLLM_API_KEY=$KEPT {PLAIN} --api-key secret secret2 --hf_token=secret --port 80 -sc '{SPEC}'"
    options = dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}
    kept = study_options(text, options, [])[0]["vllm_command"]
    assert (
        "secret" not in kept and "HF_TOKEN=$HF_TOKEN" in kept and "VLLM_API_KEY=$KEPT" in kept and "--port 80" in kept
    )
    assert read(kept).taken == read(text).taken and not any("secret" in n for n in read(text).notes)
    docker = text.replace("HF_TOKEN=hf_secret", "docker run --env=HF_TOKEN=hf_secret").replace(
        "vllm serve", "x/vllm --model"
    )
    assert "secret" not in study_options(docker, options, [])[0]["vllm_command"]


@pytest.mark.parametrize(
    "around",
    ["export HF_TOKEN=hf_secret; {}", "docker run -eHF_TOKEN=hf_secret -e KEY=hf_secret --env=A_KEY=hf_secret vllm/vllm-openai"
     " --model org/target -sc.model org/draft -sc.num_speculative_tokens 3", "hf auth login --token hf_secret && {}",
     "{} && x login --api-key=hf_secret --password hf_secret -v", "sh -c 'export X_SECRET=hf_secret; run' ; {}",
     "curl -H 'Authorization: Bearer hf_secret' http://me:hf_secret@host/ && {}",
     "HTTPS_PROXY=http://me:hf_secret@proxy:3128 {}"],
)  # fmt: skip
def test_secrets_around_the_server_are_not_kept(around):
    """Variables, docker's -e in every spelling, other programs' options; the command reads as before."""
    text = around.format(f"{PLAIN} -sc '{SPEC}'")
    kept = study_options(text, dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}, [])[0]["vllm_command"]
    assert "hf_secret" in text and "hf_secret" not in kept and read(kept).taken == read(text).taken
    assert [w for w in read(kept).words if w == "&&"] == [w for w in read(text).words if w == "&&"]


@pytest.mark.parametrize(
    "script",
    [
        # JSON at any depth, by both spellings of an option; strings within it
        "{} --kv-transfer-config '{{\"kv_connector\": \"X\", \"extra\": {{\"list\": [{{\"api_key\": \"LEAK\"}}]}}}}'",
        "{} --hf-overrides='{{\"token\":\"LEAK\", \"n\": [1e400, null]}}' --port 80",
        "{} --hf-overrides '{{\"credentials\": {{\"me\": [\"LEAK\", 7]}}, \"u\": \"ftp://me:LEAK@h\"}}'",
        "x '{{\"env\": [{{\"name\": \"A_KEY\", \"value\": \"LEAK\"}}, {{\"value\": \"LEAK\", \"name\": \"TOKEN\"}}]}}' ; {}",
        "{} --x '{{\"a\": $N, \"accessToken\": \"LEAK\"}}' --port 80",
        "{} --kv-transfer-config.api_key LEAK --kv_transfer_config.a.hf_token=LEAK -x.credentials.blob LEAK --port 80",
        # options of vLLM and of others
        "{} --ssl-keyfile-password LEAK --port 80",
        "{} --api-key LEAK LEAK2 --port 80",
        "huggingface-cli login --token LEAK && {}",
        "sh -c 'x login --password LEAK' ; {}",
        "x -token LEAK | y --auth=LEAK ; {}",
        # headers
        "curl --header 'api-key: LEAK' -H 'X-Auth-Token:LEAK' -H'Authorization: Basic LEAK' h && {}",
        "OTEL_EXPORTER_OTLP_HEADERS='Authorization=Bearer LEAK' {}",
        "OTEL_EXPORTER_OTLP_HEADERS='Authorization=Api-Key LEAK' {}",
        "OTEL_EXPORTER_OTLP_HEADERS='a=b,x-api-key=a LEAK' B=A_KEY='a LEAK' {}",
        "OTEL_EXPORTER_OTLP_HEADERS=a=b,x-api-key=LEAK {}",
        "curl 'https://h/x?a=1&access_token=LEAK' ; {}",
        # assignments, in whatever case and around whatever a shell makes of the value
        "hf_token=LEAK PASSWD=LEAK PASS=LEAK AUTH=LEAK CREDENTIALS=LEAK OPENAI_API_KEY_PROD=LEAK HF_TOKEN_2=LEAK {}",
        "HF_TOKEN=$'LEAK' VLLM_API_KEY=$X-LEAK A_KEY=${{X:-LEAK}} B_KEY=LEAK$X C_KEY='$LEAK' D_KEY=\"\\$LEAK\" {}",
        "HF_TOKEN=$(echo LEAK) KEY=`echo LEAK` {}",
        "setenv HF_TOKEN LEAK; {}",
        "export ARGS=(--token LEAK); A='b TOKEN=LEAK' {}",
        "cat > c.yaml <<EOF\napi-key: LEAK\nEOF\n{}",
        "HTTPS_PROXY=http://me:$X-LEAK@proxy pip install git+https://LEAK@github.com/a/b; {}",
        # quotes, lists and lines that go on
        "x 'HF_TOKEN=\"a LEAK\" y'; x \"y 'A_KEY=a LEAK' z\" --env='A_KEY=a LEAK' ; {}",
        "sh -c 'A_KEY=$X\"LEAK\" B_KEY=\"LEAK\"LEAK y'; A_KEY=$X\"LEAK\" B_KEY=\"$X\"LEAK {}",
        "A=(\n --token LEAK\n \"B_KEY=LEAK\" 'x --token LEAK y'\n); A_KEY=(LEAK 'LEAK x'); A+=(\"y KEY=LEAK\") ; {}",
        "HF_TOKEN=\\\nLEAK {} --api-key=\\\nLEAK",
        "x --use-auth-token LEAK ; {}",
        "A_KEY=${{A_KEY:-LEAK}} {}",
        # passwords with marks of addresses in them
        "redis-cli -u redis://me:p@LEAK@h:6379 ; A=redis://me:pa/LEAK@h:6379 {}",
        "HTTPS_PROXY=http://me:LEAK/x@LEAK@h:3128 A=https://LEAK@LEAK@h/a {}",
        # comments
        "# LEAK\n{}  # LEAK, don't tell\n# LEAK",
    ],
)  # fmt: skip
def test_a_secret_is_known_by_its_name(script):
    """One notion of a secret's name for assignments, options, JSON keys and headers, anywhere in the line."""
    text = script.format(f"{PLAIN} -sc '{SPEC}' --seed 1")
    kept = study_options(text, dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}, [])[0]["vllm_command"]
    assert "LEAK" in text and "LEAK" not in kept and "LEAK" not in words_without_secrets(["--vllm-command", text])[1]
    assert read(kept).taken == read(text).taken and ("--port 80" in kept) == ("--port 80" in text)
    assert joined(without_secrets(read(kept))) == kept


@pytest.mark.parametrize(
    ("script", "kept"),
    [
        ('ARGS="--api-key $KEY --port 80"', None),
        ("ARGS=\"--port 80 --x.api_key=${KEY}\"; A=\"--x '{\\\"api_key\\\": $KEY, \\\"n\\\": 1}' --port 80\"", None),
        ("ARGS=(\n --port 80\n --api-key $K\n)", None),
        ("ARGS=(--port 80 # all\n --api-key \"$K\" \"A_KEY=$K\"\n)", None),
        ("A_KEY=${A_KEY:?missing} B=${A_KEY:?} C=${B:-1}", None),
        ("A_KEY=${A_KEY:-LEAK} B=x${A_KEY:-LEAK}y", "A_KEY=${A_KEY} B=x${A_KEY}y"),
        ("curl http://h:80/a@b git+https://github.com:443/a/b@main", None),
        ('ARGS="--api-key LEAK --port 80"', 'ARGS="--api-key $API_KEY --port 80"'),
        ("sh -c '(x --token LEAK); A_KEY=\"a LEAK\" y'", 'sh -c "(x --token $TOKEN); A_KEY=\\"$A_KEY\\" y"'),
        ("A+=(\n--token LEAK\n'KEY=LEAK' 'a b'\n)", "A+=(--token $TOKEN KEY=$KEY 'a b')"),
        ("sh -c \"x --api-key '$K' --port 1; curl -H 'Authorization: Bearer $T' h\"", None),
        ("x $(curl -H 'api-key: LEAK LEAK' h)", "x $(curl -H 'api-key: $API_KEY' h)"),
        ("x=\"-e 'A_KEY=$K LEAK' -v\"", "x=\"-e 'A_KEY=$A_KEY' -v\""),
        ("x git+https://me:LEAK@h/a@main,http://h:80,http://:LEAK@h",
         "x git+https://me:$PASSWORD@h/a@main,http://h:80,http://:$PASSWORD@h"),
        ("A_KEY=(LEAK LEAK)", "A_KEY=($A_KEY $A_KEY)"),
        ("x $(y --token LEAK) `y --token LEAK -v`", "x $(y --token $TOKEN) `y --token $TOKEN -v`"),
        ("x '{\"a\": \"$HOME\", \"A_KEY\": \"LEAK\"}'", 'x "{\\"a\\": \\"\\$HOME\\", \\"A_KEY\\": \\"$A_KEY\\"}"'),
        ("sh -c 'x $HOME --token LEAK'", 'sh -c "x \\$HOME --token $TOKEN"'),
    ],
)  # fmt: skip
def test_what_is_around_a_secret_stays(script, kept):
    """A value ends where its word does; variables alone, lists, and what did not expand are as they were."""
    command = f"{script}; {PLAIN}"
    assert joined(without_secrets(read(command))) == (f"{kept} ; {PLAIN}" if kept else joined(split(command)))


@pytest.mark.parametrize(
    "entry",
    ['name: VLLM_API_KEY\n      value: "LEAK"', "value: LEAK\n      name: VLLM_API_KEY", "{name: A_KEY, value: LEAK}"],
)
@pytest.mark.parametrize("around", ["{}", "kubectl apply -f - <<EOF\n{}\nEOF"])
def test_a_manifest_is_refused(entry, around):
    """Its names and values stand apart, so no name says what is secret."""
    text = around.format(f"args:\n  - |\n    {PLAIN} -sc '{SPEC}'\nenv:\n    - {entry}")
    for part in (text, text.replace("args:\n  - |\n", "").replace("env:\n", "")):
        with pytest.raises(SpecqError, match="YAML .* is not read: give the command by itself") as caught:
            read(part)
        assert "LEAK" not in str(caught.value) and words_without_secrets(["--vllm-command", part])[1] == "..."


@pytest.mark.parametrize(
    "words",
    [
        "--max-num-batched-tokens 64 --tokenizer t --skip-tokenizer-init --long-prefill-token-threshold 9 --ssl-keyfile k.pem",
        "--hf-overrides '{\"bos_token_id\": 1, \"prompt_tokens\": \"x\", \"eos_token\": \"</s>\"}'",
        "-cc.pass_config.fuse_norm_quant True --compilation-config '{\"pass_config\": {\"a\": \"b\"}}' --return-token t",
        "--api-key $VLLM_API_KEY --hf-token ${HF_TOKEN} --x.api_key=\"$K\"",
        "--hf-overrides \"{\\\"api_key\\\": \\\"$API_KEY\\\"}\"",
        "--hf-token --tokenizer-mode auto --kv-cache-dtype-skip-layers 1",
        "--hf-overrides '{\"num_key_value_heads\": 8, \"head_key_dim\": 64, \"key_dim\": 9, \"image_token\": \"<i>\"}'",
        "--reasoning-config '{\"think_start_token\": \"<t>\", \"think_end_token\": \"x\", \"token_budget\": 9}' --key-prefix a",
        "&& docker login -u me --password-stdin ghcr.io",
    ],
)  # fmt: skip
def test_other_names_are_no_secrets(words):
    """Counts and ids of tokens, files of keys, flags, and variables stay as they were written."""
    around = ('docker run -v /run/secret:/secret -v ~/.cache/token:/token -e HF_TOKEN -e HF_TOKEN=$HF_TOKEN -e A_KEY="$K" '
              "-e TOKENIZERS_PARALLELISM=false -e KEY_FILE=/k -e PWD=$PWD -v $(pwd):/x ssh://git@host http://me:$PW@h "
              f"-H \"Authorization: Bearer $T\" vllm/vllm-openai --model org/target -sc '{SPEC}' ")  # fmt: skip
    assert joined(without_secrets(read(around + words))) == around + words


def test_specqs_own_command_line_holds_what_is_kept(tmp_path):
    """Both spellings, every occurrence, a command that is none; the path of a file and other options stay."""
    text = f"HF_TOKEN=hf_secret {PLAIN} --api-key hf_secret -sc '{SPEC}'"
    kept = study_options(text, dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny"}, [])[0]["vllm_command"]
    made = ["--vllm-command", kept, "--seed", "1", f"--vllm-command={kept}", "--out", "o"]
    assert (
        words_without_secrets(["--vllm-command", text, "--seed", "1", f"--vllm-command={text}", "--out", "o"]) == made
    )
    path = tmp_path / "serve.sh"
    path.write_text(text)
    for own in (
        ["--vllm-command", str(path)],
        [f"--vllm-command={path}"],
        ["--vllm-command"],
        ["study", "--seed", "1"],
    ):
        assert words_without_secrets(own) == own
    assert words_without_secrets(["--vllm-command", "HF_TOKEN=hf_secret no server"]) == ["--vllm-command", "..."]


def test_no_file_of_a_study_holds_a_secret(tmp_path, monkeypatch):
    """Keys and tokens of the command are in no file of the output, of an interrupted study or a whole one."""
    target, draft = save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=1, num_hidden_layers=1)
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    command = (
        "export HF_TOKEN=hf_secretsecret; VLLM_API_KEY=sk-zzz docker run -e HUGGING_FACE_HUB_TOKEN=hf_qqq"
        f" vllm/vllm-openai:v0.24.0 --model {target} --api-key k1secret k2secret -sc.model {draft} -sc.num_speculative_tokens 2"
    )
    words = ["study", "--vllm-command", command, "--prompts", prompts, "--num-prompts", "6", "--output-tokens", "12",
             "--prompt-tokens", "24", "--k-max", "4", "--out", str(tmp_path / "out"), "--quiet"]  # fmt: skip

    def run(*more):
        monkeypatch.setattr("sys.argv", ["specq", *map(str, words), *more])
        return CliRunner().invoke(cli.app, [*map(str, words), *more])

    def held(folder, *what):
        files = [p for p in folder.rglob("*") if p.is_file()]
        return [(p.name, w) for p in files for w in what if w.encode() in p.read_bytes()]

    secrets = ("hf_secret", "sk-zzz", "hf_qqq", "k1secret", "k2secret")
    with monkeypatch.context() as patched:
        interrupted_after(patched, 1, raising(KeyboardInterrupt()))
        done = run()
    assert isinstance(done.exception, Interrupted), done.output
    partial = tmp_path / "out.partial"
    assert ("run.json", "$HF_TOKEN") in held(partial, "$HF_TOKEN") and not held(partial, *secrets)
    done = run("--resume")
    assert done.exit_code == 0, done.output
    assert {"study.json", "report.html"} <= {name for name, _ in held(tmp_path / "out", "--vllm-command")}
    assert not held(tmp_path / "out", *secrets) and not any(s in done.output for s in secrets)
    told = shlex.split(strict_json(tmp_path / "out" / "study.json")["environment"]["command"])
    rec = strict_json(next((tmp_path / "out").glob("fp8*")) / "recommendation.json")
    assert told[told.index("--vllm-command") + 1] == rec["vllm"]["current_command"]


def test_lines_of_a_script_stay_commands_of_their_own():
    """A newline ends a command, but not within quotes or behind a backslash; a line of options belongs to the one before."""
    script = f"""#!/bin/bash
set -e
export CUDA_VISIBLE_DEVICES=0,1

{PLAIN} -tp 2 \\
  --kv-cache-dtype fp8
  --speculative-config '{{"model": "org/draft",
    "num_speculative_tokens": 3}}'
echo gone
"""
    command = read(script)
    assert command.taken["current_k"] == 3 and command.taken["tensor_parallel"] == 2 and command.dtype == "fp8_e4m3"
    assert command.notes == []
    now, then = changed(script, block(fmt="int8_per_token_head"))
    assert now.startswith(f"set -e ; export CUDA_VISIBLE_DEVICES=0,1 ; {PLAIN} -tp 2 --kv-cache-dtype fp8")
    assert then.startswith(
        f"set -e ; export CUDA_VISIBLE_DEVICES=0,1 ; {PLAIN} -tp 2 --kv-cache-dtype int8_per_token_head"
    )
    assert now.endswith("; echo gone") and then.endswith("; echo gone") and read(then).taken["current_k"] == 2


@pytest.mark.parametrize(
    ("script", "kept"),
    [
        ("{}  # don't use int8", "{}"),
        ("# it's the server\n{} \\\n  # --port 80 \\\n  --seed 1", "{} --seed 1"),
        ("{} \\  # in fp8\n  --seed 1 \\", "{} --seed 1"),
        ("echo a#b '#' \\#; {}", "echo a#b '#' \\# ; {}"),
        ("{{ {}; }} && echo \"it's\"", "{{ {} ; }} && echo \"it's\""),
        ("({} -tp 2)&", "( {} -tp 2 ) &"),
        ("if true; then\n{}\nfi", "if true ; then {} ; fi"),
        ("run() {{\n{}\n}}\nrun", "run ( ) {{ {} ; }} ; run"),
        ("A=(1 2)\n{} >log 2>&1\necho `date` '`x`' $'a\\'b'", "A=(1 2) ; {} > log 2>&1 ; echo `date` '`x`' $'a\\'b'"),
        ("{} --seed $(cat 'a (b') --host ${{HOST:-\"$(hostname)\"}} > >(tee log)",
         "{} --seed $(cat 'a (b') --host ${{HOST:-\"$(hostname)\"}} > >(tee log)"),
    ],
)  # fmt: skip
def test_the_line_given_back_is_spelt_as_it_was(script, kept):
    """Comments go; braces, subshells, substitutions, arrays and redirections stay what a shell makes of them."""
    server = f"{PLAIN} --kv-cache-dtype fp8 -sc '{SPEC}'"
    assert changed(script.format(server), block())[0] == kept.format(server)
    then = changed(script.format(server), block(fmt="int8_per_token_head"))[1]
    assert [w for w in split(then) if w.operator] == [w for w in split(kept.format(server)) if w.operator]
    assert read(then).dtype == "int8_per_token_head" and read(then).notes == []
    told = subprocess.run(["bash", "-n", "-c", then], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_substitutions_of_a_container_stay_expandable():
    """`-v $(pwd)/m:/m`, backticks and `-u $(id -u):$(id -g)` are each one word, and no quotes come around them."""
    run = 'docker run -v $(pwd)/m:/m -v `pwd`:/x -v "$PWD/a b":/y -u $(id -u):$(id -g) vllm/vllm-openai:v0.24.0 --model /m'
    now, then = changed(f"{run} -sc '{SPEC}'", block())
    assert now == f"{run} -sc '{SPEC}'" and then.startswith(run)
    assert read(now).taken["target"] == "/m" and read(now).taken["vllm_version"] == "0.24"


def test_a_file_may_hold_the_command(tmp_path):
    path = tmp_path / "serve.sh"
    path.write_text("#!/bin/sh\n" + SPELLINGS[2])
    assert read(text_of(str(path))).taken == TAKEN
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecqError, match="UTF-8"):
        text_of(str(path))
    assert text_of("x" * 5000) and text_of("a\0b")


@pytest.mark.parametrize("given", ["serve.sh", "scripts/serve", "./x", "gone.txt"])
def test_a_file_that_is_not_there_is_said(given, tmp_path, monkeypatch):
    """One word that looks like a path is no command; a directory is no file of one either."""
    monkeypatch.chdir(tmp_path)
    for word in (given, f"{tmp_path}/{given}"):
        with pytest.raises(SpecqError, match="--vllm-command: no such file: ") as caught:
            text_of(word)
        assert word in str(caught.value)
    for word in (str(tmp_path), "./"):
        with pytest.raises(SpecqError, match=f"^--vllm-command: {word} is a directory$"):
            text_of(word)
    assert text_of("vllm") == "vllm" and text_of("vllm serve a/b.c") == "vllm serve a/b.c"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A finished study that started from a command; (its folder, what the terminal said)."""
    root = tmp_path_factory.mktemp("server")
    target, draft = save_model(root / "t", seed=1), save_model(root / "d", seed=1, num_hidden_layers=1)
    prompts = write_prompts(root / "p.jsonl", 6)
    spec = json.dumps({"model": str(draft), "num_speculative_tokens": 2})
    command = f"vllm serve {target} --kv-cache-dtype fp8 --max-num-seqs 64 --quantization none -sc '{spec}'"
    words = ["study", "--vllm-command", command, "--prompts", prompts, "--num-prompts", "6", "--output-tokens", "12",
             "--prompt-tokens", "24", "--k-max", "4", "--out", str(root / "out"), "--quiet"]  # fmt: skip
    done = CliRunner().invoke(cli.app, [str(w) for w in words], terminal_width=1000)
    assert done.exit_code == 0, done.output
    return root / "out", done.output


def test_the_study_of_a_server_gives_its_command_back(server):
    """Both lines are in recommendation.json, the terminal and the report; what was left out is among the warnings."""
    out, said = server
    rec = strict_json(next(out.glob("fp8*")) / "recommendation.json")
    assert rec["current_num_speculative_tokens"] == 2 and rec["target_kv_dtype"] == "fp8_e4m3"
    assert rec["sampling"]["draft_sampling"] == "greedy" and rec["sampling"]["draft_transform"] == "temperature"
    now, then = rec["vllm"]["current_command"], rec["vllm"]["changed_command"]
    assert now in said and then in said and "--max-num-seqs 64" in then
    assert read(then).taken["target"] == read(now).taken["target"]
    assert read(then).speculative.get("num_speculative_tokens", 0) == max(k for _, _, k in rec["recommended_schedule"])
    assert strict_json(out / "study.json")["configuration"]["batch"] == [1, 8, 32, 64]
    assert any("--quantization" in w for w in rec["warnings"]) and any("does not state" in w for w in rec["warnings"])
    page = next(out.glob("fp8*/report.html")).read_text()
    assert "command line now" in page and "--max-num-seqs 64" in page


def test_what_the_server_lacks_is_said_of_the_points_decided_for(server):
    """Decided again for batches and a vLLM version of one's own: the limits named are those that they break, no older ones."""
    found = load_study(server[0])

    def said(**changes):
        config = reconfigured(found.config, changes)
        made = conclude(found.facts(config), [get_format("fp8")], found.material, found.cost(config))
        return " ".join(made["fp8_e4m3"].recommendation.warnings)

    assert "is beyond the --max-num-seqs 64" not in said() and "does not state vLLM's version" in said()
    assert "--batch 128,256 is beyond the --max-num-seqs 64" in said(batch=(1, 128, 256))
    assert "does not state" not in said(vllm_version="0.24") and "--quantization" in said(vllm_version="0.24")


def test_version_notes_are_only_for_those_who_gave_none():
    options = dict.fromkeys(n for n in StudyConfig.model_fields if not n.endswith("sha256")) | {"pair": "tiny"}
    options |= {"vllm_command": f"vllm serve x -sc '{SPEC}'", "target": None}
    config = StudyConfig(vllm_command=options["vllm_command"])
    assert len(notes(config)) == 1 and not notes(config.model_copy(update={"vllm_version": "0.24"}))
    assert notes(StudyConfig()) == []
    with pytest.raises(SpecqError):
        resolve(options | {"vllm_command": "nonsense"}, [])


PIECES = st.sampled_from(
    ["vllm", "serve", "docker", "run", "vllm/vllm-openai:v0.24.0", "-m", "vllm.entrypoints.openai.api_server", "--model", "m",
     "-tp", "2", "-sc", "--speculative-config", "--speculative-config.model", "-sc.a.b+", "--kv-cache-dtype", "fp8",
     "--spec-tokens", "--override-generation-config", "'{\"top_k\": 1e999}'", f"'{SPEC}'", "'{}'", "null", "'",
     '"', "\\\n", "#", "&&", ">", "=", "--max-model-len", "1k", "--api-key", "$X", "~/m", "{}", "--=", "-",
     "--token", "HF_TOKEN=x", "-eA_KEY=x y", "--", "--.", "-.=", "--attention-config", "'{\"backend\": 1}'"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=6))).map(lambda p: "vllm serve m " + " ".join(p)))
)
@example("vllm serve m -sc.a 1 -sc.a.b 2")
@example("vllm serve m --override-generation-config.top_k=" + "9" * 5000)
def test_any_text_is_read_or_refused_in_one_line(text):
    """Never a traceback; what is read once reads the same again from the line that is kept, and so does what is changed."""
    try:
        options, _ = study_options(text, {"draft": "d", "pair": "tiny"}, [])
    except SpecqError as error:
        assert "\n" not in str(error)
        return
    kept = options["vllm_command"]
    taken, before = read(kept).taken, read(text).taken
    before |= {r: taken[r] for r in ("target", "draft") if "$" in taken.get(r, "")}  # a model called TOKEN=0, say
    assert taken == before
    assert (read(kept).speculative, read(kept).limits) == (read(text).speculative, read(text).limits)
    now, then = changed(kept, block())
    assert read(now).taken == before
    assert read(then).speculative["num_speculative_tokens"] == 2
