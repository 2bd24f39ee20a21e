"""What people read: plots and a self-contained page.

Everything is drawn from a study's files, so a page can be made again without running anything again.
"""

from pathlib import Path

from specq import files


def write_report(folder: Path) -> None:
    """Plots and report.html for every format of the study in `folder`, from its JSON and parquet files."""
    from specq.report.html import write_html
    from specq.report.plots import write_plots

    study = files.read_json(folder / "study.json")
    positions = files.PositionFile(folder / "positions.parquet")
    for directory in study["directories"].values():
        recommendation = files.read_json(folder / directory / "recommendation.json")
        plots = write_plots(folder / directory / "plots", study, recommendation, positions)
        write_html(folder / directory / "report.html", study, recommendation, plots)
