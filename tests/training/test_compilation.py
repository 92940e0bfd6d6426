"""Kernels compiled beside each other before the first step: the run that follows is the same."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import runs
import tiny
from chronicals.batch import Batch
from chronicals.kernels.launch import compiling_only
from chronicals.kernels.rmsnorm import fused_rmsnorm
from chronicals.models import present
from chronicals.training import session
from chronicals.training.step import compilation

ARMS = {
    "full": {},
    "dropout": {"use_lora": True, "lora_rank": 4, "lora_dropout": 0.3},
    "recomputed": {"use_gradient_checkpointing": True},
    "offloaded": {"activation_offload": True},
    "DoRA over 4 bits": {
        "use_lora": True,
        "lora_rank": 4,
        "lora_dropout": 0.0,
        "use_dora": True,
        "quantization": "nf4",
    },
    "not replayed": {"use_cuda_graphs": False, "gradient_accumulation_steps": 2},
}


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ARMS)
def test_the_run_is_the_same(arm, tmp_path, monkeypatch):
    compiled = []
    inner = session.compile_micro_step

    def counted(model, *given):
        compiled.append(arm)
        inner(model, *given)
        assert all(parameter.grad is None for parameter in model.model.parameters())

    def trained(name, compile_micro_step):
        monkeypatch.setattr(session, "compile_micro_step", compile_micro_step)
        torch.manual_seed(11)
        options = {
            "mixed_precision": "bf16",
            "max_steps": 6,
            "gradient_accumulation_steps": 1,
            "save_steps": None,
        }
        runs.train(tmp_path / name, **options | ARMS[arm])
        return runs.trajectory(tmp_path / name), runs.weights(tmp_path / name)

    with_it = trained("with", counted)
    without = trained("without", lambda *_: None)
    assert compiled == [arm]
    for (_, loss, norm), (_, our_loss, our_norm) in zip(without[0], with_it[0], strict=True):
        assert our_loss == pytest.approx(loss, rel=2e-3) and our_norm == pytest.approx(
            norm, rel=2e-2
        )
    for name, weight in without[1].items():
        assert (with_it[1][name].float() - weight.float()).norm() <= 2e-2 * weight.float().norm(), (
            name
        )


@pytest.mark.gpu
def test_within_nothing_runs_and_afterwards_everything_does():
    x = torch.randn(48, 1040, device="cuda")
    weight = torch.randn(1040, device="cuda")
    expected = torch.nn.functional.rms_norm(x, (1040,), weight, 1e-6)
    torch.empty_like(x).fill_(float("nan"))  # what the allocator gives next
    with compiling_only():
        untouched = fused_rmsnorm(x, weight, 1e-6)
    assert not torch.allclose(untouched, expected, atol=1e-4)
    assert torch.allclose(fused_rmsnorm(x, weight, 1e-6), expected, atol=1e-4)


@pytest.mark.gpu
def test_kernels_of_others_run():
    from chronicals.kernels.launch import tl, triton

    @triton.jit
    def theirs(x, size: tl.constexpr):
        tl.store(x + tl.arange(0, size), 7.0)

    x = torch.zeros(16, device="cuda")
    with compiling_only():
        theirs[(1,)](x, 16)
    assert (x == 7).all()


@pytest.mark.parametrize("changes", [{"use_fp8": True}, {"use_fused_kernels": False}, {}])
def test_nothing_is_compiled_where_it_is_of_no_use(tmp_path, changes):
    """On a CPU never, whatever is asked for."""
    presented = present(tiny.llama())
    assert not compilation.compiles_beforehand(runs.config(tmp_path, **changes), presented, False)


@pytest.mark.parametrize("more", [0, 1])
def test_a_long_pass_is_not_run_for_it(monkeypatch, more):
    """Attention and products would run, which take longer than kernels one after the other."""
    ran = []
    monkeypatch.setattr(compilation, "MOST_TOKENS", 5)
    monkeypatch.setattr(compilation, "compiling_only", nullcontext)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr(compilation, "micro_step", lambda *given: ran.append(given))
    model = tiny.llama()
    ids = torch.ones(5 + more, dtype=torch.int64)
    batch = Batch(ids, ids, ids, torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
    precision = SimpleNamespace(device=torch.device("cpu"))
    compilation.compile_micro_step(present(model), None, batch, {}, precision)
    assert len(ran) == 1 - more


@pytest.mark.gpu
def test_an_error_inside_leaves_launches_as_they_were():
    from chronicals.kernels.launch import triton

    before = triton.JITFunction.run
    with pytest.raises(ValueError, match="inside"), compiling_only():
        raise ValueError("inside")
    assert triton.JITFunction.run is before
