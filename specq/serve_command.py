"""The command line of a running vLLM server, read as vLLM reads it.

Spelling is vLLM's own (`FlexibleArgumentParser`, 0.24 and 0.32): `--opt value`, `--opt=value`, underscores for dashes, JSON
keys with dots (`--speculative-config.model M`, `-sc.num_speculative_tokens=3`), the last of several counts, dotted keys
replace a whole JSON given elsewhere. Around it may stand variables, a launcher, `docker run ... IMAGE`, and shell operators.
Nothing of it is executed, and no variable is expanded.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specq.errors import SpecqError, first_line, printable
from specq.kv import FORMATS
from specq.shell_words import Word, split
from specq.vllm_options import OLDEST

SPECULATIVE, KV, BACKEND, ATTENTION = (
    "--speculative-config", "--kv-cache-dtype", "--attention-backend", "--attention-config",
)  # fmt: skip
RANKS = "--tensor-parallel-size"
SHORT = {"-sc": SPECULATIVE, "-tp": RANKS, "-pp": "--pipeline-parallel-size", "-ac": ATTENTION,
         "-dp": "--data-parallel-size", "-q": "--quantization", "-cc": "--compilation-config"}  # fmt: skip
REMOVED = ("--speculative-model", "--num-speculative-tokens")  # the spelling before --speculative-config
SPEC_OPTIONS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
OVERRIDE, GENERATION = "--override-generation-config", "--generation-config"
SAMPLED = {"temperature": (1.0, float), "top_p": (1.0, float), "top_k": (0, int)}  # vLLM's neutral values
# Options without a value; for others that are not known here, a word after them that is no option is their value.
FLAG = re.compile(r"--(enable|disable|no|trust|use|allow|return|skip|enforce|async|calculate|headless)\b[\w-]*")
LAUNCHER = re.compile(r"vllm(?:(?:@|==)(?P<version>[\w.+-]+))?")
IMAGE = re.compile(r"(?P<name>\S*vllm[\w./-]*)(?::(?P<tag>[\w.+-]+))?(?:@sha256:[0-9a-f]+)?")
OWN_IMAGE = "vllm-openai"  # vLLM's images begin with it, on whatever registry
CONTAINER_FLAG = re.compile(
    r"-[ditPq]+|--(rm|init|privileged|detach|interactive|tty|read-only|publish-all|quiet|replace|no-healthcheck|oom-kill-disable)"
)
# Words of a manifest (Kubernetes, Compose): names and values stand apart in it, so what is secret there is not known.
MANIFEST = re.compile(
    r"[{\[]*(?:name|value|args|command|entrypoint|env|environment|image|containers|services|apiVersion|kind):"
)
# A server within a word or a list, such as `bash -c "vllm serve M"` and `["vllm", "serve", "M"]`.
WITHIN = re.compile(r"\bvllm\W+serve\b|-m\W+vllm\.entrypoints\.")
OTHER_DRAFTS = re.compile(r"eagle|medusa|dflash|dspark|speculator", re.IGNORECASE)
SEVERAL = {"--api-key", "--served-model-name", "--lora-modules", "--middleware"}  # these take several words
UNRELATED = {
    "--host", "--port", "--api-key", "--hf-token", "--served-model-name", "--uvicorn-log-level", "--seed",
    "--disable-log-requests", "--gpu-memory-utilization", "--max-num-batched-tokens",
    "--enforce-eager", "--enable-prefix-caching", "--no-enable-prefix-caching", "--trust-remote-code", "--tokenizer",
}  # fmt: skip
# What the server holds at most, by the study option that it limits.
LIMITS = {"context": "--max-model-len", "batch": "--max-num-seqs"}
# vLLM's suffixes of sizes: 8k = 8,000, 8K = 8,192.
SCALE = {"": 1} | {s: 1000**n for n, s in enumerate("kmgt", 1)} | {s: 1024**n for n, s in enumerate("KMGT", 1)}
# What is taken over, and what else is known to want a value.
READ = {
    "--model",
    KV,
    GENERATION,
    OVERRIDE,
    SPECULATIVE,
    RANKS,
    BACKEND,
    *SPEC_OPTIONS,
    *LIMITS.values(),
}
VALUED = READ | {*SHORT.values(), "--config"} | {o for o in UNRELATED if not FLAG.fullmatch(o)} - {"--hf-token"}


@dataclass(frozen=True)
class Option:
    """One option: its name as vLLM normalises it, its value (None for a flag), and its words [start, end)."""

    name: str
    value: str | None
    start: int
    end: int


@dataclass
class ServeCommand:
    """A command line read. `words[first:last]` are vLLM's arguments, `model` the word that names the target.

    `taken` holds study options by name; `dtype` is the server's KV format by specq's name, None where it has none;
    `speculative` its speculative_config; `limits` the largest context and batch (study options' names) that it serves where
    it says so; `notes` say what was not taken over.
    """

    words: list[Word]
    first: int
    last: int
    options: list[Option]
    model: str
    speculative: dict[str, Any]
    dtype: str | None = "bf16"
    taken: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fail(text: str) -> SpecqError:
    """The exception that refuses a command, in one line."""
    return SpecqError(line_of(text))


def line_of(text: str) -> str:
    """A sentence about the command, in one printable line."""
    return "--vllm-command: " + printable(" ".join(text.split()))


def read(text: str) -> ServeCommand:
    """Read a command line. Raises SpecqError where it is none, or runs a draft that specq does not model."""
    words = _split(text)
    if found := next((w for w in words if MANIFEST.fullmatch(w)), None):
        raise fail(f"YAML ({found}) is not read: give the command by itself")
    start = _start(words)
    first, version, image = start or (0, None, None)
    last = next((i for i in range(first, len(words)) if words[i].operator), len(words))
    if (not start and WITHIN.search(" ".join(words))) or (start and any(map(WITHIN.search, words[first:last]))):
        raise fail("the server stands within quotes or a list, which are not read: give the command by itself")
    if not start:
        raise fail("no `vllm serve MODEL ...` in it, nor a container or module of vLLM's server")
    options, loose = _parse(words, first, last)
    for option in options:
        name = option.name.split(".")[0]
        if (option.value is None and name in VALUED) or (option.value == "" and name in READ):
            raise fail(f"{option.name} has no value")
    by_name = {o.name: o.value for o in options}
    model = by_name.get("--model") or (loose[0] if loose else None)
    if not model:
        more = "; what --config FILE holds is not read" if "--config" in by_name else ""
        taking = [o.name for o in options if o.end - o.start == 2 and o.name.split(".")[0] not in VALUED]
        if taking and not more:
            more = f": the word behind {' and behind '.join(taking)} counts as its value; give the model first"
        raise fail(f"no model in it{more}")
    made = ServeCommand(words, first, last, options, model, _speculative(options))
    made.taken["target"] = model
    _take_draft(made)
    _take_rest(made, by_name)
    _take_version(made, version, image)
    if beside := loose[0 if by_name.get("--model") else 1 :]:
        made.notes.append(f"not understood: {' '.join(beside)}")
    before = next((i for i in reversed(range(first)) if words[i].operator), 0)
    if _start(words[:before]) or _start(words[last:]):
        made.notes.append(f"another server stands in it: what is read and changed is that of {model}")
    made.notes[:] = map(line_of, made.notes)
    return made


def _split(text: str) -> list[Word]:
    try:
        return split(text)
    except ValueError as error:
        raise fail(f"cannot be split into words: {error}; JSON needs '...' around it") from None


def _start(words: list[Word]) -> tuple[int, str | None, str | None] | None:
    """Index of vLLM's first argument, the version that its launcher or image names, and the image where that names it.

    None where there is no server.
    """
    stated = next((m[1] for w in words if (m := re.fullmatch(r"vllm(?:\[[\w,]*\])?==([\w.+-]+)", w))), None)
    at, tag, image = _container(words)
    for i, word in enumerate(words[:-1]):
        found = LAUNCHER.fullmatch(word.rsplit("/", 1)[-1])
        module = word == "-m" and words[i + 1].startswith("vllm.entrypoints.")
        if not module and not (found and words[i + 1] == "serve"):
            continue
        after = i + 2 + (module and words[i + 2 : i + 3] == ["serve"])
        if version := (found and found["version"]) or stated:
            return after, version, None
        inside = at is not None and at < i and not any(w.operator for w in words[at:i])
        return (after, tag, image) if inside else (after, None, None)
    if at is not None:
        return at + 1 + (words[at + 1 : at + 2] == ["serve"]), tag, image
    return None


def _container(words: list[Word]) -> tuple[int | None, str | None, str | None]:
    """Index, tag and name of the image that a container is run from."""
    running = False
    for i, word in enumerate(words):
        if word.rsplit("/", 1)[-1] in ("docker", "podman", "nerdctl"):
            running = False
        elif word in ("run", "create"):
            running = True
        elif running and (found := IMAGE.fullmatch(word)) and not word.startswith("-") and "=" not in word:
            before = words[i - 1]
            if not before.startswith("-") or "=" in before or CONTAINER_FLAG.fullmatch(before):
                return i, found["tag"], found["name"]
    return None, None, None


def _name(word: str) -> str:
    """An option's name as vLLM reads it: long for short, dashes for underscores before the first dot."""
    head, dot, tail = word.partition(".")
    head = SHORT.get(head, head.replace("_", "-") if head.startswith("--") else head)
    return head + dot + tail


def _value(word: Word) -> str:
    """A word's value, with the home directory where a shell puts it: it is no variable, and models lie there."""
    return os.path.expanduser(word) if word.raw.startswith("~/") else str(word)


def _parse(words: list[Word], first: int, last: int) -> tuple[list[Option], list[str]]:
    options, loose, i = [], [], first
    while i < last:
        word = words[i]
        if not word.startswith("-") or word in ("-", "--"):
            loose.append(_value(word))
            i += 1
            continue
        head, equals, value = word.partition("=")
        name, end = _name(head), i + 1
        valued = end < last and (not words[end].startswith("-") or re.fullmatch(r"-\d[\d.]*", words[end]))
        if equals:
            options.append(Option(name, value, i, end))
        elif valued and not FLAG.fullmatch(name):
            value, end = _value(words[end]), end + 1
            while name in SEVERAL and end < last and not words[end].startswith("-"):
                end += 1
            options.append(Option(name, value, i, end))
        else:
            options.append(Option(name, None, i, end))
        i = end
    return options, loose


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """A JSON object given to an option."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        hint = "variables and $(...) are not expanded" if "$" in (text or "") else "in a shell it needs '...' around it"
        raise fail(f"{option} is not JSON ({first_line(error)}); {hint}") from None
    if not isinstance(value, dict):
        raise fail(f"{option} is not a JSON object")
    return value


def _json_option(options: list[Option], name: str) -> dict[str, Any]:
    """The object of an option given as JSON, by dotted keys, or (then the dotted keys count) both."""
    whole = [o for o in options if o.name == name]
    dotted = [o for o in options if o.name.startswith(name + ".")]
    if not dotted:
        return json_object(name, whole[-1].value) if whole else {}
    made: dict[str, Any] = {}
    for option in dotted:
        *path, last = option.name.removeprefix(name + ".").split(".")
        at = made
        for key in path:
            at = at.setdefault(key, {}) if isinstance(at.get(key, {}), dict) else {}
        try:
            value = json.loads(option.value)
        except (ValueError, RecursionError):
            value = option.value
        if last.endswith("+"):
            last, before = last[:-1], at.get(last[:-1])
            value = [*(before if isinstance(before, list) else []), *option.value.split(",")]
        at[last] = value
    return made


def _speculative(options: list[Option]) -> dict[str, Any]:
    config = {k.replace("-", "_"): v for k, v in _json_option(options, SPECULATIVE).items()}
    for option in options:
        if option.name in REMOVED:
            raise fail(
                f"{option.name} is a spelling of old versions, which vLLM {OLDEST[0]}.{OLDEST[1]} and later refuse; what is"
                f' read is {SPECULATIVE} \'{{"model": ..., "num_speculative_tokens": ...}}\''
            )
        key = SPEC_OPTIONS.get(option.name)
        if key and key in config:
            raise fail(f"{option.name} and {SPECULATIVE} both give {key}, which vLLM refuses")
        if key:
            config[key] = option.value
    return config


def _whole(value: Any, name: str, least: int) -> int:  # noqa: ANN401 - from JSON or a word
    try:
        number = int(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or number < least:
        raise fail(f"{name} must be a whole number of at least {least}, not {str(value)[:60]!r}")
    return number


def _take_draft(made: ServeCommand) -> None:
    config, taken = dict(made.speculative), made.taken
    taken["draft_transform"] = (
        "temperature"  # vLLM's drafts get the temperature alone, also one that is only considered
    )
    if not config:
        taken["current_k"] = 0
        return
    method, model = config.pop("method", None), config.pop("model", None)
    tokens = _whole(config.pop("num_speculative_tokens", None), "num_speculative_tokens", 1)
    taken["current_k"] = tokens
    if method in ("ngram", "ngram_gpu", "[ngram]") or (method is None and model in ("ngram", "[ngram]")):
        shortest, longest = (config.pop(f"prompt_lookup_{end}", None) for end in ("min", "max"))
        known = [x for x in (shortest, longest) if x is not None] or [5]  # vLLM's own defaults
        pair = [_whole(x if x is not None else known[0], "prompt_lookup_min and _max", 1) for x in (shortest, longest)]
        if pair[0] > pair[1]:
            raise fail(f"prompt_lookup_min {pair[0]} is larger than prompt_lookup_max {pair[1]}, which vLLM refuses")
        taken |= {"draft": "ngram", "ngram": tuple(pair)}
    elif method in (None, "draft_model") and isinstance(model, str) and not OTHER_DRAFTS.search(model):
        taken["draft"] = model
        taken["draft_sampling"] = config.pop("draft_sample_method", "greedy")
        if taken["draft_sampling"] not in ("greedy", "probabilistic"):
            raise fail(f"draft_sample_method {str(taken['draft_sampling'])[:60]!r} is neither greedy nor probabilistic")
    else:
        raise fail(
            f"its drafts ({str(method or model)[:80]}) are not modelled; `specq import-metrics` reads what such a server"
            " measured"
        )
    verify = config.pop("rejection_sample_method", "standard")
    if verify == "synthetic":
        raise fail("acceptance of this server is synthetic, for timing: it says nothing about the pair")
    if verify != "standard":
        made.notes.append(
            f"rejection_sample_method {verify} is not modelled: the figures are those of standard verification"
        )
    if (dtype := config.pop("kv_cache_dtype", None)) not in (None, "auto", "bfloat16"):
        made.notes.append(
            f"the draft's own KV format {dtype} is not taken over: the headline has the draft's cache in BF16, and"
            " mu_shift_inherited_draft has it in the target's format"
        )
    if schedule := config.pop("num_speculative_tokens_per_batch_size", None):
        made.notes.append(f"its schedule {json.dumps(schedule)} is not taken over: K now counts as {tokens}")
    if config:
        made.notes.append(f"of speculative_config not taken over: {', '.join(config)}")


def _take_rest(made: ServeCommand, by_name: Mapping[str, str | None]) -> None:
    """KV format, sampling, tensor parallelism; and what is left."""
    taken, notes = made.taken, made.notes
    dtype = (by_name.get(KV) or "auto").lower()
    if dtype == "auto":
        dtype = "bfloat16"
    elif dtype == "float16":
        notes.append("a float16 KV cache counts as BF16 here")
        dtype = "bfloat16"
    elif dtype == "fp8_e4m3":
        dtype = "fp8"
    made.dtype = next((f.name for f in FORMATS if f.vllm == dtype), None)
    if made.dtype is None:
        notes.append(f"specq has no KV format like vLLM's {dtype}")
    if by_name.get(GENERATION) == "vllm":
        taken |= {name: neutral for name, (neutral, _) in SAMPLED.items()}
    override = _json_option(made.options, OVERRIDE)
    for name, (_, kind) in SAMPLED.items():
        if (value := override.pop(name, None)) is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (kind is float or isinstance(value, int))
        ):
            raise fail(f"{OVERRIDE}: {name} is not a number: {str(value)[:60]!r}")
        taken[name] = 0 if name == "top_k" and value == -1 else value
    if override:
        notes.append(f"of {OVERRIDE} not taken over: {', '.join(override)}")
    if "$" in (ranks := by_name.get(RANKS) or ""):
        notes.append(
            f"variables are not expanded: {RANKS} {ranks} counts as 1, which --cost roofline:4xh100 can change"
        )
    elif ranks:
        taken["tensor_parallel"] = _whole(ranks, RANKS, 1)
    for name, option in LIMITS.items():
        if (limit := _limit(option, by_name.get(option), notes)) is not None:
            made.limits[name] = limit
    if by_name.get(GENERATION) not in (None, "auto", "vllm"):
        notes.append(f"{GENERATION} {by_name[GENERATION]} is not read: sampling is the target's own, or give it here")
    rest = [o for o in dict.fromkeys(o.name for o in made.options) if o.split(".")[0] not in READ]
    if "--config" in rest:
        notes.append("what --config FILE holds is not read")
        rest.remove("--config")
    keys = {key for o in made.options if o.name == ATTENTION for key in json_object(ATTENTION, o.value)}
    backends = {
        f"{ATTENTION}.backend",
        *([ATTENTION] if keys <= {"backend"} else []),
    }  # replaced by one that a format needs
    if left := [o for o in rest if o not in UNRELATED | backends]:
        notes.append(f"not taken over, and kept in the changed command: {' '.join(left)}")


def _limit(option: str, text: str | None, notes: list[str]) -> int | None:
    """A size as vLLM reads it: 8192, 8k (thousands, decimals allowed), 8K (of 1,024); None where it is vLLM's to choose."""
    if text in (None, "auto", "-1"):
        return None
    if "$" in text:
        notes.append(f"variables are not expanded: {option} {text} is not taken over")
        return None
    found = re.fullmatch(r"(\d{1,12})([KMGT]?)|(\d{1,12}(?:\.\d{1,12})?)([kmgt])", text.strip(), re.ASCII)
    value = int(float(found[1] or found[3]) * SCALE[found[2] or found[4] or ""]) if found else 0
    if value < 1:
        raise fail(f"{option} must be a whole number of at least 1, like 8192, 8k or 8K, not {text[:60]!r}")
    return value


def _take_version(made: ServeCommand, stated: str | None, image: str | None) -> None:
    if stated and image and not image.rsplit("/", 1)[-1].startswith(OWN_IMAGE) and not re.match(r"v?0\.", stated):
        made.notes.append(f"{stated} is not taken for vLLM's version: {image} is not its own image, {OWN_IMAGE}")
        return
    found = re.match(r"v?(\d{1,3})\.(\d{1,4})", stated or "")
    if found and int(found[1]):
        made.notes.append(f"vLLM {found[0]} is newer than any that specq was written against")
    if found and (int(found[1]), int(found[2])) >= OLDEST:
        made.taken["vllm_version"] = f"{int(found[1])}.{int(found[2])}"
    elif found:
        oldest = ".".join(map(str, OLDEST))
        made.notes.append(f"vLLM {found[0]} is older than {oldest}, the oldest one specq writes for")
