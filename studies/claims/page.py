"""The page of the claims, written from claims.json alone."""

from pathlib import Path

from studies.common.command import read_results
from studies.common.results import machine_line, markdown

TITLE = "# Published claims, put to the test\n"
ABOUT = """What is commonly written about 8-bit KV caches and speculative decoding, beside what specq measures. *Accepted*
counts drafted tokens (mu, 0..K per cycle); intervals are 95 %, paired and clustered by document. *Confirmed*: it held in
every case looked at; *not confirmed here*: in none; *depends*: in some. The pairs are small (22 M and 270 M parameters) and
run on a CPU, so nothing here says what a 70 B model's acceptance does; sizes of large models are closed forms, their
speeds rooflines: of data-sheet figures with assumed efficiencies, or calibrated on the step times that their name ends in.
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
