"""kt-kernel's products for the CPU's share: by a stand-in always, by itself where it can be imported."""

import copy
import ctypes
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

import chronicals
import families
from chronicals.kernels.expert_glu import Gate
from chronicals.moe.offload import kt_products
from chronicals.moe.offload.cpu_products import TorchProducts
from chronicals.moe.offload.kt_products import KtProducts, why_not
from chronicals.moe.offload.layers import LayerRecords
from chronicals.moe.offload.module import streamed_experts_of
from chronicals.patching.patch import patch_parts
from chronicals.quantization.expert_records import PlainRecords, RecordLayout
from mutants import mutant

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8}
SWIGLU = Gate()
RECORD = 3 * 128 * 128 * 2


def at(pointer, shape, dtype):
    """The tensor at an address."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class StandInLayer:
    """What a class of the extension does, in torch; it copies the weights when they are loaded."""

    def __init__(self, config):
        self.config = config

    def load_weights_task(self, order):
        def load():
            of = self.config
            names = ("gate_projs", "up_projs", "down_projs")
            shapes = ((of.inner, of.width), (of.inner, of.width), (of.width, of.inner))
            self.weights = [
                torch.stack([at(p, shape, torch.bfloat16) for p in getattr(of, name)[0]])
                for name, shape in zip(names, shapes)
            ]

        return load

    def forward_task(self, rows, each, ids, shares, x, y, incremental):
        def forward():
            n, width = int(at(rows, (1,), torch.int32)), self.config.width
            assert n <= self.config.max_len and each == 1 and not incremental
            gate, up, down = (w[at(ids, (n,), torch.int64)].float() for w in self.weights)
            given = at(x, (n, width), torch.bfloat16).float()[:, :, None]
            unit = (torch.nn.functional.silu(gate @ given) * (up @ given)).bfloat16().float()
            found = (down @ unit)[:, :, 0] * at(shares, (n,), torch.float32)[:, None]
            at(y, (n, width), torch.bfloat16).copy_(found)

        return forward


@pytest.fixture
def stand_in(monkeypatch):
    """The package's parts that are called."""

    def config(count, each, width, inner, mask):
        return SimpleNamespace(count=count, each=each, width=width, inner=inner, mask=mask)

    class Pool:
        def __init__(self, config):
            self.backend_ = self

        def submit(self, task):
            task()

        def sync(self):
            pass

    extension = SimpleNamespace(
        moe=SimpleNamespace(MOEConfig=config, AMXBF16_MOE=StandInLayer),
        WorkerPoolConfig=SimpleNamespace,
        CPUInfer=Pool,
    )
    package = ModuleType("kt_kernel")
    package.kt_kernel_ext = extension
    package.__spec__ = SimpleNamespace(name="kt_kernel")
    monkeypatch.setitem(sys.modules, "kt_kernel", package)
    kt_products._pool.cache_clear()
    yield
    kt_products._pool.cache_clear()


def mixture():
    torch.manual_seed(4)
    return families.routed("Qwen3Moe", **SIZES).bfloat16()


def numerical(model, slots=6, **options):
    given = {"vram": slots * RECORD, "ram": "1GiB", "device": "cpu", "predictor": None, **options}
    streamed = chronicals.offload(copy.deepcopy(model), mode="numerical", **given)
    patch_parts(streamed)
    cpu = streamed.offload.engine.cpu
    cpu.cpu_seconds = cpu.bus_seconds
    return streamed


def difference(streamed, gate=SWIGLU):
    """Relative error of what experts give, beside torch's products, the largest of all layers."""
    errors = []
    for _, module in streamed_experts_of(streamed):
        given = (module.source, [1, 4, 7], torch.randn(6, 128).bfloat16(), [2, 1, 3], gate)
        expected = TorchProducts().outputs(*given).float()
        got = streamed.offload.engine.cpu.products.outputs(*given).float()
        errors.append(float((got - expected).norm() / expected.norm()))
    return max(errors)


def logits_are_close(model, streamed):
    """Whether logits of passes of few tokens are, of whose experts the CPU computes some."""
    patch_parts(model)
    with torch.no_grad():
        for tokens in (1, 5, 1, 9, 1):
            ids = torch.randint(1, 61, (1, tokens))
            expected, got = (of(ids).logits.float() for of in (model, streamed))
            if (got - expected).norm() > 2e-2 * expected.norm():
                return False
    return sum(layer.by_cpu for layer in streamed.offload.report().layers) > 0


def allow(monkeypatch, reason=None):
    monkeypatch.setattr(kt_products, "NEEDED", ())
    monkeypatch.setattr(kt_products, "why_the_probe_failed", lambda: reason)


