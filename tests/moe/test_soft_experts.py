"""``mode="soft"``: shared experts stand in for what is in no slot, and nothing waits for a copy."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_expert_offload import held_by

import chronicals
import families
import mixtures
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.moe.offload.engine import MOST_COMING, ExpertEngine
from chronicals.moe.offload.records import expert_modules
from chronicals.patching.patch import patch_parts

EXPERTS = 8
EACH = 2
WITH_SHARED = ["native", "Qwen2Moe", "DeepseekV2", "DeepseekV3", "Glm4Moe"]
HOST = {"ram": "1GiB", "device": "cpu"}


def build(name, **changes):
    if name == "native":
        return mixtures.mixture(**{"num_experts": EXPERTS, "moe_intermediate_size": 16, **changes})
    count = "num_experts" if name == "Qwen2Moe" else "n_routed_experts"
    return families.routed(name, **{count: EXPERTS, **changes})


def slot_bytes(model):
    streamed = chronicals.offload(copy.deepcopy(model), vram="1GiB", **HOST)
    size = streamed.offload.engine.slot_bytes
    streamed.offload.close()
    return size


def soft(model, slots, **options):
    """A copy of the model with as many slots, and a list of the experts that passes missed."""
    streamed = chronicals.offload(
        copy.deepcopy(model), vram=slots * slot_bytes(model), mode="soft", **HOST, **options
    )
    engine = streamed.offload.engine
    found = engine.missing
    missed = []

    def missing(layer, chosen):
        missed.append((layer, found(layer, chosen)))
        return missed[-1][1]

    engine.missing = missing
    return streamed, missed


def shared_part(block, x):
    """What a block adds beside its routed experts, by its class's formula."""
    if hasattr(block, "shared_expert"):
        return F.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return block.shared_experts(x)


class ByFormula:
    """A model that takes ``a · expert + (1 − a) · shared``, token by token and rank by rank.

    Attributes:
        missing: experts of each layer with a = 0.
        fell_back, whole: sums of routing weights.
    """

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.missing = {}
        self.fell_back = self.whole = 0.0
        for number, (path, module) in enumerate(expert_modules(self.model).items()):
            block = self.model.get_submodule(path.rpartition(".")[0])
            module.forward = self.of_layer(number, block, type(module).forward, module)

    def of_layer(self, number, block, run, module):
        def forward(x, experts, weights):
            y = torch.zeros_like(x)
            shared = shared_part(block, x)
            for token in range(len(x)):
                for expert, weight in zip(experts[token].tolist(), weights[token]):
                    own = shared[token]
                    if expert not in self.missing[number]:
                        one = torch.tensor([[expert]])
                        own = run(module, x[token : token + 1], one, torch.ones(1, 1).to(x))[0]
                    else:
                        self.fell_back += float(weight)
                    self.whole += float(weight)
                    y[token] += weight * own
            return y

        return forward

    def __call__(self, ids, missed):
        self.missing = dict(missed)
        return self.model(ids).logits


