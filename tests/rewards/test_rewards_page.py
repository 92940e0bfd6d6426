"""The code of docs/rewards.md runs as it stands."""

import math
import re
from pathlib import Path

import yaml

from chronicals.config import ChronicalsConfig
from chronicals.rewards import Scored, build_rewards
from chronicals.rewards.built_in import BUILT_IN

PAGE = (Path(__file__).parent.parent.parent / "docs" / "rewards.md").read_text()
FUNCTION, TRIAL, OF_VERL = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_function_of_the_page_is_the_reward_that_its_recipe_names(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    config = ChronicalsConfig(**yaml.safe_load(recipe))
    texts = ["5", " 5 ", "6", "6"]
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = [[{"role": "user", "content": "2 + 3"}]] * 4
    columns = {"answer": ["5", "5", "5", None], "level": [1] * 4}
    rows = Scored(prompts, answers, [[1]] * 4, columns, [0] * 4)
    with build_rewards(config) as rewards:
        assert rewards.weights == [1.0, 0.2]
        values = rewards.score(rows).values.tolist()
    assert values[:3] == [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]] and math.isnan(values[3][0])


def test_the_trial_of_the_page(capsys):
    exec(TRIAL, {})
    assert capsys.readouterr().out == "['arithmetic', 'exact'] [[1.0, 1.0], [0.0, 0.0]] []\n"


def test_the_function_around_that_of_verl(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    (tmp_path / "around.py").write_text(OF_VERL)
    monkeypatch.chdir(tmp_path)
    columns = {"ground_truth": ["5", "5"]}
    rows = Scored(["", ""], ["5", "6"], [[1], [1]], columns, [0, 0])
    with build_rewards(ChronicalsConfig(rewards=["around.py:reward"])) as rewards:
        assert rewards.score(rows).values.tolist() == [[1.0], [0.0]]


def test_the_page_has_every_built_in_reward():
    table = PAGE.partition("## Built in")[2]
    assert [name for name in BUILT_IN if f"`{name}" not in table] == []
