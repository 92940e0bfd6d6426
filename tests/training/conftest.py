"""The command line, as somebody types it."""

import json

import pytest

import tiny
from chronicals.cli import main


@pytest.fixture
def chronicals(tmp_path, monkeypatch, capsys, caplog):
    """Runs the command in ``tmp_path``, where ``data.jsonl`` has chats, and returns all that was
    logged so far.
    """
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows(20))
    )
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "chronicals")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["chronicals", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr().err
        return caplog.text

    return run