def ids_of(tokens, rows=1):
    return torch.randint(2, families.VOCABULARY, (rows, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SHARED)
@torch.no_grad()
def test_by_the_formula(name):
    model = build(name)
    expected = ByFormula(model)
    streamed, missed = soft(model, EACH + 3)
    patch_parts(streamed)
    some, all_missing = False, False
    for tokens in (3, 1, 7, 1, 1, 2, 1):
        missed.clear()
        ids = ids_of(tokens)
        got = streamed(ids).logits
        torch.testing.assert_close(got, expected(ids, missed), rtol=2e-4, atol=2e-4)
        some = some or any(found for _, found in missed)
        all_missing = all_missing or all(found for _, found in missed)
    report = streamed.offload.report()
    assert some and all_missing and report.hits > 0 and report.misses > 0
    assert report.fallback_mass == pytest.approx(expected.fell_back / expected.whole, rel=1e-4)
    assert f"stood in for {report.fallback_mass:.2%} of the routing weight" in str(report)
    streamed.offload.close()


@pytest.mark.slow
@torch.no_grad()
def test_the_native_model_gives_what_its_masks_give():
    model = build("native")
    streamed, missed = soft(model, 12)
    for tokens in (1, 5, 1, 1):
        missed.clear()
        ids = ids_of(tokens)
        got = streamed(ids).logits
        masks = torch.ones(len(model.model.layers), EXPERTS, dtype=torch.bool)
        for layer, found in missed:
            masks[layer, found] = False
        expected = model(ids, available_expert_masks=masks).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert streamed.offload.report().fallback_mass > 0
    streamed.offload.close()


@torch.no_grad()
def test_the_same_bits_once_all_experts_are_there():
    model = build("native")
    expected = copy.deepcopy(model)
    patch_parts(expected)
    layers = len(model.model.layers)
    streamed, missed = soft(model, layers * EXPERTS)
    ids = ids_of(40)
    assert not torch.equal(streamed(ids).logits, expected(ids).logits)
    for _ in range(layers):  # what a layer chooses depends on what stood in before it
        streamed(ids)
    missed.clear()
    assert torch.equal(streamed(ids).logits, expected(ids).logits)
    assert not any(found for _, found in missed)
    streamed.offload.close()


@torch.no_grad()
def test_exact_waits_and_gives_the_same_bits():
    model = build("native")
    expected = copy.deepcopy(model)
    patch_parts(expected)
    streamed, _ = soft(model, EACH + 2)
    patch_parts(streamed)
    ids = ids_of(9)
    with streamed.offload.exact():
        assert torch.equal(streamed(ids).logits, expected(ids).logits)
    assert not torch.equal(streamed(ids).logits, expected(ids).logits)
    streamed.offload.close()


@torch.no_grad()
def test_no_product_waits_for_a_copy(monkeypatch):
    """Copies take as long as the test says: until then their experts are missing."""
    model = build("native")
    streamed, missed = soft(model, 20, predictor=None)
    engine = streamed.offload.engine
    done = set()
    begun = []
    copies = engine._copies

    def begin(loads, stream, in_pieces, *_):
        assert in_pieces, "a copy that something waits for"
        slots = [load.slot for load in loads]
        begun.extend(slots)
        done.difference_update(slots)

    def wait_for(slots, stream):
        assert set(slots) <= done, "products wait for a copy"

    monkeypatch.setattr(copies, "_copy", begin)
    monkeypatch.setattr(copies, "is_filled", lambda slot: slot in done)
    monkeypatch.setattr(copies, "wait_for", wait_for)
    monkeypatch.setattr(copies, "timing", lambda slot: lambda: None)
    for _ in range(5):
        streamed(ids_of(12))
    assert len(begun) == len(set(begun)) == MOST_COMING < 20  # none gives up its slot on the way
    assert all(found for _, found in missed)
    first = begun[:3]
    held = {slot: expert for expert, slot in held_by(engine).items()}
    for slot in first:
        layer, expert = held[slot]
        record = engine.slab.record(engine.layers[layer].first + expert)
        engine._memory[slot, : engine.layers[layer].layout.bytes] = record[
            : engine.layers[layer].layout.bytes
        ]
        done.add(slot)
    experts = {held[slot] for slot in first}
    missed.clear()
    streamed(ids_of(40))
    for layer, expert in experts:
        assert expert not in dict(missed)[layer]
    streamed.offload.close()


@torch.no_grad()
def test_it_generates():
    streamed, _ = soft(build("native"), 12)
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert streamed.generate(ids_of(4), **given).shape == (1, 16)
    report = streamed.offload.report()
    assert 0 < report.fallback_mass < 1 and report.mode == "soft"
    assert any(0 < layer.fallback_mass < 1 for layer in report.layers)
    streamed.offload.close()


@torch.no_grad()
def test_a_copied_model_has_shared_experts_of_its_own():
    streamed, _ = soft(build("native"), EACH + 2)
    twin = copy.deepcopy(streamed)
    for layer in twin.model.layers:
        for parameter in layer.mlp.shared_experts.parameters():
            parameter.zero_()
    layer = streamed.model.layers[0].mlp
    x = torch.randn(1, 1, 32)
    assert layer(x).abs().max() > 0
    assert not twin.model.layers[3].mlp(x).any()  # nothing of it is in slots yet
    streamed.offload.close()


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "native"])
def test_a_model_without_shared_experts_is_refused(name):
    model = build("native", num_shared_experts=0) if name == "native" else families.routed(name)
    ids = ids_of(3)
    before = model(ids).logits
    with pytest.raises(ValueError, match="has no shared experts that could stand in .*'exact'"):
        chronicals.offload(model, vram="1MiB", mode="soft", **HOST)
    assert torch.equal(model(ids).logits, before) and not hasattr(model, "offload")


