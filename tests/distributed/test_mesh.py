"""The first rank does something while the others wait at the store, not in a collective."""

import itertools
import threading

import pytest
import torch.distributed as dist

from chronicals.distributed import Mesh, mesh


@pytest.fixture
def store(monkeypatch):
    made = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(mesh, "_announcements", itertools.repeat(1))
    return made


def waiting():
    """The second rank's part, in a thread, and what came of it."""
    seen = []

    def wait():
        try:
            seen.append(Mesh(1, 2).writer_does(lambda: pytest.fail("the second rank did it"), OSError))
        except OSError as error:
            seen.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, seen


def test_the_others_have_its_result(store):
    thread, seen = waiting()
    assert Mesh(0, 2).writer_does(lambda: {"a": [1, None]}, OSError) == {"a": [1, None]}
    thread.join(20)
    assert seen == [{"a": [1, None]}]


def test_the_others_stop_with_its_error(store):
    thread, seen = waiting()
    with pytest.raises(KeyError, match="b"):
        Mesh(0, 2).writer_does(lambda: {}["b"], OSError)
    thread.join(20)
    assert seen == ["rank 0 stopped: KeyError: 'b'"]


def test_long_texts_pass_through_torchs_own_store():
    """Which refuses values of more than 8 MiB."""
    store, text = mesh.dist.TCPStore("127.0.0.1", 0, 1, is_master=True), "0123456789" * 1_000_000
    mesh._say(store, "long", text)
    mesh._say(store, "empty", "")
    assert mesh._heard(store, "long") == text and mesh._heard(store, "empty") == ""
