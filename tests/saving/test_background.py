import threading

import pytest

from chronicals.saving import Background


def test_one_piece_of_work_at_a_time_and_its_error_once():
    background = Background()
    go = threading.Event()
    background.start(go.wait)
    assert background.busy and background.error is None
    with pytest.raises(AssertionError):
        background.start(go.wait)
    go.set()
    background.wait()

    def fail():
        raise OSError("no room")

    background.start(fail)
    with pytest.raises(OSError, match="no room"):
        background.wait()
    background.wait()
    assert not background.busy and background.error is None
