"""Rows on several cards: each card takes the next, sees itself alone, and weights are written
once.
"""

import sys
import time

import pytest
import scripts

cards = scripts.script("rows_on_cards")
NAMES = [
    "row-8b-lora-dpo-30",
    "row-8b-lora-dpo-70",
    "row-0.5b-full-distill-fixed",
    "row-0.5b-full-fixed",
]
ROW = """
import os, sys, time
time.sleep(float(sys.argv[2]))
print("said")
names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "UNSLOTH_COMPILE_LOCATION")
open(sys.argv[1], "w").write(" ".join([os.environ[name] for name in names] + sys.argv[3:]))
"""


def measured(folder, count, took=0.3, seconds=100.0, left=200.0):
    """What is left of the names, and what each row saw, by its name."""

    class Told(cards.Cards):
        def command(self, name, place, limit):
            given = super().command(name, place, limit)
            return [sys.executable, "-c", ROW, str(folder / name), str(took), *given[2:]]

    all_of_them = Told(
        folder,
        folder / "work",
        count,
        ["--rounds", "0"],
        seconds,
        time.monotonic() + left,
        [*NAMES],
    )
    (folder / "work" / "weights").mkdir(parents=True)
    threads = [
        cards.threading.Thread(target=all_of_them.measure, args=(card,)) for card in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all_of_them.names, {
        name: (folder / name).read_text().split() for name in NAMES if (folder / name).exists()
    }


@pytest.mark.slow
def test_each_card_takes_the_next_row_and_sees_itself_alone(monkeypatch, let_return, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    let_return(cards.os, cpu_count=32)
    left, seen = measured(tmp_path, 2)
    assert not left and list(seen) == NAMES
    assert {words[0] for words in seen.values()} == {"5", "7"} and {
        words[1] for words in seen.values()
    } == {"16"}
    for name, (card, _, unsloth, folder, row, *options) in seen.items():
        place = tmp_path / "work" / f"card-{['5', '7'].index(card)}"
        assert unsloth == str(place / "unsloth") and folder == str(tmp_path) and row == name
        assert options[:2] == ["--work", str(place)] and options[-2:] == ["--rounds", "0"]
        assert " ".join(options[options.index("--note") + 1 : -2]) == cards.NOTE
        assert (place / "weights").resolve() == tmp_path / "work" / "weights"
        assert (tmp_path / "work" / f"{name}.log").read_text() == "said\n"


@pytest.mark.slow
def test_no_row_is_begun_without_time(set_constants, tmp_path, capsys):
    set_constants(cards, LEAST=30.0)
    left, seen = measured(tmp_path, 1, took=1.0, left=31.5)
    assert 1 <= len(seen) < 4 and left == NAMES[len(seen) :]
    limit = next(iter(seen.values()))
    assert 25 <= float(limit[limit.index("--time-limit") + 1]) <= 32
    assert "card 0: row-8b-lora-dpo-30, " in capsys.readouterr().out


@pytest.mark.slow
def test_weights_are_those_that_the_rows_read_and_written_once(must_not_call, tmp_path):
    assert cards.models_of(NAMES[0], None) == {"llama-3.1-8b"}
    assert cards.models_of(NAMES[2], None) == {"qwen2.5-0.5b", "qwen3-8b"}
    assert cards.models_of(NAMES[3], "tiny") == {"tiny"}
    them = cards.Cards(tmp_path, tmp_path, 2, [], 1.0, 0.0, [])
    them.write_weights(["tiny"])
    assert (tmp_path / "weights" / "tiny" / "model.safetensors").exists()
    must_not_call(cards, "BoundProcess", "they are there")
    them.write_weights(["tiny"])
