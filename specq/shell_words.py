"""Shell text split into words that remember how they were written: read by value, given back as they were.

As in bash: quoting, `$'...'`, comments, operators, and as parts of words `$(...)`, `${...}`, backticks, `<(...)`, arrays.
Nothing is executed and nothing expanded: `$X` and `$(pwd)` are text. `shlex` forgets the spelling, without which `'$(pwd)'`
and `$(pwd)` are the same, and takes a `#` within a word for a comment.
"""

import re
import shlex
from collections.abc import Iterable, Iterator

# A line that goes on in the next one, also with blanks or a comment behind its backslash, as pasted lines have.
CONTINUED = re.compile(r"\\(?:(?:[ \t\r]+(?:#[^\n]*)?)?\n|\Z)")
# At the start of a word: a comment that has its line to itself (a command goes on behind it), blanks, that, a comment.
SKIPPED = re.compile(rf"(?:(?<=\n)|\A)[ \t\r]*#[^\n]*(?:\n|\Z)|[ \t\r]+|{CONTINUED.pattern}|#[^\n]*")
OPERATOR = re.compile(
    r"\n|&&|\|\||\|&|;;&?|;&|&>>?|(?![<>]\()\d*(?:[<>]&(?:\d+|-)?|<<<|<<-?|<>|>>|>\||[<>])|[;&|()]", re.ASCII
)
PLAIN = re.compile(r"[^ \t\r\n\\'\"`$|&;()<>=]+|=(?!\()|\$(?![({'\"])")
CLOSED_BY = {"(": ")", "{": "}", "'": "'", '"': '"', "`": "`"}
ANSI_C = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
VARIABLE = re.compile(r"\$(?:\w+|\{\w+(?::?\?[^{}$`'\"\\]*)?\})")  # also `${X:?what is said where there is none}`
LITERAL = "\ufdd0"  # no character of any text: a `$` that does not expand
# Behind these a command begins, on the same line or the next one.
OPENING = {"&&", "||", "|", "|&", ";", ";;", "&", "("}
RESERVED = {"{", "then", "do", "else", "elif", "if", "while", "until", "!"}


class Word(str):
    """A word's value: quotes removed, expansions as written. `raw` is its spelling, `operator` whether it is one.

    `marked` is the value with LITERAL for each `$` that does not expand.
    """

    marked: str
    raw: str
    operator: bool

    def __new__(cls, marked: str, raw: str, operator: bool = False) -> "Word":
        made = super().__new__(cls, marked.replace(LITERAL, "$"))
        made.marked, made.raw, made.operator = marked, raw, operator
        return made


def split(text: str) -> list[Word]:
    """The words of a script in one line: a line's end is a `;` where a command ends there.

    A line that starts with an option belongs to the one before, backslash or not. Raises ValueError for what is not closed.
    """
    words: list[Word] = []
    broken = False
    for word in tokens(re.sub(r"\r+\n", "\n", text.replace(LITERAL, ""))):
        if word.raw == "\n":
            broken = True
            continue
        continues = word.startswith("-") or (word.operator and word.raw != "(")
        if broken and words and not continues and not _opens(words):
            words.append(Word(";", ";", True))
        words.append(word)
        broken = False
    return words


def _opens(words: list[Word]) -> bool:
    last = words[-1]
    if last.operator:
        return last.raw in OPENING
    return last.raw in RESERVED and (len(words) == 1 or words[-2].operator)


def tokens(text: str) -> Iterator[Word]:
    """The words, and each line's end as an operator. Raises ValueError for what is not closed."""
    at = 0
    while at < len(text):
        if skipped := SKIPPED.match(text, at):
            at = skipped.end()
        elif found := OPERATOR.match(text, at):
            at = found.end()
            yield Word(found[0], found[0], True)
        else:
            word, at = _word(text, at)
            yield word


def _word(text: str, at: int) -> tuple[Word, int]:
    """The word at `at`, and the index behind it."""
    parts: list[str] = []
    spelt: list[str] = []
    start, before = at, False
    while at < len(text):
        quoted = text[at] in "\\'\"" or text.startswith(("$'", '$"'), at)
        if plain := PLAIN.match(text, at):
            part, end = plain[0], plain.end()
        elif text[at] == "\\":
            if re.compile(r"\\\n[^\s#-]").match(
                text, at
            ):  # one word over two lines; pasted options and comments are not
                at += 2
                continue
            if CONTINUED.match(text, at):
                break
            part, end = text[at + 1].replace("$", LITERAL), at + 2
        elif text[at] == "'":
            end = _close(text, at)
            part = text[at + 1 : end - 1].replace("$", LITERAL)
        elif text.startswith("$'", at):
            found = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(text, at)
            if not found:
                raise ValueError("no closing '")
            part = re.sub(r"\\(.)", lambda m: ANSI_C.get(m[1], m[0]), found[1], flags=re.DOTALL).replace("$", LITERAL)
            end = found.end()
        elif text.startswith(('"', '$"'), at):
            opening = at + (text[at] == "$")
            end = _close(text, opening)
            part = re.sub(
                r"\\([\"\\$`]|\n)", lambda m: m[1].strip("\n").replace("$", LITERAL), text[opening + 1 : end - 1]
            )
        elif text[at] == "`":
            end = _close(text, at)
            part = text[at:end]
        elif text.startswith(("$(", "${", "=("), at) or (at == start and text.startswith(("<(", ">("), at)):
            end = _close(text, at + 1)
            part = text[at:end]
        else:
            break
        if (quoted or before) and re.match(r"\w", part):  # $X"y" is not $Xy
            tail = "".join(parts[-2:])
            if variable := re.search(r"\$(\w+)\Z", tail):
                parts[-2:] = [f"{tail[: variable.start()]}${{{variable[1]}}}"]
        parts.append(part)
        spelt.append(text[at:end])
        at, before = end, quoted
    return Word("".join(parts), "".join(spelt)), at


def _close(text: str, at: int) -> int:
    """Index behind what closes the quote or bracket at `at`; quotes and substitutions nest within it."""
    awaited = [CLOSED_BY[text[at]]]
    at += 1
    while awaited:
        if at >= len(text):
            raise ValueError(f"no closing {awaited[-1]}")
        mark, within = text[at], awaited[-1]
        if mark == within:
            awaited.pop()
        elif within == "'":
            pass
        elif mark == "\\":
            at += 1
        elif within != "`" and mark == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at += 1
            awaited.append(CLOSED_BY[text[at]])
        elif (within != '"' and mark in "'\"") or (within in '"})' and mark == "`") or (within == ")" and mark == "("):
            awaited.append(CLOSED_BY[mark])
        at += 1
    return at


def joined(words: Iterable[str]) -> str:
    """Words as one line: those of `split` as they were written, others quoted so that their variables stay expandable."""
    return " ".join(word.raw if isinstance(word, Word) else quoted(word) for word in words)


def quoted(word: str) -> str:
    """A word in quotes where it needs some; double ones where it has variables, which stay expandable. LITERAL does not."""
    if re.fullmatch(r"~/[\w@%+=:,./-]*", word):
        return word
    name, value = re.fullmatch(r"(-{0,2}[A-Za-z_][\w.-]*=(?=.))?(.*)", word, re.DOTALL).groups(default="")
    rest = VARIABLE.sub("", value)
    if rest == value or re.search(r"[$`!]", rest):
        return (name + shlex.quote(value)).replace(LITERAL, "$")
    if not re.search(r"[^\w@%+=:,./-]", rest):
        return word
    return name + '"' + re.sub(r'(["\\])', r"\\\1", value).replace(LITERAL, r"\$") + '"'
