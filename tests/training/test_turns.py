"""A model answers and trains in turns: memory does not grow, and each has what the other gave back."""

import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import families
import runs
import tiny
from chronicals.batch import IGNORED, Batch
from chronicals.config import ConfigurationError
from chronicals.data.packs.steps import Step
from chronicals.generation import (
    Engine,
    EngineSettings,
    Request,
    Sampling,
    packed_log_probabilities,
)
from chronicals.objectives import build_objective
from chronicals.training import ChronicalsTrainer, TrainingError
from chronicals.training.rollouts import turns as module
from chronicals.training.rollouts.turns import Turns
from chronicals.training.session import prepared
from tracked import Tracked

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TOKENS = 64
TURNS = 500
TABLE = 1024
"""Bytes of the table of a step's gradients, which is cached (``tensor_lists``)."""

ON_CARD = torch.cuda.is_available()
SETTINGS = EngineSettings(page_size=16, slots=4)


@contextmanager
def trained(folder, model=None, **changes):
    """A session within its steps."""
    usual = {
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_seq_length": TOKENS,
        "mixed_precision": "fp32",
        "use_lora": False,
        "use_torch_compile": False,
    }
    config = runs.config(folder, **{**usual, **changes})
    model = tiny.llama(eos_token_id=None, **SIZES) if model is None else model
    given = model, config, build_objective(config)
    with prepared(*given, tokenizer=tiny.tokenizer()) as session, session.stepping():
        session.model.train()
        yield session


def step(number=0, tokens=TOKENS):
    """One document of random tokens."""
    ids = torch.randint(1, 300, (tokens,), generator=torch.Generator().manual_seed(number))
    targets = ids.roll(-1)
    targets[-1] = IGNORED
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    batch = Batch(ids, targets, torch.arange(tokens), bounds, tokens, trained=tokens - 1)
    names = ("documents", "items", "packs")
    counts = dict.fromkeys(("targets", "first_targets"), tokens - 1) | dict.fromkeys(names, 1)
    return Step([batch], {**counts, "tokens": tokens, "slots": tokens}, None, None)


def requests(number=0, new=2):
    """Few new tokens, and long prompts: pages of much memory in little time."""
    prompt = [number % 290 + 1, *range(1, 120)]
    return [Request(prompt, new, Sampling(1.0, seed=number), 2, n) for n in range(2)]


def tensors(session):
    states = [x for state in session.optimizer.state.values() for x in state.values()]
    held = [*session.model.parameters(), *session.model.buffers(), *states]
    return [x for x in held if isinstance(x, torch.Tensor)]


def peak_of(tracked, run):
    """Most bytes within a function, and those that are left behind it."""
    tracked.peak = tracked.held
    run()
    return tracked.peak, tracked.held


@pytest.mark.slow
def test_turns_take_no_more_than_the_larger_of_both_and_never_grow(tmp_path):
    with trained(tmp_path) as session:
        turns = Turns(session, SETTINGS)
        session.train_once(step())  # states of the optimizer exist afterwards
        turns.generate(requests())
        with Tracked(tensors(session)) as tracked:
            training, _ = peak_of(tracked, lambda: session.train_once(step(1)))
            answering, _ = peak_of(tracked, lambda: turns.generate(requests(1)))
            assert answering < 2 * training < 4 * answering
            held = list[int]()
            peaks = list[int]()
            for turn in range(TURNS):
                first, _ = peak_of(tracked, lambda turn=turn: turns.generate(requests(turn)))
                second, left = peak_of(tracked, lambda turn=turn: session.train_once(step(turn)))
                peaks.append(max(first, second))
                held.append(left)
    assert max(peaks) <= 1.05 * max(training, answering)
    assert held[-1] == held[10] == max(held)


def test_a_rollout_leaves_no_pages_and_takes_what_the_run_allows(tmp_path, monkeypatch):
    engines = list[Engine]()

    def engine(*given):
        engines.append(Engine(*given))
        return engines[-1]

    monkeypatch.setattr(module, "Engine", engine)
    with trained(tmp_path, cache_memory="0.03125MiB") as session:
        turns = Turns(session)
        before = [answer for group in turns.generate(requests()) for answer in group]
        assert engines[-1].settings.cache_memory == 2**15 and not engines[-1]._layers
        session.train_once(step())
        after = [answer for group in turns.generate(requests()) for answer in group]
        assert before[0].full_log_probabilities != after[0].full_log_probabilities
        with pytest.raises(ValueError, match=r"cache_memory"):
            turns.generate([Request([5] * 300, 100, number=3)])
        assert len(engines) == 3 and not engines[-1]._layers


