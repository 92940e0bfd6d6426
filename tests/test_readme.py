"""The Python example of the README runs as it stands, and its figures are those of the result files."""

import importlib.util
import json
import re
from pathlib import Path

import tiny


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows()))
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    loss, _, folder = capsys.readouterr().out.strip().splitlines()[-1].partition(" ")
    assert 0 < float(loss) < 7
    assert (tmp_path / folder / "adapter_model.safetensors").exists()


def test_the_figures_are_those_of_the_results():
    root = Path(__file__).parent.parent
    spec = importlib.util.spec_from_file_location("figures", root / "benchmarks" / "figures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    readme = (root / "README.md").read_text()
    assert "tokens/s" in script.figures()
    assert script.with_figures(readme) == readme, "run python benchmarks/figures.py"
