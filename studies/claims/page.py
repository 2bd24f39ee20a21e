"""The page of the claims, written from claims.json alone."""

from pathlib import Path

from studies.common.command import read_results
from studies.common.results import machine_line, markdown

TITLE = "# Common claims, put to the test\n"
ABOUT = """What is commonly said about 8-bit KV caches and speculative decoding, beside what specq measures. The claims and
their numbers are given as they commonly go round, in our words; none is quoted from a particular source or held against one.

*Accepted* counts drafted tokens (mu, 0..K per cycle); intervals are 95 %, those of acceptance paired and clustered by
document. *Confirmed*: it held in every case looked at; *not confirmed here*: in none; *depends*: in some. *Where resolved*:
some cases were undecided and are not counted.

Acceptance is measured on small pairs (22 M and 270 M parameters) on a CPU, so nothing here says what a 70 B model's
acceptance does. Sizes of large models' caches are closed forms. Their speeds come from step times that were measured on a GPU
where there are any, and else from a roofline; each row says which, and the note below its table says what was assumed.
"""


def text(results: dict) -> str:
    """README.md of the page."""
    out = [TITLE, ABOUT, "Made by `make claims`: " + machine_line(results["environment"]) + "\n"]
    out += [f"Not made: {n['name']}, {n['about']} ({n['why']}).\n" for n in results["not_made"]]
    out += ["| | claim | verdict |", "| --- | --- | --- |"]
    out += [f"| [{c['key']}](#{c['key']}) | {c['claim']} | **{c['verdict']}** |" for c in results["claims"]]
    for claim in results["claims"]:
        out.append(f'\n<a id="{claim["key"]}"></a>\n## ({claim["key"]}) {claim["claim"]}\n')
        out.append(f"**{claim['verdict'].capitalize()}.** {claim['because']}\n")
        out += [markdown(table) for table in claim["tables"]]
    return "\n".join(out).rstrip() + "\n"


def write_page(folder: Path) -> None:
    """Write README.md beside claims.json."""
    (folder / "README.md").write_text(text(read_results(folder, "claims")))
