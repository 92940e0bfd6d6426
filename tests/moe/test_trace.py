"""Traces: read by the code on their page, heads that learn from them, and what is refused."""

import json
import re
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import families
import runs
import tiny
from choosers import batch, build
from chronicals.models import present
from chronicals.moe.lookahead import train_predictor as training
from chronicals.moe.lookahead.choosing import SAMPLE, Choice
from chronicals.moe.lookahead.distil_heads import HeadDistillation
from chronicals.moe.lookahead.predictor import ExpertPredictor, HeadSizes
from chronicals.moe.lookahead.recording import record, record_data
from chronicals.moe.lookahead.trace import (
    Trace,
    TraceInfo,
    TraceWriter,
    checksum,
    configuration_digest,
    read_trace,
    record_trace,
)
from chronicals.moe.lookahead.train_predictor import train_from_trace, train_predictor
from chronicals.moe.routers import mixture_layers
from comparison import equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = Path(__file__).parents[2] / "docs" / "traces.md"
FAMILIES = ["qwen3_moe", "deepseek_v3"]
SIZES = HeadSizes(1, 1, 16)
MOST = 10**9


def on_page():
    """The functions of the page."""
    found = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(code, found)
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def traced(request, tmp_path_factory):
    """A model, and traces of it with features: of much data and of some that is held out."""
    folder = tmp_path_factory.mktemp("traces")
    model = build(request.param).to(DEVICE)
    config = runs.config(folder, objective="pretraining")
    for name, rows in (("trace", tiny.chat_rows(200)), ("held-out", tiny.chat_rows(20))):
        record_trace(model, tiny.tokenizer(), rows, config, folder / name, True, name="a model")
    return model, folder, config


def test_the_page_reads_what_was_recorded(traced):
    model, folder, config = traced
    given = model, tiny.tokenizer(), tiny.chat_rows(20), config
    expected = list(record_data(*given, features=True))
    index = json.loads((folder / "held-out" / "trace.json").read_text())
    found = list(on_page()["read"](folder / "held-out"))
    assert (
        index["tokens"] == sum(len(part["token_ids"]) for part in found) == sum(map(len, expected))
    )
    assert index["layers"] == [layer.number for layer in mixture_layers(model)]
    kinds = {"token_ids": "<i4", "documents": "<i8", "experts": "|u1"}
    for part, recorded in zip(found, expected, strict=True):
        for name, value in vars(recorded).items():
            assert part[name].dtype.str == kinds.get(name, "<f2") and part[name].shape == tuple(
                value.shape
            )
            np.testing.assert_allclose(part[name], value.cpu().numpy(), rtol=1e-3, atol=1e-3)
    count = on_page()["load_of_experts"](folder / "held-out")
    assert count.sum() == index["tokens"] * index["k"] * len(index["layers"])
    assert count[1, 3] == sum(int((recorded.experts[1] == 3).sum()) for recorded in expected)


