"""stub"""

from pathlib import Path


def write_html(path: Path, study: dict, recommendation: dict, plots: dict[str, Path]) -> None:
    return None
