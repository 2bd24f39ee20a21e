"""positions.parquet read back arm by arm: the same columns as the whole file holds, and a sentence where it is damaged."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specq import files
from specq.errors import SpecqError

ARMS = [("same", "bf16+bf16"), ("same", "null"), ("own", "null"), ("own", "fp8+bf16")]


def rows(text, arm, count, rng):
    return {
        "arm": np.full(count, arm),
        "text": np.full(count, text),
        "alpha": rng.random(count).astype(np.float32),
        "alpha_by_depth": rng.random((count, 3)).astype(np.float32),
    }


@pytest.fixture
def path(tmp_path):
    """Four arms of two row groups each."""
    rng = np.random.default_rng(0)
    files.write_positions(tmp_path / "p.parquet", (rows(*a, n, rng) for a in ARMS for n in (7, 5)))
    return tmp_path / "p.parquet"


def test_arms_read_one_by_one_are_the_whole_file(path):
    """Every column of every arm, in the order of the rows, equals what reading all and selecting gives."""
    groups = files.arm_row_groups(path, [])
    assert list(groups) == ARMS and groups[ARMS[2]] == [4, 5]
    whole = files.read_parquet(path)
    for text, arm in ARMS:
        mine = files.ArmRows(path, groups[text, arm], ["alpha", "alpha_by_depth"])
        chosen = (whole["text"] == text) & (whole["arm"] == arm)
        assert list(mine) == ["alpha", "alpha_by_depth"] and len(mine) == 2
        for name, values in mine.items():
            assert values.dtype == whole[name].dtype and (values == whole[name][chosen]).all() and len(values) == 12
        with pytest.raises(KeyError):
            mine["kl"]


def test_files_of_another_making_and_damaged_ones_are_refused(path):
    """Missing, cut short, damaged after it was opened, without the columns, or with arms mixed in a row group."""
    groups = files.arm_row_groups(path, [])
    column = files.ArmRows(path, groups[ARMS[0]], ["alpha"])
    body = path.read_bytes()
    path.write_bytes(body[: len(body) // 2])
    for read in (lambda: files.arm_row_groups(path, []), lambda: column["alpha"], lambda: files.read_parquet(path)):
        with pytest.raises(SpecqError, match="p.parquet is damaged"):
            read()
    path.unlink()
    with pytest.raises(SpecqError, match="cannot read .*p.parquet"):
        files.arm_row_groups(path, [])
    pq.write_table(pa.table({"text": ["same", "same"], "arm": ["null", "bf16+bf16"]}), path)
    with pytest.raises(SpecqError, match="mixes arms in a row group.*run the study again"):
        files.arm_row_groups(path, [])
    for column in ("kl", "text"):
        pq.write_table(pa.table({n: ["null"] for n in {"text", "arm", "kl"} - {column}}), path)
        with pytest.raises(SpecqError, match=f"p.parquet has no column {column}"):
            files.arm_row_groups(path, ["kl"])