def test_it_computes_what_torch_does(stand_in, monkeypatch, caplog):
    allow(monkeypatch)
    model = mixture()
    with caplog.at_level("INFO"):
        streamed = numerical(model)
    assert "the CPU computes by kt-kernel's products, over a copy of all experts" in caplog.text
    assert isinstance(streamed.offload.engine.cpu.products, KtProducts)
    assert difference(streamed) < 2e-2 and logits_are_close(model, streamed)
    assert difference(streamed, Gate(limit=0.5)) == 0  # by torch
    wrong = mutant(
        kt_products, "matrix[inner:].data_ptr()", "matrix[:inner].data_ptr()", "_layer_of"
    )
    monkeypatch.setattr(kt_products, "_layer_of", wrong._layer_of)
    monkeypatch.setattr(wrong, "_pool", kt_products._pool)
    other = numerical(model)
    assert difference(other) > 0.5
    for one in (streamed, other):
        one.offload.close()


def test_the_probe_finds_a_wrong_product(stand_in, monkeypatch):
    kt_products.probe()
    monkeypatch.setattr(StandInLayer, "forward_task", lambda *_: lambda: None)
    with pytest.raises(ValueError, match="a product is off by"):
        kt_products.probe()


def test_what_it_is_not_taken_for_is_said_once(stand_in, monkeypatch, caplog):
    model = mixture()
    allow(monkeypatch, "a product failed (-4: it said nothing)")

    def said(model, **options):
        caplog.clear()
        with caplog.at_level("INFO"):
            streamed = numerical(model, **options)
        assert isinstance(streamed.offload.engine.cpu.products, TorchProducts)
        streamed.offload.close()
        [line] = [record for record in caplog.messages if "torch's products" in record]
        return line

    assert said(model).endswith("not kt-kernel's: a product failed (-4: it said nothing)")
    allow(monkeypatch)
    assert "and it takes bf16" in said(copy.deepcopy(model).float(), slots=12)
    assert "0.0 GiB of host memory" in said(model, ram=17 * RECORD)
    monkeypatch.setattr(kt_products, "NEEDED", ("amx_of_tomorrow",))
    assert said(model).endswith("this CPU has no amx_of_tomorrow")


def layer(formats):
    return LayerRecords("experts", formats, RecordLayout.of(formats), 0, 2)


def test_experts_that_it_does_not_take():
    def plain(*shape, **options):
        return PlainRecords(shape, torch.bfloat16, **options)

    right = {"gate_up_proj": plain(4, 512, 256), "down_proj": plain(4, 256, 256)}
    assert why_not([layer(right)]) is None
    biased = {**right, "down_proj_bias": plain(4, 256)}
    assert why_not([layer(right), layer(biased)]) == "it takes no biases"
    narrow = {"gate_up_proj": plain(4, 192, 256), "down_proj": plain(4, 256, 96)}
    assert "256 x 96, and it takes multiples of 128" in why_not([layer(narrow)])
    turned = {**right, "gate_up_proj": plain(4, 256, 512, transposed=True)}
    assert why_not([layer(turned)]) is not None


def test_a_wheel_that_ends_the_process_is_found(monkeypatch, tmp_path):
    """By another process, which it ends."""
    (tmp_path / "kt_kernel.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kt_products.why_the_probe_failed.cache_clear()
    assert "a product failed (-4" in kt_products.why_the_probe_failed()
    kt_products.why_the_probe_failed.cache_clear()


def test_what_it_writes_is_not_among_answers(capfd):
    """Also what C holds back: answers go to a pipe or a file, which it writes to by blocks."""
    libc = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    by_blocks, at_once = 0, 2  # _IOFBF, _IONBF
    libc.setvbuf(stdout, None, by_blocks, 4096)
    libc.puts(b"before")
    with kt_products._stdout_on_stderr():
        libc.puts(b"by its C++")
    libc.fflush(None)
    libc.setvbuf(stdout, None, at_once, 0)
    out, err = capfd.readouterr()
    assert (out, err) == ("before\n", "by its C++\n")


def test_rows_that_are_not_in_bf16_are_not_read_as_such(stand_in, monkeypatch):
    allow(monkeypatch)
    streamed = numerical(mixture())
    products = streamed.offload.engine.cpu.products
    assert isinstance(products, KtProducts)
    [(_, module), *_] = streamed_experts_of(streamed)
    with pytest.raises(RuntimeError, match="dtype"):
        products.outputs(module.source, [1, 4], torch.randn(3, 128), [2, 1], SWIGLU)
    streamed.offload.close()


@pytest.mark.skipif(find_spec("kt_kernel") is None, reason="kt-kernel is not installed")
def test_kt_kernel_itself_computes_what_torch_does(monkeypatch, capfd):
    """On any CPU that its wheel runs on; what it writes is not on standard output."""
    kt_products.why_the_probe_failed.cache_clear()
    reason = kt_products.why_the_probe_failed()
    if reason is not None:
        pytest.skip(f"kt-kernel does not run here: {reason}")
    monkeypatch.setattr(kt_products, "NEEDED", ())
    model = mixture()
    streamed = numerical(model)
    assert isinstance(streamed.offload.engine.cpu.products, KtProducts)
    assert difference(streamed) < 2e-2 and logits_are_close(model, streamed)
    streamed.offload.close()
    assert not capfd.readouterr().out
