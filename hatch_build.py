"""Puts the embedded pair and the pair registry into the wheel; an editable install reads them from studies/ itself."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STUDIES = ("pairs.toml", "tiny_pair/target", "tiny_pair/draft", "tiny_pair/heldout.jsonl.xz", "tiny_pair/README.md")


class StudiesHook(BuildHookInterface):
    """Called by hatchling for every build target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to a standard wheel."""
        if version == "standard":
            build_data["force_include"].update({f"studies/{path}": f"specq/_studies/{path}" for path in STUDIES})
