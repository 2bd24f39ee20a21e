"""Make the text of the tiny pair: corpus, train/validation split, tokenizer and held-out documents.

Four steps, each a subcommand, all writing to one folder OUT:

  collect    unpacked Debian packages and Python sources -> corpus.jsonl
  split      corpus.jsonl -> train.xz, val.xz (text for train.py) and rest.jsonl (documents beyond the cap)
  tokenizer  train.xz -> tokenizer/ (byte-level BPE)
  heldout    rest.jsonl -> heldout.jsonl.xz (evaluation documents)

`all` runs the four in order and `packages` prints the names of the packages.
A corpus.jsonl line is {"group": "docs" or "code", "text": str}; train.xz and val.xz are xz-compressed UTF-8
text in which NUL separates documents.
"""

import argparse
import json
import lzma
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from plain_text import package_files, package_texts, python_texts
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PACKAGES = (
    "bash-doc", "cmake-doc", "cppreference-doc-en-html", "debian-handbook", "debian-policy",
    "debian-reference-en", "developers-reference", "dict-gcide", "erlang-doc", "git-doc", "jargon-text",
    "libreoffice-help-en-us", "linux-doc-6.1", "manpages", "manpages-dev", "nodejs-doc", "openjdk-17-doc",
    "perl-doc", "postgresql-doc-15", "python3.11-doc", "rust-doc", "sqlite3-doc", "wordnet-base",
)  # fmt: skip

# Most characters taken from one package, and from all Python sources together.
PACKAGE_CAP = 40_000_000
PACKAGE_CAPS = {
    "erlang-doc": 30_000_000,
    "linux-doc-6.1": 80_000_000,
    "openjdk-17-doc": 50_000_000,
    "rust-doc": 60_000_000,
}
PYTHON_CAP = 90_000_000

DEDUP_CHARS = 2_000  # two documents with the same beginning of this length count as one
CUT_CHARS = 400_000  # per document
CORPUS_CHARS = 300_000_000
VAL_DOCS = 120

VOCAB_SIZE = 8192
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2
TOKENIZER_STRIDE = 5  # the BPE sees every fifth training document
MODEL_MAX_LENGTH = 8192
SPLIT_PATTERN = r"\p{N}{1,3}| ?\p{L}+| {2,}(?=\S)|\s+|[^\s\p{L}\p{N}]+"

HELDOUT_DOCS = 342
HELDOUT_CHARS = (9_000, 42_000)  # shorter documents are passed over, longer ones are cut


def take(texts: Iterable[str], seen: set[int], cap: int) -> Iterator[str]:
    """Pass on texts not seen before, until more than `cap` characters have passed; adds to `seen`."""
    total = 0
    for text in texts:
        key = hash(text[:DEDUP_CHARS])
        if key in seen:
            continue
        seen.add(key)
        yield text
        total += len(text)
        if total > cap:
            return


