"""The allocator's segments grow where a run leaves little of its card."""

import pytest
import torch

from chronicals.memory import let_segments_grow, segments

GIB = 2**30


@pytest.fixture
def told(monkeypatch):
    """What the allocator was told."""
    for name in segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    else:
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    return settings


def test_they_grow_where_little_is_spare(told):
    assert not let_segments_grow(6 * GIB, 10 * GIB) and not told
    assert let_segments_grow(8 * GIB, 10 * GIB)
    assert told == ["expandable_segments:True"]


@pytest.mark.parametrize("name", segments.VARIABLES)
def test_what_the_user_has_chosen_stays(told, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not let_segments_grow(8 * GIB, 10 * GIB) and not told


def test_without_a_card_there_are_none(told, monkeypatch):
    assert not let_segments_grow(8 * GIB, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not let_segments_grow(8 * GIB, 10 * GIB) and not told


@pytest.mark.gpu
def test_a_card_takes_the_setting(monkeypatch):
    for name in segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert let_segments_grow(8 * GIB, 10 * GIB)
    held = [torch.empty(100 * 2**20, device="cuda") for _ in range(3)]
    grown = any(each["is_expandable"] for each in torch.cuda.memory_snapshot())
    del held
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    assert grown
