# SPDX-License-Identifier: Apache-2.0
"""The benches run, and what they record is complete."""

import json
import sys

import pytest
from support import ROOT, run

pytestmark = pytest.mark.integration


def test_kernels(tmp_path):
    command = [
        "-m",
        "bench.kernels",
        "--quick",
        "--dtype",
        "float32",
        "--seconds",
        "0.05",
        "--output_dir",
        str(tmp_path),
    ]
    result = run([sys.executable, *command])
    recorded = json.loads((tmp_path / "kernels-quick-cpu.json").read_text())
    assert {"device", "torch", "commit", "command"} <= recorded["environment"].keys()
    assert {row["op"] for row in recorded["rows"]} == {
        "info_nce", "mask_delta_pool", "prompt_info_nce", "packed_attention", "dropout_add",
    }  # fmt: skip
    for row in recorded["rows"]:
        assert row["median_ms"] > 0
        assert row["peak_mib"] >= 0
        if row["contender"] == "fastprompt":
            assert row["times_ours"] == 1.0
            # Dropout has no other implementation that draws the same decisions.
            assert row["error"] is None if row["op"] == "dropout_add" else row["error"] < 1e-4
    assert (tmp_path / "kernels-quick-cpu.md").read_text().strip() in result.stdout


def test_recorded_results_hold_what_is_claimed():
    """On a CPU at 16,384 × 384 in float32: below a tenth of the memory of ``cross_entropy(q @ k.T)``, and not slower."""
    recorded = json.loads((ROOT / "bench" / "results" / "kernels-cpu.json").read_text())
    rows = {
        row["contender"]: row for row in recorded["rows"]
        if (row["op"], row["sizes"], row["dtype"]) == ("info_nce", [16384, 384], "float32")
    }  # fmt: skip
    ours, plain = rows["fastprompt"], rows["cross_entropy(q @ k.T)"]
    assert ours["peak_mib"] < 0.1 * plain["peak_mib"]
    assert ours["median_ms"] <= plain["median_ms"]
