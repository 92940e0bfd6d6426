"""Our models in transformers' tables, whatever is imported first, and nothing imported for it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.of_file(3)

FIRST = [
    "import chronicals; from transformers import AutoModelForCausalLM",
    "from transformers import AutoModelForCausalLM; import chronicals",
    "import chronicals; import transformers.modeling_layers",
    "import chronicals; import transformers.models.qwen3_moe.modeling_qwen3_moe",
    "import chronicals; from transformers import Qwen3MoeConfig",
    "import chronicals; import transformers.masking_utils",
    "import chronicals; from transformers import pipeline",
    "import chronicals.moe.attention",
    "import transformers; import chronicals.memory",
    "import chronicals.models",
    "from chronicals.moe import ChronicalsMoeForCausalLM",
]
THEN = (
    "from transformers import AutoConfig, AutoModelForCausalLM, "
    "AutoModelForSequenceClassification; "
    "config = AutoConfig.for_model('chronicals_moe', hidden_size=32, num_hidden_layers=2, "
    "vocab_size=50); "
    "kinds = AutoModelForCausalLM, AutoModelForSequenceClassification; "
    "print(*(type(kind.from_config(config)).__name__ for kind in kinds))"
)


def output(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", FIRST)
def test_registered_in_any_order(first):
    assert output(f"{first}; {THEN}").split() == [
        "ChronicalsMoeForCausalLM",
        "ChronicalsMoeForSequenceClassification",
    ]


def test_nothing_is_imported_and_installed_once():
    program = (
        "import sys, chronicals; from chronicals import auto_classes; auto_classes.register_auto_classes(); "
        "auto_classes.register_auto_classes(); "
        "assert not {'torch', 'transformers', 'chronicals.moe'} & set(sys.modules); "
        "print(sum(type(finder).__name__ == '_Finder' for finder in sys.meta_path))"
    )
    assert output(program).split() == ["1"]


def test_a_module_that_was_waited_for_is_as_it_was():
    program = (
        "import chronicals, sys, transformers.models.auto.modeling_auto as m, importlib.machinery "
        "as i; "
        "assert type(m.__spec__.loader) is type(m.__loader__) is i.SourceFileLoader; "
        "print(m.__spec__._initializing)"
    )
    assert output(program).split() == ["False"]


def test_a_transformers_that_is_too_old_stays_usable():
    program = (
        "import sys; sys.modules['transformers.models.qwen3_moe.modeling_qwen3_moe'] = None; "
        "import chronicals; "
        "from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.__name__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (
        found.stdout.split() == ["AutoModelForCausalLM"]
        and found.stderr.count("chronicals_moe") == 1
    )
