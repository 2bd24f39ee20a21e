"""Keys and tokens of a command line replaced by variables. What is secret, a name says; one rule for names of every kind.

`HF_TOKEN=...`, `--x.api_key ...`, `"apiKey": "..."`, `api-key: ...`: the value of a name that has a word like token, key,
secret or password in it, in the singular (`max_tokens` are counts), unless it says something else about one
(`bos_token_id`, `KEY_FILE`). A variable alone stays, anything beside it does not. Beyond names, passwords in addresses.
"""

import json
import re
from typing import Any

from specq.shell_words import VARIABLE, Word

NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
SECRET = re.compile(
    r"(?:^|_)(?:[a-z]*(?:token|secrets?|passw(?:or)?ds?|passphrase|credentials?)|(?:api|auth|access|secret|private)_?keys?|key(?=_?\d*$)"
    r"|(?:ssh)?pass|pwd|auth|authorization|bearer|jwt)(?:_|$)"
)
ABOUT_ONE = re.compile(
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|image|audio|video|start|end|stop|bo[ai]|eo[ai])_token$"
    r"|token_(?:ids?|index|threshold|tree|budget|limit|size|length)$|_(?:file|path|dir|name|type|mode|method|url|config|env|stdin)$"
)
# A word whose value is the next one: an option, YAML's `name:`, csh's `setenv NAME` (in two words).
AWAITS = re.compile(r"--?[A-Za-z][\w.-]*|[A-Za-z_][\w.-]*:|bearer", re.IGNORECASE)
# A name and what stands between it and its value, anywhere in a word: `NAME=` (docker's -eNAME= too), `"NAME": `, and in a
# quoted script `--name value`.
NAMED = re.compile(
    r"""(?<![\w./-])(?:-e(?=[A-Z_]\w*=))?
        (?:(?P<name>-{0,2}[A-Za-z_][\w.-]*)\\*["']?\s*(?:=|:(?!/))\s*\\*["']?
          |(?P<option>--?[A-Za-z][\w.-]*|bearer)\s+(?![-\s]))""",
    re.VERBOSE | re.IGNORECASE,
)
ADDRESS = re.compile(r"(https?://(?:[^\s/:@]*:)?|://[^\s/:@]*:)([^\s/@]+)(?=@)")
# What stays: a variable, with a header's scheme before it.
VARIABLE_ALONE = re.compile(rf"(?:bearer\s+)?{VARIABLE.pattern}", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether what has this name, or lies below it (`credentials.github`), is not to be passed on."""
    parts = ("_".join(NAME_WORDS.findall(part)).lower() for part in name.split("."))
    return any(SECRET.search(part) and not ABOUT_ONE.search(part) for part in parts)


def variable(name: str) -> str:
    """The variable that stands for the secret of that name."""
    return "$" + re.sub(r"\W+", "_", name.rstrip(".").rpartition(".")[2]).strip("_").upper()


def masked(word: Word) -> str:
    """The word, the same one where nothing in it is a secret."""
    made = _text(word, _expands(word))
    return word if made == word else made


def awaits_secret(word: Word, before: str) -> bool:
    """Whether the word behind this one is a secret by this one's name; `before` is the word ahead of it."""
    return bool(AWAITS.fullmatch(word) or before == "setenv") and is_secret(word)


def masked_value(name: str, word: Word) -> str:
    """The word as the value of a secret's name."""
    return word if _expands(word) and VARIABLE_ALONE.fullmatch(word) else variable(name)


def _expands(word: Word) -> bool:
    return not re.search(r"'|\\\$", word.raw)  # else a $ may be a password's own


def _text(text: str, expands: bool) -> str:
    inner = re.match(r"(?:-{0,2}[\w.-]+=)?(?=\s*[{\[])", text)  # JSON, by itself or as a value
    if inner and not (inner[0] and is_secret(inner[0])):
        try:
            return inner[0] + _json(text[inner.end() :], expands)
        except (ValueError, RecursionError):
            pass
    text = ADDRESS.sub(lambda m: m[0] if expands and VARIABLE.fullmatch(m[2]) else f"{m[1]}$PASSWORD", text)
    for found in NAMED.finditer(text):
        name, value = found["name"] or found["option"], text[found.end() :]
        if value and is_secret(name) and not (expands and VARIABLE_ALONE.fullmatch(value)):
            return text[: found.end()] + variable(name)  # the rest of the word with it: where a value ends, who knows
    return text


def _json(text: str, expands: bool) -> str:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        said = next((v for k, v in found if k == "name" and isinstance(v, str) and is_secret(v)), None)
        names = {key: said if said and key == "value" else key for key, _ in found}  # {"name": "A_KEY", "value": ...}
        return {key: _hidden(names[key], value) if is_secret(names[key]) else _seen(value) for key, value in found}

    def _hidden(key: str, value: Any) -> Any:  # noqa: ANN401 - of JSON
        if isinstance(value, dict):
            return {k: _hidden(key, v) for k, v in value.items()}
        if isinstance(value, list):
            return [_hidden(key, v) for v in value]
        if value is None or isinstance(value, bool) or (expands and VARIABLE_ALONE.fullmatch(str(value))):
            return value
        return variable(key)

    def _seen(value: Any) -> Any:  # noqa: ANN401 - objects in it are done by then
        if isinstance(value, list):
            return [_seen(v) for v in value]
        return _text(value, expands) if isinstance(value, str) else value

    made = _seen(json.loads(text, object_pairs_hook=pairs))
    return text if made == json.loads(text) else json.dumps(made)