@pytest.mark.slow
def test_heads_learn_from_a_trace_without_the_model(traced, monkeypatch, tmp_path):
    model, folder, config = traced
    how = HeadDistillation(learning_rate=2e-2, rows=256, temperature=0.5, passes=2)
    before = checksum(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", None)
        patch.setattr(type(model.get_decoder()), "forward", None)
        found = train_from_trace(
            model, folder / "trace", folder / "held-out", SIZES, how, MOST, MOST
        )
    assert checksum(model) == before == found.unchanged and found.model == "a model"
    assert found.predictor.gates.device == next(model.parameters()).device
    info = Trace(folder / "trace").info
    assert found.tokens == 2 * info.tokens and found.predictor.choice == Choice(**info.choice)
    assert len(found.losses) == 2 * sum(-(-file["tokens"] // 256) for file in info.files)
    assert found.recalls.tokens == Trace(folder / "held-out").info.tokens
    for d in (0, 1):
        assert found.recalls.mean(d) > 0.1 + found.recalls.mean(d, "gate_reuse")

    data = model, tiny.tokenizer(), tiny.chat_rows(200), tiny.chat_rows(20), config
    once = HeadDistillation(learning_rate=2e-2, rows=256, temperature=0.5)
    beside = train_predictor(*data, SIZES, once, info.tokens, MOST)
    assert found.recalls.mean(1) > beside.recalls.mean(1) - 0.05

    found.predictor.save(tmp_path, found.about())
    for part in read_trace(folder / "held-out")[1]:
        for layer, d in ((0, 0), (0, 1), (1, 0)):
            logits = on_page()["logits_ahead"](tmp_path, layer, d, part.features[layer].numpy())
            with torch.no_grad():
                ours = found.predictor.layers(layer, part.features[layer].to(DEVICE))[:, d]
                correction = found.predictor.corrections[layer + d]
                ours = found.predictor.choice.order(ours, correction).cpu()
            first = torch.from_numpy(on_page()["order"](tmp_path, layer + d, logits).copy())
            ranks = ours.gather(-1, first)
            assert bool((ranks[:, 1:] <= ranks[:, :-1] + 1e-4).all())


@pytest.mark.slow
def test_passes_go_over_all_parts_in_another_order(traced, record_calls):
    model, folder, _ = traced
    parts = record_calls(Trace, "part")
    given = model, folder / "trace", None, SIZES

    def orders(**settings):
        parts.clear()
        found = train_from_trace(
            *given, HeadDistillation(rows=256, passes=3, **settings), 2000, 300
        )
        return found, [(trace.folder.name, number) for trace, number in parts]

    found, order = orders()
    files = Trace(folder / "trace").info.files
    held = next(n for n in range(len(files)) if sum(file["tokens"] for file in files[:n]) >= 300)
    rest = (len(order) - held) // 3
    passes = [order[n * rest : (n + 1) * rest] for n in range(3)]
    assert 4 < rest < len(files) - held and [number for _, number in order[3 * rest :]] == list(
        range(held)
    )
    assert all(sorted(one) == [("trace", n) for n in range(held, held + rest)] for one in passes)
    assert passes[0] != passes[1] != passes[2]
    again, same = orders()
    assert same == order and again.losses == found.losses
    other, another = orders(seed=1)
    assert another != order and other.losses != found.losses


def test_tokens_end_a_trace(traced):
    model, folder, _ = traced
    found = train_from_trace(
        model, folder / "trace", folder / "held-out", SIZES, HeadDistillation(rows=256), 600, 1
    )
    files = Trace(folder / "trace").info.files
    assert 600 <= found.tokens < 600 + max(file["tokens"] for file in files)
    assert found.recalls.tokens == Trace(folder / "held-out").info.files[0]["tokens"]
    with pytest.raises(ValueError, match="tokens are all held out"):
        train_from_trace(model, folder / "trace", None, SIZES, HeadDistillation(), MOST, MOST)


def test_a_trace_of_another_model_is_refused(traced, tmp_path):
    model, folder, config = traced
    given = folder / "trace", None, SIZES, HeadDistillation(), MOST, 300
    other = families.mixture("mixtral", vocab_size=300)
    with pytest.raises(
        ValueError,
        match=r"is a trace of a model .*whose configuration is not that of MixtralForCausalLM",
    ):
        train_from_trace(other, *given)
    said = json.loads((folder / "held-out" / "trace.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "trace.json").write_text(json.dumps({**said, "model_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="other: is a trace of a model with weights 00000000"):
        train_from_trace(model, folder / "trace", tmp_path / "other", *given[2:])
    gate = mixture_layers(model)[0].gate
    with torch.no_grad():
        gate[0, 0] += 1
        with pytest.raises(ValueError, match="is a trace of a model with weights"):
            train_from_trace(model, *given)
        with pytest.raises(ValueError, match="held-out: is a trace of a model with weights"):
            Trace(folder / "held-out").check(model)
        gate[0, 0] -= 1
    record_trace(model, tiny.tokenizer(), tiny.chat_rows(20), config, tmp_path / "bare")
    with pytest.raises(ValueError, match="has no features"):
        train_from_trace(model, tmp_path / "bare", *given[1:])


def test_a_configuration_is_known_however_it_was_loaded(tmp_path):
    model = families.mixture("qwen3_moe", vocab_size=300)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert configuration_digest(loaded.config) == configuration_digest(model.config)
    loaded.config.num_experts_per_tok = 1
    assert configuration_digest(loaded.config) != configuration_digest(model.config)


@pytest.mark.slow
def test_of_what_is_held_out_one_batch_is_kept(tmp_path, monkeypatch):
    """The features of 50,000 tokens of a large mixture are 10 GB."""
    alive = weakref.WeakSet()
    most = []

    class Kept(torch.Tensor):
        pass

    def watched(*given):
        for recorded in record_data(*given):
            features = recorded.features.as_subclass(Kept)
            alive.add(features)
            most.append(len(alive))
            yield type(recorded)(**{**vars(recorded), "features": features})
            del recorded, features

    monkeypatch.setattr(training, "record_data", watched)
    model = families.mixture("qwen3_moe", vocab_size=300)
    config = runs.config(tmp_path, objective="pretraining")
    how = HeadDistillation(rows=256)
    for held_out in (tiny.chat_rows(120), None):
        found = train_predictor(
            model, tiny.tokenizer(), tiny.chat_rows(200), held_out, config, SIZES, how, 3000, 4000
        )
        assert found.recalls.tokens >= 4000 and len(most) > 25
    assert (
        max(most) <= 3 + SAMPLE // 200
    )  # before the heads are made there are as many as tell how experts are chosen


@pytest.mark.slow
def test_what_is_held_out_is_not_trained_on(tmp_path, monkeypatch):
    model = families.mixture("qwen3_moe", vocab_size=300)
    config = runs.config(tmp_path, objective="pretraining")
    trained = []
    measured = []
    distil = training.distil
    measure_recalls = training.measure_recalls

    def seen(recordings, into):
        for recorded in recordings:
            into.append(recorded.token_ids)
            yield recorded

    monkeypatch.setattr(training, "distil", lambda p, r, *more: distil(p, seen(r, trained), *more))
    monkeypatch.setattr(
        training, "measure_recalls", lambda p, r, k: measure_recalls(p, seen(r, measured), k)
    )
    train_predictor(
        model,
        tiny.tokenizer(),
        tiny.chat_rows(200),
        None,
        config,
        SIZES,
        HeadDistillation(rows=256),
        3000,
        600,
    )
    parts = [
        recorded.token_ids
        for recorded in record_data(model, tiny.tokenizer(), tiny.chat_rows(200), config)
    ]
    held = len(measured)
    assert held >= 2 and all(equal(a, b) for a, b in zip(measured + trained, parts))
    assert sum(map(len, measured[:-1])) < 600 <= sum(map(len, measured))


def test_settings_are_checked(traced):
    model, _, config = traced
    with pytest.raises(ValueError, match="passes=0"):
        HeadDistillation(passes=0)
    with pytest.raises(ValueError, match="passes=2: the model runs once over data"):
        train_predictor(
            model, tiny.tokenizer(), [], None, config, SIZES, HeadDistillation(passes=2), 1, 1
        )


@pytest.mark.slow
def test_routers_that_follow_no_rule_are_traced_and_have_no_heads(tmp_path, caplog):
    model = build("deepseek_v3")
    config = runs.config(tmp_path, objective="pretraining")

    def another(own, x):
        logits, weights, experts = own(x)
        return logits, weights, (experts + 1) % logits.shape[-1]

    for layer in mixture_layers(model):
        layer.router.forward = partial(another, layer.router.forward)
    given = model, tiny.tokenizer(), tiny.chat_rows(30), config
    info = record_trace(*given, tmp_path / "trace", True)
    assert (
        info.choice is None
        and info.tokens > 1000
        and "choose experts in a way that is not known" in caplog.text
    )
    with pytest.raises(ValueError, match="does not say how experts are chosen"):
        train_from_trace(model, tmp_path / "trace", None, SIZES, HeadDistillation(), MOST, 100)
    with pytest.raises(ValueError, match="choose experts in a way that is not known"):
        train_predictor(*given[:3], None, config, SIZES, HeadDistillation(), 1000, 100)


def test_a_trace_that_does_not_say_how_experts_are_chosen_is_refused(tmp_path):
    model = families.mixture("qwen3_moe", vocab_size=300)
    writer = TraceWriter(tmp_path, TraceInfo.of(model, 2, True))
    for part in record(present(model), [batch(100)], features=True):
        writer.add(part)
    writer.close()
    with pytest.raises(ValueError, match="does not say how experts are chosen"):
        Trace(tmp_path).check(model)
    assert ExpertPredictor.beside(model, SIZES).choice == Choice()
