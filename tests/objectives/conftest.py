"""Fixtures of several files here."""

import pytest

import tiny
from distillations import sharp


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The folder of a wider model, whose vocabulary is padded further than the student's."""
    folder = tmp_path_factory.mktemp("teacher")
    sharp(tiny.llama(7, hidden_size=96, num_hidden_layers=1, vocab_size=310)).save_pretrained(
        folder
    )
    tiny.tokenizer().save_pretrained(folder)
    return folder
