"""Whether GRPO learns: what the page says of it."""

import json

import scripts

learns = scripts.script("grpo_learns")


def test_the_page_is_of_the_results():
    file = learns.ROOT / "benchmarks" / "results" / "grpo-learns-cpu.json"
    result = json.loads(file.read_text())
    text = learns.laid_out(learns.text_of(result, f"{file.stem}.png"))
    assert f"{learns.BEGIN}\n{text}\n{learns.END}" in learns.PAGE.read_text()
    for run in result["dense"]["ours"]:
        assert run["curve"][-1][1] > 1.3 * result["dense"]["before"]
    for run in result["mixture"]:
        assert run["curve"][-1][1] > run["before"]


def test_held_out_sums_are_not_trained():
    train, held_out = learns.sums()
    assert len(train) + len(held_out) == len({row["prompt"] for row in [*train, *held_out]}) == 2500
