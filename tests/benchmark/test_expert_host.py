"""The script of the host's time between two graphs: its routes miss what they should."""

import json
import sys

import pytest
import scripts


def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    script = scripts.script("expert_host")
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["expert_host.py", str(out), "--tiny"])
    script.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 8
    for name, row in rows.items():
        percent, *predicted = name.split()
        assert row["us a layer"] > 0 and len(row["all us"]) == 3
        if not predicted:
            share = row["misses a layer"] / script.EACH
            assert share == pytest.approx(int(percent[:-1]) / 100, abs=0.03)
        elif percent != "0%":
            assert 0 < row["recall"] < 1 and row["prefetched a layer"] > 0
    assert "50% predicted:" in capsys.readouterr().out
