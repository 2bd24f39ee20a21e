"""A study that starts from a running server: its command line taken over, and given back changed.

    specq study --vllm-command "vllm serve TARGET --speculative-config '{...}' ..."      or a file that holds it

`specq.serve_command` reads the line; here it becomes study options, and a recommendation becomes a line again.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specq.config import StudyConfig, validated
from specq.errors import SpecqError
from specq.masking import masked_words
from specq.report.schema import VllmBlock
from specq.serve_command import (
    ATTENTION,
    BACKEND,
    FLAG,
    KV,
    LIMITS,
    OVERRIDE,
    SAMPLED,
    SEVERAL,
    SPEC_OPTIONS,
    SPECULATIVE,
    ServeCommand,
    fail,
    json_object,
    line_of,
    read,
)
from specq.shell_words import joined

LONGEST_FILE = 1 << 20
# What a server's command calls the study options whose values it may give.
WRITTEN = {"k_max": "num_speculative_tokens", "current_k": "num_speculative_tokens"}
WRITTEN |= {name: f"{OVERRIDE} {name}" for name in SAMPLED}
# What a recommendation decides anew; other keys of the user's speculative_config stay.
REPLACED = {"method", "num_speculative_tokens", "draft_sample_method", "kv_cache_dtype", "model",
            "num_speculative_tokens_per_batch_size", "prompt_lookup_min", "prompt_lookup_max"}  # fmt: skip


def text_of(given: str) -> str:
    """The command itself, or what the file of that name holds. Raises SpecqError for a file that cannot be read."""
    try:
        if not given.strip() or "\n" in given or not Path(given).is_file():
            if len(given.split()) == 1 and ("/" in given or Path(given).suffix):  # no command is one word
                raise fail(f"{given} is a directory" if Path(given).is_dir() else f"no such file: {given}")
            return given
        if Path(given).stat().st_size > LONGEST_FILE:
            raise fail(f"{given} is too large for a command line")
        return Path(given).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise fail(f"{given} is not UTF-8 text") from None
    except (OSError, ValueError):  # ValueError: a NUL in the path; OSError: too long for one, or not to be read
        return given


def study_options(text: str, options: Mapping[str, Any], dtypes: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(study options, formats) with what the command says where the user's own `options` and `dtypes` say nothing.

    Raises SpecqError where the server does not speculate and no draft is given.
    """
    command = read(text)
    taken, given = dict(command.taken), {k: v for k, v in options.items() if v is not None}
    ranks = taken.pop("tensor_parallel", 1)
    if "draft" not in taken and "draft" not in given:
        raise fail("this server does not speculate; name the draft model to consider with --draft")
    for role in ("target", "draft"):
        if role not in given and "$" in taken.get(role, ""):
            raise fail(f"variables are not expanded, and its {role} is {taken[role]}: give --{role}")
    if given.get("draft", taken.get("draft")) != "ngram":
        taken.pop("ngram", None)
    for name, limit in command.limits.items():
        taken[name] = tuple(dict.fromkeys(min(n, limit) for n in StudyConfig.model_fields[name].default))
    cost = given.get("cost", "roofline:h100")
    if ranks > 1 and re.match(r"roofline:(?!\d+x)", cost):
        given["cost"] = cost.replace("roofline:", f"roofline:{ranks}x", 1)
    merged = {**dict.fromkeys(options), **taken, **given, "vllm_command": joined(without_secrets(command))}
    if merged.get("k_max") is None and merged["current_k"] > 16:
        merged["k_max"] = merged["current_k"]
    _check(merged, given)
    if not dtypes:
        dtypes = [command.dtype] if command.dtype not in (None, "bf16") else ["fp8"]
    return merged, dtypes


