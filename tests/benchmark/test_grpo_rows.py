"""Rows of GRPO steps: Unsloth's process, and what is printed of an arm."""

import os
from argparse import Namespace

import pytest
import scripts

rows = scripts.script("grpo_rows")

STAND_IN = """
import sys

assert not {"torch", "transformers", "trl"} & set(sys.modules), "imported before Unsloth"


class FastLanguageModel:
    @staticmethod
    def from_pretrained(folder, full_finetuning, **named):
        import transformers

        assert isinstance(folder, str) and full_finetuning and not named["fast_inference"]
        return transformers.AutoModelForCausalLM.from_pretrained(folder), None
"""


def run(tmp_path, monkeypatch, source):
    """Result of Unsloth's arm with a package of that source in its place."""
    (tmp_path / "unsloth").mkdir()
    (tmp_path / "unsloth" / "__init__.py").write_text(source)
    source_folder = str(scripts.ROOT / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), source_folder]))
    given = Namespace(each=300, peer_batches=[8])
    return rows.unsloth(rows.ROWS[0], rows.Sizes.of(8, True, 2), 200, given)


@pytest.mark.slow
def test_unsloths_process_imports_it_first(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    found = run(tmp_path, monkeypatch, STAND_IN)
    assert found["arm"] == "unsloth" and found["trained"] == 1.0 and found["tokens"] > 0
    line = rows.line_of("0.5b full, unsloth, 8", found)
    assert "tokens of answers a step, trained 100.00%, loss " in line
    assert "gradient norm " in line and "nan" not in line


def test_its_last_words_are_told(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="no card here"):
        run(tmp_path, monkeypatch, "raise NotImplementedError('no card here')")


def test_answers_are_found_in_what_versions_of_trl_return():
    answers = [[1, 2], [3]]
    assert rows.completions_of((answers, None)) == answers
    assert rows.completions_of(([[7], [8]], answers, None, {})) == answers
