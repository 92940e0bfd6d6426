"""A run whose folder, base model and token store lie within its data can be resumed and
repeated.
"""

import json
import shutil

import pytest

import runs
import tiny
from chronicals.data import read_records
from chronicals.training import ChronicalsTrainer


@pytest.mark.slow
def test_it_is_resumed_and_repeated_from_the_same_rows(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "rows.jsonl").write_text("\n".join(map(json.dumps, tiny.chat_rows())))
    model = tiny.llama()
    model.save_pretrained(data / "base")
    tiny.tokenizer().save_pretrained(data / "base")

    def train(output, resume=False):
        settings = runs.config(
            tmp_path, output_dir=data / output, cache_dir=data / "tokens", max_steps=2, save_steps=1
        )
        trainer = ChronicalsTrainer(tiny.llama(), tiny.tokenizer(), settings)
        return trainer.train(str(data), resume=resume)

    first = train("run")
    shutil.rmtree(data / "run" / "model")
    shutil.rmtree(data / "run" / "checkpoints" / "step-00000002")
    assert train("run", resume=True).loss == first.loss
    assert train("again").loss == first.loss
    assert [record for _, record in read_records(str(data))] == tiny.chat_rows()
