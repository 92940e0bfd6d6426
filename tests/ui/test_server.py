"""What is refused before the page is served."""

import socket
import sys

import pytest

from chronicals.config import ConfigurationError
from chronicals.ui.server import serve


def test_an_address_that_others_reach_needs_a_key(tmp_path):
    with pytest.raises(ConfigurationError, match="choose a key"):
        serve(tmp_path, host="0.0.0.0")


def test_a_root_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="is no folder"):
        serve(tmp_path / "nothing")


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port={port}"):
            serve(tmp_path, port=port)


def test_without_nicegui_the_command_that_installs_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nicegui", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'chronicals\[ui\]'"):
        serve(tmp_path, port=0)
