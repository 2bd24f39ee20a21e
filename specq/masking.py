"""Keys and tokens of a command line replaced by variables. What is secret, a name says; one rule for names of every kind.

`HF_TOKEN=...`, `--x.api_key ...`, `"apiKey": "..."`, `api-key: ...`: the value of a name that has a word like token, key,
secret or password in it, in the singular (`max_tokens` are counts), unless it says something else about one
(`bos_token_id`, `KEY_FILE`). A variable alone stays, anything beside it does not. Beyond names, passwords in addresses.
What is around a value stays, but for the rest of its word behind a header's `name:` and where the name starts the word.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from specq.shell_words import LITERAL, VARIABLE, Word, joined, split, tokens

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
# quoted script `--name value`. `before` and `opening` are quotes around name and value, and around the value.
NAMED = re.compile(
    r"""(?<![\w./-])(?!(?<=\$\{)\w+:?\?)(?P<before>["']?)(?:-e(?=[A-Z_]\w*=))?
        (?:(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?P<after>\\*["']?)\s*(?P<sign>=|:(?!/))\s*(?P<opening>\\*["']?)
          |(?P<option>--?[A-Za-z][\w.-]*|bearer)\s+(?![-\s]))""",
    re.VERBOSE | re.IGNORECASE,
)
# A value within a script: up to a blank that is not in quotes, without what closes a list or ends a command there.
VALUE = re.compile(
    r"""(?:(?:bearer|basic|token)\s+)?
        (?:\\.|\$\{\w+\}|"(?:\\.|[^"\\])*(?:"|\Z)|'[^']*(?:'|\Z)|[^\s\\"');\]},]|[);\]},](?![);\]},]*(?:\s|\Z)))*""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
# What stands before the last @ of a word. Passwords may have a slash or an @ in them; of http's, a path and a port have none.
BEFORE_AT = re.compile(r"(?<!\S)\S+(?=@)")
ADDRESS = re.compile(
    r"((?<!http)(?<!https)://[^\s/:@]*:)(.+)|(https?://(?:[^\s/:@]*:)?)([^\s/]+)(?=@|\Z)"
    r"|(https?://[^\s/:@]*:(?!\d{1,5}(?:[/,;]|\Z)))(.+)"
)
# What stays: a variable, with a header's scheme before it.
VARIABLE_ALONE = re.compile(rf"(?:bearer\s+)?{VARIABLE.pattern}", re.IGNORECASE)
DEFAULT = re.compile(r"\$\{(\w+):?[-=+][^{}]*\}")  # `${NAME:-value}`
ARRAY = re.compile(r"((\w+)\+?=)\((.*)\)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether what has this name, or lies below it (`credentials.github`), is not to be passed on."""
    parts = ("_".join(NAME_WORDS.findall(part)).lower() for part in name.split("."))
    return any(SECRET.search(part) and not ABOUT_ONE.search(part) for part in parts)


def variable(name: str) -> str:
    """The variable that stands for the secret of that name."""
    return "$" + re.sub(r"\W+", "_", name.rstrip(".").rpartition(".")[2]).strip("_").upper()


def masked_words(
    words: Sequence[Word],
    flag: Callable[[int], bool] = lambda i: False,
    several: Callable[[int], bool] = lambda i: False,
) -> list[str]:
    """The words, the same ones where nothing in them is a secret; `flag` and `several` say of options what values they have."""
    made: list[str] = []
    while (start := len(made)) < len(words):
        made.append(masked(words[start]))
        if flag(start) or not awaits_secret(words[start], words[start - 1] if start else ""):
            continue
        for word in words[start + 1 : None if several(start) else start + 2]:
            if word.operator or word.startswith("-"):
                break
            made.append(masked_value(words[start], word))
    return made


def masked(word: Word) -> str:
    """The word, the same one where nothing in it is a secret."""
    if array := ARRAY.fullmatch(word.raw):
        return _array(word, *array.groups())
    made = _text(word.marked)
    if made == word.marked:
        return word
    if word.raw == word.marked:  # nothing is quoted, so neither is what is made, such as $(curl --token $TOKEN)
        try:
            again = split(made)
        except ValueError:
            return made
        if [w.raw for w in again] == [made]:
            return again[0]
    return made


def _array(word: Word, head: str, name: str, inner: str) -> Word:
    try:
        words = [w for w in tokens(inner) if not w.operator]
        made = [masked_value(name, w) for w in words] if is_secret(name) else masked_words(words)
    except ValueError:  # quotes within comments
        made = [Word(text := f'"${{{name}[@]}}"', text)]
    else:
        if all(a is b for a, b in zip(made, words, strict=True)):
            return word
    raw = f"{head}({joined(made)})"
    return Word(raw, raw)


def awaits_secret(word: Word, before: str) -> bool:
    """Whether the word behind this one is a secret by this one's name; `before` is the word ahead of it."""
    return bool(AWAITS.fullmatch(word) or before == "setenv") and is_secret(word)


def masked_value(name: str, word: Word) -> str:
    """The word as the value of a secret's name."""
    return word if VARIABLE_ALONE.fullmatch(word.marked) else variable(name)


def _text(text: str) -> str:
    inner = re.match(r"(?:-{0,2}[\w.-]+=)?(?=\s*[{\[])", text)  # JSON, by itself or as a value
    if inner and not (inner[0] and is_secret(inner[0])):
        try:
            return inner[0] + _json(text[inner.end() :])
        except (ValueError, RecursionError):
            pass
    text = BEFORE_AT.sub(lambda run: ADDRESS.sub(_password, run[0]), text)
    text = DEFAULT.sub(lambda m: f"${{{m[1]}}}" if is_secret(m[1]) else m[0], text)
    made, done, at = "", 0, 0
    while found := NAMED.search(text, at):
        at = found.end()
        name = found["name"] or found["option"]
        quote = found["opening"] or (not found["after"] and found["before"]) or ""
        begin = found.start("opening") if found["opening"] else found.start() if quote else at
        end = VALUE.match(text, begin).end()
        if found["name"] and re.fullmatch(
            r"(?:-[\w-]+=)?", text[: found.start()]
        ):  # the word is this, also --env=NAME=
            end = len(text)
        elif (
            not quote and found["sign"] == "=" and not re.search(r"\s", text[: found.start()])
        ):  # a=b,NAME=, no script so far
            end = max(end, re.compile(r".*?(?=\s+-|\Z)", re.DOTALL).match(text, at).end())
        elif "\\" in quote:  # where such a value ends, who knows
            quote, end = "", len(text)
        if end <= at or not is_secret(name):
            continue
        if VARIABLE_ALONE.fullmatch(text[at:end].strip("\"'")):
            at = end
            continue
        if not quote and (found["sign"] == ":" or name.lower().endswith("authorization")):
            end = len(text)  # a header
        made += text[done:at] + variable(name) + quote
        done = at = end
    return made + text[done:]


def _password(found: re.Match[str]) -> str:
    before, password = (part for part in found.groups() if part is not None)
    return found[0] if VARIABLE.fullmatch(password) else f"{before}$PASSWORD"


def _json(text: str) -> str:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        said = next((v for k, v in found if k == "name" and isinstance(v, str) and is_secret(v)), None)
        names = {key: said if said and key == "value" else key for key, _ in found}  # {"name": "A_KEY", "value": ...}
        return {key: _hidden(names[key], value) if is_secret(names[key]) else _seen(value) for key, value in found}

    def _hidden(key: str, value: Any) -> Any:  # noqa: ANN401 - of JSON
        if isinstance(value, dict):
            return {k: _hidden(key, v) for k, v in value.items()}
        if isinstance(value, list):
            return [_hidden(key, v) for v in value]
        if value is None or isinstance(value, bool) or VARIABLE_ALONE.fullmatch(str(value)):
            return value
        return variable(key)

    def _seen(value: Any) -> Any:  # noqa: ANN401 - objects in it are done by then
        if isinstance(value, list):
            return [_seen(v) for v in value]
        return _text(value) if isinstance(value, str) else value

    made = _seen(json.loads(text, object_pairs_hook=pairs))
    return text if made == json.loads(text) else json.dumps(made).replace(r"\ufdd0", LITERAL)