def collect(out: Path, packages: Path, python_dirs: list[Path]) -> None:
    """Write corpus.jsonl from a folder of unpacked packages and from folders of Python sources."""
    rng = random.Random(0)
    seen: set[int] = set()
    python_files = sorted(path for folder in python_dirs for path in folder.rglob("*.py"))
    folders = sorted(path for path in packages.iterdir() if path.is_dir())
    sources = [("docs", folder.name, package_files(folder)) for folder in folders]
    sources.append(("code", "python", python_files))
    with (out / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
        for group, name, files in sources:
            rng.shuffle(files)
            texts = package_texts(files) if group == "docs" else python_texts(files)
            cap = PACKAGE_CAPS.get(name, PACKAGE_CAP) if group == "docs" else PYTHON_CAP
            chars = 0
            for text in take(texts, seen, cap):
                corpus.write(json.dumps({"group": group, "text": text.replace("\0", "")}) + "\n")
                chars += len(text)
            print(f"{name}: {chars / 1e3:.0f} thousand characters", file=sys.stderr)


def write_documents(path: Path, documents: Iterable[dict[str, str]]) -> None:
    """Write the documents' texts as NUL-separated xz text."""
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write("\0".join(document["text"] for document in documents))


def split(out: Path, corpus_chars: int, val_docs: int) -> None:
    """Shuffle corpus.jsonl, cut long documents, and write val.xz, train.xz and rest.jsonl."""
    with (out / "corpus.jsonl").open(encoding="utf-8") as corpus:
        documents = [json.loads(line) for line in corpus]
    random.Random(1).shuffle(documents)
    total = kept = 0
    for document in documents:
        document["text"] = document["text"][:CUT_CHARS]
        total += len(document["text"])
        kept += total <= corpus_chars
    if kept <= val_docs:
        sys.exit(f"only {kept} documents: none left to train on after {val_docs} for validation")
    write_documents(out / "val.xz", documents[:val_docs])
    write_documents(out / "train.xz", documents[val_docs:kept])
    with (out / "rest.jsonl").open("w", encoding="utf-8") as rest:
        rest.writelines(json.dumps(document) + "\n" for document in documents[kept:])
    print(f"{kept} of {len(documents)} documents within {corpus_chars} characters", file=sys.stderr)


def new_tokenizer() -> Tokenizer:
    """An untrained byte-level BPE that splits numbers into up to three digits and puts <|bos|> first."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    return tokenizer


def train_tokenizer(out: Path, vocab_size: int) -> None:
    """Train the BPE on every fifth document of train.xz and save it, in transformers' form, as tokenizer/."""
    from transformers import PreTrainedTokenizerFast  # slow to import, and needed by this step alone

    with lzma.open(out / "train.xz", "rt", encoding="utf-8") as file:
        documents = file.read().split("\0")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer = new_tokenizer()
    tokenizer.train_from_iterator(documents[::TOKENIZER_STRIDE], trainer)
    bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        model_max_length=MODEL_MAX_LENGTH,
    )
    wrapped.save_pretrained(out / "tokenizer")
    print(f"tokenizer: {len(wrapped)} tokens", file=sys.stderr)


def heldout(out: Path, count: int, min_chars: int, max_chars: int) -> None:
    """Write heldout.jsonl.xz: up to `count` documents of rest.jsonl, each with id, group and text."""
    with (out / "rest.jsonl").open(encoding="utf-8") as rest:
        documents = [json.loads(line) for line in rest]
    chosen = [document for document in documents if len(document["text"]) >= min_chars][:count]
    with lzma.open(out / "heldout.jsonl.xz", "wt", encoding="utf-8") as file:
        for number, document in enumerate(chosen):
            text = document["text"][:max_chars]
            record = {"id": f"h{number:04d}", "group": document["group"], "text": text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    print(f"heldout: {len(chosen)} documents", file=sys.stderr)


def parse_args() -> argparse.Namespace:
    """Command line: a subcommand, and the options of the steps that it runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("packages", help="print the Debian packages, one per line")
    for name in ("collect", "split", "tokenizer", "heldout", "all"):
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("out", type=Path, help="folder of the results")
        if name in ("collect", "all"):
            command.add_argument("packages", type=Path, help="folder with one subfolder per unpacked package")
            command.add_argument("python_dirs", type=Path, nargs="*", help="folders of Python sources")
        if name in ("split", "all"):
            command.add_argument("--corpus-chars", type=int, default=CORPUS_CHARS, help="characters kept")
            command.add_argument("--val-docs", type=int, default=VAL_DOCS, help="validation documents")
        if name in ("tokenizer", "all"):
            command.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="tokens, specials included")
        if name in ("heldout", "all"):
            command.add_argument("--heldout-docs", type=int, default=HELDOUT_DOCS, help="most documents")
            command.add_argument("--min-chars", type=int, default=HELDOUT_CHARS[0], help="shortest document")
            command.add_argument("--max-chars", type=int, default=HELDOUT_CHARS[1], help="documents are cut here")
    return parser.parse_args()


def main() -> None:
    """Run the chosen step, or all of them."""
    args = parse_args()
    if args.command == "packages":
        print("\n".join(PACKAGES))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.command in ("collect", "all"):
        collect(args.out, args.packages, args.python_dirs)
    if args.command in ("split", "all"):
        split(args.out, args.corpus_chars, args.val_docs)
    if args.command in ("tokenizer", "all"):
        train_tokenizer(args.out, args.vocab_size)
    if args.command in ("heldout", "all"):
        heldout(args.out, args.heldout_docs, args.min_chars, args.max_chars)


if __name__ == "__main__":
    main()
