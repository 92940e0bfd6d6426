"""What an objective computes can be captured in a CUDA graph: it makes nothing on the host, and
asks the device for nothing.
"""

import sys

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import preferences
import rollouts
import runs
import tiny
from chronicals.data.kinds.preferences import JUDGED
from chronicals.objectives.registry import OBJECTIVES

HOST = (
    "lift_fresh",
    "_local_scalar_dense",
    "nonzero",
    "unique",
    "masked_select",
    "is_nonzero",
    "equal",
)
"""Operators of torch that make a tensor of numbers on the host, or wait for the device."""


class Watch(TorchDispatchMode):
    """Collects such operators where an objective's own code calls them."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in HOST and (place := self.place()):
            self.found.append(f"{name} in {place}")
        return function(*args, **(kwargs or {}))

    @staticmethod
    def place():
        """The innermost line of this package, if it is one of an objective."""
        frame = sys._getframe(2)
        while frame is not None and "/chronicals/" not in frame.f_code.co_filename:
            frame = frame.f_back
        inside = frame is not None and "/chronicals/objectives/" in frame.f_code.co_filename
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if inside else ""


CASES = [
    ("grpo", {"loss": "sapo", "entropy": 0.1}),
    ("grpo", {"loss": "cispo", "level": "sequence", "importance": "sequence_mask"}),
    *((name, {}) for name in OBJECTIVES if name != "distill"),
    *(
        ("distill", {"teacher_precision": "fp32", **more})
        for more in ({}, {"divergence": "jsd"}, {"stored_tokens": 8})
    ),
    *(
        ("dpo", {"loss": loss, "label_smoothing": 0.1 * (loss == "robust")})
        for loss in ("hinge", "robust", "sigmoid_norm")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_nothing_is_made_on_the_host(name, settings, tmp_path, monkeypatch):
    objective = OBJECTIVES[name]
    calls = []
    found = []
    own = objective.__call__

    def call(self, model, batch):
        calls.append(1)
        with Watch(found):
            return own(self, model, batch)

    monkeypatch.setattr(objective, "__call__", call)
    if name == "distill":
        settings = {**settings, "teacher": str(tmp_path / "teacher")}
        tiny.llama(7).save_pretrained(settings["teacher"])
        tiny.tokenizer().save_pretrained(settings["teacher"])
    if objective.draws_answers:
        rollouts.train(tmp_path, objective=name, section=settings, max_steps=1, save_steps=None)
        assert calls and not found, found
        return
    made = {"preference": preferences.rows, JUDGED: preferences.judged_rows}.get(
        objective.row_kinds[0], tiny.chat_rows
    )
    runs.train(
        tmp_path,
        made(12),
        objective=name,
        max_steps=1,
        save_steps=None,
        **({name: settings} if settings else {}),
    )
    assert calls and not found, found
