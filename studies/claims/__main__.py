"""Put common claims to the test and write their page.

python -m studies.claims                  # make claims
python -m studies.claims --page           # the page alone, from the results that are kept
"""

from pathlib import Path

from studies.claims import acceptance, speed
from studies.claims.page import write_page
from studies.common.command import main
from studies.common.measured import Measured

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "claims"


def judged(config: dict, found: dict[str, Measured]) -> dict:
    """The claims in the order of their letters, as JSON; one whose runs were not made is left out, and the page says so."""
    claims = [
        acceptance.sizes_of_the_loss(found),
        acceptance.e4m3_or_e5m2(found),
        acceptance.keys_by_channel(found),
        *speed.claims(config["speed"], HERE),
    ]
    for judge, names in acceptance.NEEDS.items():
        claims += [judge(found)] if set(names) <= found.keys() else []
    return {"claims": [c.as_dict() for c in sorted(claims, key=lambda c: c.key)]}


if __name__ == "__main__":
    main(__doc__, HERE, RESULTS, judged, write_page)
