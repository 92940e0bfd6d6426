"""Names that older scripts use, as docs/compatibility.md lists them, and the public face."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import chronicals
import tiny
from chronicals import ChronicalsConfig, ChronicalsTrainer
from chronicals.kernels import fused_cross_entropy, triton_kernels
from chronicals.lora.lora_presets import LORA_PRESETS, lora_preset
from chronicals.verification import SelfTest, self_test

PAGE = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text()

PACKAGES = [
    f"chronicals.{module.name}"
    for module in pkgutil.iter_modules(chronicals.__path__)
    if module.ispkg
    and module.name
    != "benchmark"  # whose arms import their own packages, and which has no names of its own
]


def test_every_name_of_the_page_is_there():
    names = re.findall(r"^\| `(chronicals[\w.]+)(?:\(\))?`", PAGE, re.M)
    assert len(names) == 6
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.import_module(
            name
        ), name


def test_the_self_test_of_rmsnorm(capsys):
    triton_kernels.test_rmsnorm()
    assert capsys.readouterr().out == "RMSNorm test passed!\n"


def test_a_failed_self_test_raises(let_return):
    failed = SelfTest("rmsnorm", "triton", 0.5, 1e-3, False)
    let_return(triton_kernels, self_test=[failed])
    with pytest.raises(
        AssertionError, match=r"rmsnorm \(triton\): relative error 5.00e-01 beside 1.00e-03"
    ):
        triton_kernels.test_rmsnorm()


def test_the_self_test_of_some_kernels():
    assert [result.name for result in self_test(only=["swiglu", "rmsnorm"])] == [
        "rmsnorm",
        "swiglu",
    ]
    with pytest.raises(ValueError, match=r"only=\['rms'\]: there are .*rmsnorm"):
        self_test(only=["rms"])


def test_patching_under_its_older_name():
    from chronicals.kernels.flash_attention_optimizer import patch_model

    assert patch_model is chronicals.patch_model
    assert chronicals.training.ChronicalsConfig is ChronicalsConfig
    assert (
        importlib.import_module("chronicals.config.sota_config").PRESETS
        is chronicals.config.PRESETS
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7,), (3, 5)], ids=str)
def test_cross_entropy_of_logits(shape, reduction):
    logits = torch.randn(*shape, 37, dtype=torch.float64).float().requires_grad_()
    targets = torch.randint(0, 37, shape)
    targets.view(-1)[::3] = -100
    own = fused_cross_entropy(logits, targets, vocab_size=37, reduction=reduction)
    theirs = torch.nn.functional.cross_entropy(
        logits.reshape(-1, 37), targets.view(-1), reduction=reduction
    )
    assert torch.allclose(own.reshape(-1), theirs.reshape(-1), rtol=1e-6)
    head = torch.eye(37)
    assert torch.allclose(
        own, fused_cross_entropy(logits, head, targets, reduction=reduction), rtol=1e-5
    )
    gradient, expected = (
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (own, theirs)
    )
    assert torch.allclose(gradient, expected, atol=1e-7)


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        (
            (torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)),
            {"vocab_size": 10},
            "vocab_size=10: the logits .* have 9",
        ),
        (
            (torch.randn(4, 9), torch.zeros(3, dtype=torch.int64)),
            {"vocab_size": 9},
            "must have the shape of logits",
        ),
        (
            (torch.randn(4, 9), torch.randn(5, 9), torch.zeros(4, dtype=torch.int64)),
            {"vocab_size": 9},
            "leave it out",
        ),
        (
            (torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)),
            {},
            "targets: missing.*vocab_size",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given, named, message):
    with pytest.raises(ValueError, match=message):
        fused_cross_entropy(*given, **named)


def test_presets_of_adapters():
    assert set(LORA_PRESETS) == {"attention", "all-linear", "experts"}
    model = chronicals.apply_lora(tiny.llama(), lora_preset("attention", rank=2))
    adapted = {path.rsplit(".", 1)[1] for path, _ in chronicals.lora.adapters(model)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert (
        len(
            list(
                chronicals.lora.adapters(
                    chronicals.apply_lora(tiny.llama(), lora_preset("all-linear", rank=2))
                )
            )
        )
        == 14
    )
    with pytest.raises(
        ValueError, match="'attn': no such preset; there are attention, all-linear, experts"
    ):
        lora_preset("attn")


def test_the_preset_of_experts_adapts_both_stacks():
    import families

    model = chronicals.apply_lora(families.mixture("qwen3_moe"), lora_preset("experts", rank=2))
    names = [name for name, _ in model.named_parameters() if "lora_" in name and ".experts" in name]
    assert len(names) == 2 * 2 * 2  # layers, stacks, factors


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_the_public_names(name):
    package = importlib.import_module(name)
    assert [shown for shown in dir(package) if not shown.startswith("__")] == sorted(
        package.__all__
    )
    assert all(hasattr(package, shown) for shown in package.__all__)


def test_what_a_script_needs_is_at_hand():
    wanted = {
        "Callback",
        "TrainingResult",
        "evaluate",
        "export",
        "generate",
        "load_model",
        "load_trained",
    }
    assert wanted <= set(dir(chronicals))
    assert all(callable(getattr(chronicals, name)) for name in wanted)
    with pytest.raises(ValueError, match="no-such-folder"):
        chronicals.export("no-such-folder", "merged")


def test_help_describes_each_field_and_models_are_typed():
    told = inspect.getdoc(ChronicalsConfig)
    for name, field in ChronicalsConfig.__pydantic_fields__.items():
        assert re.search(rf"^ +{name} \(.+\): \S", told, re.M) and field.description, name
    parameters = inspect.signature(ChronicalsTrainer).parameters
    assert "PreTrainedModel" in parameters["model"].annotation
    assert "PreTrainedTokenizerBase" in parameters["tokenizer"].annotation
