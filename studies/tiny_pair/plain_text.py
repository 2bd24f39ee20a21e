"""Find documentation and Python files and turn them into plain text (used by build_corpus.py)."""

import gzip
import html
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

MIN_DOC_CHARS = 600
PYTHON_CHARS = (800, 200_000)  # a Python file is kept when its length lies strictly between these
JUNK_WINDOW, MAX_JUNK = 4_000, 40  # characters looked at, and unwanted ones allowed among them

HTML_SUFFIXES = (".html", ".htm", ".xhp")
TEXT_SUFFIXES = (*HTML_SUFFIXES, ".txt", ".rst", ".pod", ".md")
PLAIN_PACKAGES = ("dict-gcide", "jargon-text", "wordnet-base")  # every file of these is tried as text
SKIPPED_PREFIXES = ("changelog", "copyright", "search", "genindex")

MAN_PAGE = re.compile(r"\.[1-8]$")
MAN_REQUEST = re.compile(r"^[.'][A-Za-z\\\"]+ ?", re.M)
MAN_ESCAPE = re.compile(r"\\f.|\\&|\\-")
HTML_HIDDEN = re.compile(r"<(script|style|head|nav)\b.*?</\1>|<!--.*?-->", re.S | re.I)
HTML_BLOCK = re.compile(r"</?(p|div|li|h\d|tr|br|dt|dd|pre|table|ul|ol|section)\b[^>]*>", re.I)
HTML_TAG = re.compile(r"<[^>]+>")


def strip_html(text: str) -> str:
    """Drop markup and hidden parts; block elements become line breaks."""
    text = HTML_HIDDEN.sub(" ", text)
    text = HTML_BLOCK.sub("\n", text)
    return html.unescape(HTML_TAG.sub("", text))


def strip_man(text: str) -> str:
    """Drop roff requests at line starts and the common inline escapes."""
    text = MAN_REQUEST.sub("", text)
    return MAN_ESCAPE.sub(lambda match: "-" if match.group() == r"\-" else "", text)


def plain_name(path: Path) -> str:
    """File name without a .gz ending."""
    return path.stem if path.suffix == ".gz" else path.name


def read_document(path: Path) -> str:
    """Plain text of one documentation file (UTF-8, else Latin-1; gzip allowed)."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    name = plain_name(path)
    if name.endswith(HTML_SUFFIXES):
        text = strip_html(text)
    elif MAN_PAGE.search(name):
        text = strip_man(text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_junk(text: str) -> bool:
    """Whether the beginning holds many control characters or characters above U+2FFF (binary data, CJK)."""
    start = text[:JUNK_WINDOW]
    unwanted = sum(ord(char) > 0x2FFF or (ord(char) < 32 and char not in "\n\t") for char in start)
    return unwanted > MAX_JUNK


def wanted(path: Path, package: str) -> bool:
    """Whether a package's file is documentation text, by its name."""
    name = plain_name(path)
    if name.startswith(SKIPPED_PREFIXES):
        return False
    if package == "python3.11-doc" and not (path.name.endswith(".txt") or path.suffix == ".rst"):
        return False
    if package == "linux-doc-6.1":
        if not (".rst" in path.name or ".txt" in path.name or path.name.endswith(".html")):
            return False
    return name.endswith(TEXT_SUFFIXES) or bool(MAN_PAGE.search(name)) or package in PLAIN_PACKAGES


def package_files(folder: Path) -> list[Path]:
    """The wanted regular files of one unpacked package, in sorted order."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in files if wanted(path, folder.name))


def package_texts(files: Iterable[Path]) -> Iterator[str]:
    """Texts of documentation files that can be read, are long enough and are not junk."""
    for path in files:
        try:
            text = read_document(path)
        except (OSError, EOFError, ValueError, zlib.error):
            continue
        if len(text) >= MIN_DOC_CHARS and not is_junk(text):
            yield text


def python_texts(files: Iterable[Path]) -> Iterator[str]:
    """Texts of Python files that can be read and have a fitting length."""
    for path in files:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        if PYTHON_CHARS[0] < len(text) < PYTHON_CHARS[1]:
            yield text