def test_training_is_the_same_beside_rollouts(tmp_path):
    losses = []
    for answers in (True, False):
        with trained(tmp_path / str(answers), use_lora=True, lora_dropout=0.2) as session:
            torch.manual_seed(3)
            turns = Turns(session)
            found = []
            for turn in range(3):
                if answers:
                    turns.generate(requests(turn))
                found.append(float(session.train_once(step(turn))["loss"]))
            losses.append(found)
    assert losses[0] == losses[1] and len({*losses[0]}) == 3


def test_a_class_that_takes_padded_rows_is_named(tmp_path):
    model = families.build("mamba")
    with trained(tmp_path, model) as session, pytest.raises(TrainingError) as error:
        Turns(session)
    assert str(error.value).startswith("MambaForCausalLM cannot generate between steps: ")


@pytest.mark.slow
def test_rollouts_of_a_run_are_exact_where_it_asks(tmp_path):
    """The log-probabilities of a rollout are those of the packed pass, bit for bit."""
    model = tiny.llama(eos_token_id=None)
    with trained(tmp_path, model, generation_exact=True) as session:
        session.train_once(step())
        asked = requests(new=20)
        exact, usual = (
            turns.generate(asked) for turns in (Turns(session), Turns(session, SETTINGS))
        )
        for answers, is_exact in ((exact, True), (usual, False)):
            equal = list[bool]()
            for request, group in zip(asked, answers):
                ids = torch.tensor([*request.prompt, *group[0].tokens])
                batch = families.hand_made_batch([ids])
                with session.presented.attending_as_before(), torch.no_grad():
                    chosen = packed_log_probabilities(session.model, batch)
                ours = torch.tensor(group[0].full_log_probabilities)
                equal.append(torch.equal(ours, chosen[len(request.prompt) - 1 : -1]))
            assert all(equal) == is_exact


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (partial(families.routed, "DeepseekV3"), {}, "DeepseekV3ForCausalLM: latent attention"),
        (partial(families.build, "mamba"), {}, "MambaForCausalLM: "),
        (
            tiny.llama,
            {"mixed_precision": "fp32" if ON_CARD else "bf16"},
            "LlamaForCausalLM: mixed_precision='....', and only (fp32 on the CPU|16 bits on a card)",
        ),
    ],
    ids=["latents", "recurrent", "precision"],
)
def test_a_run_that_cannot_be_exact_is_refused_by_name(tmp_path, model, changes, message):
    usual = {"mixed_precision": "fp32", "use_lora": False, "generation_exact": True}
    config = runs.config(tmp_path, **{**usual, **changes})
    trainer = ChronicalsTrainer(model(), tiny.tokenizer(), config)
    with pytest.raises(ConfigurationError, match="^generation_exact=True: .*" + message):
        trainer.train(tiny.chat_rows(8))


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True])
def test_turns_on_a_card_take_no_more_than_the_larger_of_both(tmp_path, graphed):
    """Reserved memory, too; the graphs of the steps stay valid, and are captured once."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    }
    tokens = 4096
    options = {
        "mixed_precision": "bf16",
        "learning_rate": 1e-5,  # small, so that the order in which gradients add does not add up
        "max_seq_length": tokens,
        "use_cuda_graphs": graphed,
    }
    losses, reserved = {}, {}
    cache = 64 << 20
    for answers in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = tiny.llama(eos_token_id=None, **sizes).cuda()
        folder = tmp_path / str(answers)
        with trained(folder, model, **options) as session:
            turns = Turns(session, EngineSettings(cache, slots=16))
            found, peaks = [], []
            for turn in range(20):
                torch.cuda.reset_peak_memory_stats()
                if answers:
                    made = [Request([*range(1, 250)], 64, Sampling(1.0), 4, n) for n in range(4)]
                    turns.generate(made)
                found.append(float(session.train_once(step(turn, tokens))["loss"]))
                peaks.append(
                    (
                        torch.cuda.max_memory_allocated() - before,
                        torch.cuda.max_memory_reserved() - before,
                    )
                )
            if graphed:
                assert session._graphed.of_micro and session._graphed.releases == 0
            losses[answers], reserved[answers] = found, peaks
            held = torch.cuda.memory_allocated() - before
        del session, turns, model
    assert losses[True] == pytest.approx(losses[False], rel=2e-3)
    for alone, both in zip(zip(*reserved[False]), zip(*reserved[True])):
        assert max(both) <= 1.05 * max(max(alone), held + cache)
        assert max(both[10:]) - max(both[:10]) <= 10 * TABLE