def _check(merged: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises SpecqError, in the command's own words, for values that a study cannot have."""
    try:
        validated({name: merged[name] for name in WRITTEN if merged.get(name) is not None})
    except SpecqError as error:
        said, own = str(error), {*given, *(["k_max"] if "current_k" in given else [])}  # k_max follows current_k
        for name, written in WRITTEN.items():
            if name not in own:
                said = said.replace("--" + name.replace("_", "-"), written)
        raise (error if said == str(error) else fail(said)) from None


def notes(config: StudyConfig) -> list[str]:
    """What of the configuration's command was not taken over; nothing where there is none."""
    if config.vllm_command is None:
        return []
    command = read(config.vllm_command)
    said = []
    for name, limit in command.limits.items():
        if beyond := [n for n in getattr(config, name) if n > limit]:
            said.append(f"--{name} {','.join(map(str, beyond))} is beyond the {LIMITS[name]} {limit} of this server")
    longest = command.limits.get("context")
    if longest is not None and config.prompt_tokens + config.output_tokens > longest:
        said.append(
            f"texts of up to {config.prompt_tokens} + {config.output_tokens} tokens are scored (--prompt-tokens,"
            f" --output-tokens); this server takes {longest} (--max-model-len)"
        )
    if "vllm_version" not in command.taken and config.vllm_version == StudyConfig.model_fields["vllm_version"].default:
        said.append(
            f"it does not state vLLM's version: arguments are written for {config.vllm_version} (--vllm-version)"
        )
    return [*command.notes, *map(line_of, said)]


def without_secrets(command: ServeCommand) -> list[str]:
    """The words with keys and tokens replaced by variables: the command is kept in files that are passed on."""
    words, own = command.words, range(command.first, command.last)
    return masked_words(
        words,
        flag=lambda i: i in own and bool(FLAG.fullmatch(words[i])),
        several=lambda i: i in own and words[i].replace("_", "-") in SEVERAL,
    )


def own_command() -> str:
    """The command line of this process, without the secrets of a server's: what makes a result citable."""
    return shlex.join([Path(sys.argv[0]).name, *words_without_secrets(sys.argv[1:])])


def words_without_secrets(words: Sequence[str]) -> list[str]:
    """specq's own command line with what is kept of a --vllm-command in its place; the path of a file stays as it is."""
    out = list(words)
    for i, word in enumerate(out):
        name, equals, value = word.partition("=")
        if name != "--vllm-command":
            continue
        if equals:
            out[i] = f"{name}={_kept(value)}"
        elif i + 1 < len(out):
            out[i + 1] = _kept(out[i + 1])
    return out


def _kept(given: str) -> str:
    try:
        return given if text_of(given) != given else joined(without_secrets(read(given)))
    except SpecqError:  # no command, such as a file that is gone by now, or one that a later --vllm-command overrides
        return "..."


def changed(text: str, block: VllmBlock) -> tuple[str, str]:
    """(the command as it is, the command with what `block` recommends), each in one line."""
    command = read(text)
    config = None
    if block.speculative_config is not None:
        own = {k: v for k, v in command.speculative.items() if k not in REPLACED}
        config = own | block.speculative_config
        if command.speculative.get("model") and block.speculative_config.get("method") == "draft_model":
            config["model"] = command.speculative["model"]  # in the user's own words
    arguments = block.serve_args
    backend = arguments[arguments.index(BACKEND) + 1] if BACKEND in arguments else None
    fresh = [KV, arguments[arguments.index(KV) + 1]]
    if backend:
        fresh += [BACKEND, backend]
    if config:
        fresh += [SPECULATIVE, json.dumps(config)]
    out = {KV, SPECULATIVE, *SPEC_OPTIONS} | ({BACKEND, f"{ATTENTION}.backend"} if backend else set())
    dropped: set[int] = set()
    words = list(command.words)
    for option in command.options:
        if option.name in out or option.name.startswith(SPECULATIVE + "."):
            dropped |= set(range(option.start, option.end))
        elif option.name == ATTENTION and backend and option.value:  # refused beside --attention-backend
            kept = {k: v for k, v in json_object(ATTENTION, option.value).items() if k != "backend"}
            if not kept:
                dropped |= set(range(option.start, option.end))
            one_word = option.end - option.start == 1
            words[option.end - 1] = f"{ATTENTION}={json.dumps(kept)}" if one_word else json.dumps(kept)
    middle = [words[i] for i in range(command.first, command.last) if i not in dropped]
    after = [*words[: command.first], *middle, *fresh, *words[command.last :]]
    return joined(command.words), joined(after)
