"""stub"""

from pathlib import Path


def write_plots(folder: Path, study: dict, recommendation: dict, positions: dict) -> dict[str, Path]:
    return {}
