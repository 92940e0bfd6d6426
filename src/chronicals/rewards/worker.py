"""Program in which one reward function runs, for the trainer.

    python -m chronicals.rewards.worker SOCKET

The socket is the trainer's, given as a file descriptor. On it come lines of JSON, each answered
with a line. The first asks for the function and is answered with the columns it needs, or with why
it cannot be had; the others are rows, answered with their values.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from chronicals.rewards.calling import RewardFunction, reward_function


def serve(stream: Any) -> None:
    """Answer the lines of a stream until it ends."""
    function: RewardFunction | None = None
    for line in stream:
        asked = json.loads(line)
        answer: dict[str, Any]
        if function is None:
            try:
                function = reward_function(asked["place"], asked["argument"])
                taken = None if function.taken is None else sorted(function.taken)
                answer = {"needed": function.needed, "taken": taken}
            except ValueError as error:
                answer = {"refused": str(error)}
        else:
            given = function(asked)
            answer = {"values": given.values, "faults": list(given.faults.items())}
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)  # a program that the function starts holds it not
    serve(socket.socket(fileno=int(sys.argv[1])).makefile("rwb"))
