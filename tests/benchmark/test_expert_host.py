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
    assert list(rows) == ["0%", "10%", "30%", "50%"]
    for name, row in rows.items():
        share = row["misses a layer"] / script.EACH
        assert share == pytest.approx(int(name[:-1]) / 100, abs=0.03)
        assert row["us a layer"] > 0 and len(row["all us"]) == 3
    assert "50% missing" in capsys.readouterr().out