def test_a_folder_without_shared_experts_is_refused(tmp_path):
    families.routed("Qwen3Moe").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mode='soft': the block model.layers.0.mlp of this Qwen3"):
        chronicals.offload(tmp_path, vram="1MiB", mode="soft", **HOST)


@pytest.mark.slow
@torch.no_grad()
def test_a_folder(tmp_path):
    model = build("Qwen2Moe")
    model.save_pretrained(tmp_path)
    size = 20 * slot_bytes(model)
    streamed = chronicals.offload(
        tmp_path, vram=size, mode="soft", dtype=torch.float32, predictor=None, **HOST
    )
    expected = copy.deepcopy(model)
    patch_parts(expected)
    ids = ids_of(5)
    assert not torch.allclose(streamed(ids).logits, expected(ids).logits, rtol=1e-3, atol=1e-3)
    with streamed.offload.exact():
        torch.testing.assert_close(streamed(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    streamed.offload.close()


ANOTHER_WAY = "Qwen2MoeSparseMoeBlock of Qwen2MoeForCausalLM adds its shared_expert in a way that"


def test_shared_experts_that_are_added_in_another_way_are_refused():
    model = build("Qwen2Moe")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *given: 0.7 * given[-1])
    with pytest.raises(ValueError, match=ANOTHER_WAY):
        chronicals.offload(model, vram="1MiB", mode="soft", **HOST)
    assert expert_modules(model)  # they are where they were


def test_a_folder_whose_class_adds_them_in_another_way_is_refused(tmp_path, monkeypatch):
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock as Block

    build("Qwen2Moe").save_pretrained(tmp_path)
    right = Block.forward
    monkeypatch.setattr(Block, "forward", lambda *given: 0.7 * right(*given))
    closed = []
    close = ExpertEngine.close
    monkeypatch.setattr(ExpertEngine, "close", lambda self: closed.append(close(self)))
    with pytest.raises(ValueError, match=ANOTHER_WAY):
        chronicals.offload(tmp_path, vram="1MiB", mode="soft", **HOST)
    assert closed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "Qwen2Moe"])
@torch.no_grad()
def test_adapters_of_experts(name):
    """A trained model: adapters on experts that are there, shared experts with adapters of theirs."""
    model = build(name)
    shared = "shared_expert.down_proj" if name == "Qwen2Moe" else "shared_experts.down_proj"
    config = LoRAConfig(
        rank=3,
        dropout=0.0,
        target_modules=["o_proj", shared],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    apply_lora(model, config)
    for path, parameter in model.named_parameters():
        if "lora" in path:
            parameter.normal_(std=0.1)
    expected = copy.deepcopy(model)
    patch_parts(expected)
    layers = sum(1 for path, _ in model.named_modules() if path.endswith(".mlp"))
    streamed, missed = soft(model.eval(), layers * EXPERTS)
    ids = ids_of(30)
    assert not torch.allclose(streamed(ids).logits, expected.eval()(ids).logits, atol=1e-3)
    assert any(found for _, found in missed)
    for _ in range(layers):
        streamed(ids)
    torch.testing.assert_close(streamed(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    streamed.offload.close()


def test_gradients_are_refused():
    streamed, _ = soft(build("native"), EACH + 2)
    with pytest.raises(ValueError, match=r"run it under torch.no_grad\(\), or train"):
        streamed(ids_of(3))
    streamed.offload.close()
