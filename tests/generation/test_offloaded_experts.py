"""Generation with experts in host memory: the same tokens as with all of them on the device."""

import copy
from functools import partial

import pytest
import torch
from test_decode_graphs import EmulatedRecorder

import chronicals
import families
from chronicals.generation.engine import Engine
from chronicals.generation.requests import Request
from chronicals.generation.sampling import Sampling
from chronicals.kernels.cuda_graphs import Recorder, capture_under_way
from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM
from chronicals.moe.offload.cpu_share import CpuShare
from chronicals.moe.offload.prediction import Predictor
from chronicals.patching.patch import patch_parts

NEW = 64


def resident(model):
    same = copy.deepcopy(model)
    patch_parts(same)
    return same


def offloaded(model, kib, **options):
    size = int(kib * 1024)
    same = chronicals.offload(copy.deepcopy(model), vram=size, ram="1GiB", device="cpu", **options)
    patch_parts(same)
    return same


def native():
    torch.manual_seed(2)
    config = ChronicalsMoeConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        moe_intermediate_size=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        sliding_window=16,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return families.randomise(ChronicalsMoeForCausalLM(config).float().eval())


def greedy(model, ids):
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given)


MODELS = {
    "qwen3": lambda: families.routed("Qwen3Moe", num_experts=8),
    "gpt-oss": lambda: families.routed("GptOss", num_local_experts=8),
    "native": native,
}
OTHERS = {
    "mixtral": lambda: families.routed("Mixtral", num_local_experts=8),
    "qwen2": lambda: families.routed("Qwen2Moe", num_experts=8),
    "olmoe": lambda: families.routed("Olmoe", num_experts=8),
    "deepseek-v2": lambda: families.routed("DeepseekV2", n_routed_experts=8),
    "deepseek-v3": lambda: families.routed("DeepseekV3", n_routed_experts=8),
    "glm-4": lambda: families.routed("Glm4Moe", n_routed_experts=8),
}
SLOTS = 6
"""A quarter to three quarters of a model's experts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_sixty_four_greedy_tokens_are_the_same(name):
    model = {**MODELS, **OTHERS}[name]()
    ids = torch.randint(1, families.VOCABULARY, (2, 9))
    expected = greedy(resident(model), ids)
    whole = offloaded(model, 1024)
    kib = SLOTS * whole.offload.engine.slot_bytes / 1024
    whole.offload.close()
    streamed = offloaded(model, kib)
    got = greedy(streamed, ids)
    assert got.shape == (2, 9 + NEW) and torch.equal(got, expected)
    report = streamed.offload.report()
    assert report.slots == SLOTS and report.misses > 0 and report.fallback_mass == 0
    streamed.offload.close()


@pytest.mark.slow
def test_the_engine_serves_it():
    model = MODELS["qwen3"]()
    prompts = [torch.randint(1, families.VOCABULARY, (length,)).tolist() for length in (3, 11, 6)]
    requests = [Request(prompt, NEW, Sampling(temperature=0.0)) for prompt in prompts]
    streamed = offloaded(model, 40)
    answers = [
        [one.tokens for answer in Engine(given).generate(requests) for one in answer]
        for given in (resident(model), streamed)
    ]
    assert answers[0] == answers[1] and all(len(tokens) == NEW for tokens in answers[0])
    streamed.offload.close()


class CutRecorder(EmulatedRecorder):
    """Emulates graphs that are cut: what the host does around a launch runs where the cut was.

    Attributes:
        cuts: how often.
    """

    def __init__(self):
        super().__init__()
        self.cuts = 0

    def cut(self, decide, behind):
        self.cuts += 1
        decide()
        behind()

    def capture(self, run):
        def captured(*slots):
            with capture_under_way(self):
                return run.func(*slots)

        return super().capture(partial(captured, *run.args))


def requests_of(lengths):
    prompts = [torch.randint(1, families.VOCABULARY, (length,)).tolist() for length in lengths]
    return [Request(prompt, NEW, Sampling(temperature=0.0)) for prompt in prompts]


def tokens_of(model, requests, recorder):
    answers = Engine(model, None, recorder).generate(requests)
    return [answer.tokens for [answer] in answers]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("predictor", [None, "last"])
def test_steps_as_graphs_are_cut_where_the_host_looks(name, predictor):
    model = MODELS[name]()
    requests = requests_of((3, 11))
    streamed = offloaded(model, 100 if name == "gpt-oss" else 40, predictor=predictor)
    recorder = CutRecorder()
    expected = tokens_of(resident(model), requests, EmulatedRecorder())
    assert tokens_of(streamed, requests, recorder) == expected
    layers = len(streamed.offload.engine.layers)
    assert recorder.captures and recorder.cuts == layers * (
        recorder.replays + len(recorder.captures)
    )
    report = streamed.offload.report()
    assert report.misses > 0 and report.slots < 16
    streamed.offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_cpus_share_of_steps_as_graphs(name, monkeypatch):
    """The tokens and probabilities of the same division without graphs: odd experts by the CPU."""
    monkeypatch.setattr(CpuShare, "of_missing", lambda *given: [e for e in given[-1] if e % 2])
    model = MODELS[name]()
    requests = requests_of((3, 11))
    found = []
    for captures in (False, True):
        kib = 100 if name == "gpt-oss" else 40
        streamed = offloaded(model, kib, predictor=None, mode="numerical")
        recorder = CutRecorder()
        engine = Engine(streamed, None, recorder)
        engine._graphs.given_up = not captures
        found.append(engine.generate(requests))
        assert bool(recorder.cuts) == captures
        report = streamed.offload.report()
        by_cpu = sum(layer.by_cpu for layer in report.layers)
        assert report.misses > by_cpu > NEW
        streamed.offload.close()
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "numerical"])
def test_graphs_of_a_card_give_what_its_eager_steps_give(mode, monkeypatch):
    """Which wait for copies, for the CPU's rows and for the numbers of slots that a graph sends."""
    monkeypatch.setattr(CpuShare, "of_missing", lambda *given: [e for e in given[-1] if e % 2])
    sizes = {"num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 64}
    model = families.routed("Qwen3Moe", **sizes).bfloat16()
    requests = requests_of((3, 11))
    device = torch.device("cuda", 0)
    found = []
    for captures in (False, True):
        given = {"ram": "1GiB", "device": device, "predictor": None, "mode": mode}
        streamed = chronicals.offload(
            copy.deepcopy(model), vram=SLOTS * 3 * 64 * 64 * 2 + 4096, **given
        )
        patch_parts(streamed)
        recorder = Recorder(device)
        engine = Engine(streamed, None, recorder)
        engine._graphs.given_up = not captures
        found.append([answer for [answer] in engine.generate(requests)])
        assert engine._graphs.given_up is not captures
        report = streamed.offload.report()
        assert report.slots == SLOTS and report.misses > 0
        assert (sum(layer.by_cpu for layer in report.layers) > NEW) == (mode == "numerical")
        streamed.offload.close()
    assert found[0] == found[1]


class Shifted(Predictor):
    """Names what a layer chose last, some numbers further: wrong ones, but for chance."""

    def __init__(self, by, right):
        super().__init__()
        self.by = by
        self.right = right

    def expected(self, layer, told):
        last = self.last(layer)
        return [*last[: self.right], *((expert + self.by) % 8 for expert in last[self.right :])]


@pytest.mark.slow
@pytest.mark.parametrize("right", [0, 1, 2])
def test_no_token_of_graphs_depends_on_a_predictor(right):
    """One that is wrong, half right, or names what was chosen last."""
    model = MODELS["qwen3"]()
    requests = requests_of((3, 11))
    streamed = offloaded(model, 40, predictor=Shifted(3, right))
    recorder = CutRecorder()
    expected = tokens_of(resident(model), requests, EmulatedRecorder())
    assert tokens_of(streamed, requests, recorder) == expected and recorder.cuts
    report = streamed.offload.report()
    assert sum(layer.prefetched for layer in report.layers) > 0
    streamed.offload.close()


@pytest.mark.slow
def test_steps_whose_experts_have_no_room_are_not_captured():
    model = MODELS["qwen3"]()
    requests = requests_of((3, 11, 6))
    streamed = offloaded(model, 40)
    engine = streamed.offload.engine
    assert 2 * 4 > engine.slots >= 2 * 2  # k experts of each of four slots, of two, of one
    recorder = CutRecorder()
    expected = tokens_of(resident(model), requests, EmulatedRecorder())
    assert tokens_of(streamed, requests, recorder) == expected
    assert all(slots <= engine.most_tokens_in_graphs for slots, *_ in recorder.captures)
    streamed.offload.close()
