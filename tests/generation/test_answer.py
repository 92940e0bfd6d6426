"""None"""

import dataclasses
import json

import pytest
import torch

import runs
import tiny
from chronicals.data import Tokenizer, stop_token_ids
from chronicals.generation import (
    Chat,
    Engine,
    EngineSettings,
    NotExact,
    Request,
    Trained,
    generate,
    generate_answer,
    generate_many,
    load_trained,
)
from chronicals.generation.answer import Stream, computing_dtype
from chronicals.log_once import LOGGED
from chronicals.training import ChronicalsTrainer
from chronicals.training.run.evaluation import evaluate_data
from comparison import equal

QUESTION = "what is the answer to everything?"
ANSWER = "the answer to everything is forty two"


@pytest.fixture(scope="module", params=["full", "lora"])
def overfitted(request, tmp_path_factory):
    """A model that has learned one answer by heart, its stop token included."""
    folder = tmp_path_factory.mktemp("overfitted")
    base = folder / "base"
    tiny.llama().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    from transformers import AutoModelForCausalLM

    rows = [
        {
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": ANSWER},
            ]
        }
    ] * 8
    lora = {
        "use_lora": True,
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "learning_rate": 2e-3,
    }
    runs.train(
        folder,
        rows=rows,
        model=AutoModelForCausalLM.from_pretrained(base),
        max_steps=80,
        batch_size=1,
        gradient_accumulation_steps=1,
        **(lora if request.param == "lora" else {}),
    )
    return folder / "run"


@pytest.mark.parametrize("place", ["", "model", "checkpoints/step-00000080"])
def test_answers_and_stops(overfitted, place):
    trained = load_trained(overfitted / place)
    assert trained.chats
    assert generate_answer(trained, QUESTION, max_new_tokens=200) == ANSWER
    ids = Tokenizer(trained.tokenizer).render(
        [{"role": "user", "content": QUESTION}], generation=True
    )
    produced = generate(trained, ids, max_new_tokens=200)
    assert produced[-1] == Tokenizer(trained.tokenizer).template.stop
    assert produced.count(produced[-1]) == 1


def test_the_stop_token_is_in_the_generation_config(overfitted):
    path = overfitted / "model" / "generation_config.json"
    if not path.exists():
        pytest.skip("an adapter has none")
    stops = json.loads(path.read_text())["eos_token_id"]
    assert set(stop_token_ids(tiny.tokenizer())) <= set(stops)


def test_generation_leaves_every_module_in_its_mode_also_where_it_fails():
    trained = Trained(tiny.llama().train(), tiny.tokenizer())
    trained.model.model.layers[0].eval()
    modes = [module.training for module in trained.model.modules()]
    generate(trained, [5, 6], 3)
    with pytest.raises(IndexError):
        generate(trained, [10**6], 3)
    assert [module.training for module in trained.model.modules()] == modes and len(set(modes)) == 2


@pytest.mark.parametrize(
    "asked", [([], 3, 0.0), ([5], 0, 0.0), ([5], 3, -1.0), ([5], 3, float("nan"))]
)
def test_what_cannot_be_generated_is_refused(asked):
    with pytest.raises(ValueError, match="max_new_tokens=|the prompt is empty|temperature="):
        generate(Trained(tiny.llama(), tiny.tokenizer()), *asked)


def learned_positions(kind):
    """A model of 16, and none that stops by itself."""
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 300}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**sizes, max_position_embeddings=16))
    return OPTForCausalLM(
        OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=16)
    )


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_generation_ends_at_the_last_position(kind, caplog):
    trained = Trained(learned_positions(kind), tiny.tokenizer())
    trained.tokenizer.eos_token = trained.tokenizer.pad_token = None
    assert len(generate(trained, [5] * 10, 6)) == 6 and "ends where" not in caplog.text
    assert (
        len(generate(trained, [5] * 10, 100)) == 6
        and "ends where" in caplog.text
        and "at position 16" in caplog.text
    )
    with pytest.raises(
        ValueError, match="^request 0 has 16 tokens, .* 16 positions: ask something shorter$"
    ):
        generate(trained, [5] * 16, 1)


def test_rotary_positions_go_on():
    model = tiny.llama(max_position_embeddings=16, eos_token_id=None)
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    assert len(generate(Trained(model, tokenizer), [5] * 20, 10)) == 10


def test_it_is_told_once_that_rotary_positions_go_on(caplog):
    """As long texts of a training are, and not where a scaling reaches them."""
    told = "LlamaForCausalLM is made for 16 positions (max_position_embeddings), a prompt and its"
    LOGGED.clear()
    short = Engine(tiny.llama(max_position_embeddings=16, eos_token_id=None))
    short.generate([Request([5] * 6, 10)])
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 16
    scaled = tiny.llama(max_position_embeddings=16, eos_token_id=None, rope_parameters=rope)
    Engine(scaled).generate([Request([5] * 40, 10)])
    assert told not in caplog.text
    short.generate([Request([5] * 7, 10), Request([5] * 14, 3)])
    short.generate([Request([5] * 8, 10)])
    assert caplog.text.count(told) == 1


def test_no_token_is_begun_after_the_time(overfitted):
    trained = load_trained(overfitted)
    ids = Tokenizer(trained.tokenizer).render(
        [{"role": "user", "content": QUESTION}], generation=True
    )
    whole = generate(trained, ids, seconds=60.0)
    assert generate(trained, ids, seconds=0.0) == whole[:1] and len(whole) > 1


def test_generation_is_repeatable_and_leaves_the_random_state(overfitted):
    trained = load_trained(overfitted)
    state = torch.get_rng_state()
    first = generate_answer(trained, "hello", max_new_tokens=20, temperature=1.5, seed=3)
    assert equal(state, torch.get_rng_state())
    assert first == generate_answer(trained, "hello", max_new_tokens=20, temperature=1.5, seed=3)


def test_evaluation_tokenises_as_training_did(overfitted, tmp_path):
    file = tmp_path / "same.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": ANSWER},
            ]
        }
    ]
    file.write_text(json.dumps(rows[0]) + "\n")
    trained = load_trained(overfitted)
    evaluation = evaluate_data(trained.model, trained.tokenizer, file, runs.config(tmp_path))
    about = json.loads((overfitted / "model" / "chronicals.json").read_text())
    assert about["tokenization"] == Tokenizer(trained.tokenizer).fingerprint()
    assert evaluation.token_accuracy == 1.0
    assert evaluation.loss == pytest.approx(runs.trajectory(overfitted.parent)[-1][1], rel=0.05)


@pytest.mark.parametrize("named", [True, False])
def test_an_adapter_as_peft_saves_it_speaks_as_its_model_does(tmp_path, named):
    """Without a tokenizer beside it; one that is there is taken."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    folder = tmp_path / "adapter"
    tiny.llama().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    model.save_pretrained(folder)
    if not named:
        file = folder / "adapter_config.json"
        file.write_text(
            json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None})
        )
    trained = load_trained(folder, None if named else str(base))
    assert trained.chats and trained.tokenizer.get_vocab() == tiny.tokenizer().get_vocab()
    assert isinstance(generate_answer(trained, QUESTION, max_new_tokens=3), str)
    own = tiny.tokenizer()
    own.chat_template = None
    own.save_pretrained(folder)
    assert not load_trained(folder, str(base)).chats


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="neither a model"):
        load_trained(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "base"])
def test_a_base_model_for_what_is_no_adapter(tmp_path, name):
    tiny.llama().save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError, match=f"base_model='other': .*{name} is no adapter's folder.*; leave it out"
    ):
        load_trained(tmp_path / name, base_model="other")


@pytest.mark.parametrize("file", ["adapter_config.json", "chronicals.json"])
def test_a_file_of_a_model_that_is_no_json_is_named(tmp_path, file):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text('{"r": ')
    with pytest.raises(ValueError, match=rf"{file}: is no JSON \(.+\); .* save the model again"):
        load_trained(tmp_path)


def test_plain_text_with_a_chat_template_that_never_stops(tmp_path):
    """The template is not what is trained, so nothing is asked of it; the end of the text stops."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    trainer = ChronicalsTrainer(tiny.llama(), tokenizer, runs.config(tmp_path, max_steps=2))
    trainer.train([{"text": text} for text in tiny.TEXTS * 4])
    trained = load_trained(tmp_path / "run")
    assert not trained.chats
    assert trained.stops == [tokenizer.eos_token_id]
    assert isinstance(generate_answer(trained, "hello", max_new_tokens=3), str)


def likeliest(model, ids, count):
    """By hand, without a cache."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 3},
        {"return_dict_in_generate": True},
    ],
    ids=str,
)
def test_the_likeliest_token_is_taken_whatever_the_model_comes_with(given):
    """Its generation config is for what it was before, and stays as it is."""
    model = tiny.llama()
    trained = Trained(model, tiny.tokenizer(), kinds=("text",))
    expected = likeliest(model, [5, 6, 5, 6, 7], 12)[5:]
    assert not set(expected) & set(trained.stops)
    for name, value in given.items():
        setattr(model.generation_config, name, value)
    model.train()
    own = model.generation_config
    assert generate(trained, [5, 6, 5, 6, 7], max_new_tokens=12) == expected
    assert model.generation_config is own and model.training


def test_a_stop_token_that_is_no_special_one_is_not_in_the_answer():
    model = tiny.llama()
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    prompt = Tokenizer(tokenizer).prompt("hello")
    model.generation_config.eos_token_id = likeliest(model, prompt, 1)[-1]
    trained = Trained(model, tokenizer)
    stop = model.generation_config.eos_token_id
    assert stop not in tokenizer.all_special_ids and tokenizer.decode([stop]).strip()
    assert generate(trained, prompt) == [stop]
    assert generate_answer(trained, "hello") == ""


FOR_SOMETHING_ELSE = [
    {"stop_strings": ["never"]},
    {"token_healing": True},
    {"num_beams": 3},
    {"num_beams": 2, "num_beam_groups": 2},
    {"penalty_alpha": 0.6},
    {"dola_layers": "high"},
    {"force_words_ids": [[5]]},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_early_exit": 1},
    {"cache_implementation": "paged"},
    {"cache_implementation": "quantized"},
    {"cache_implementation": "offloaded"},
    {"guidance_scale": 1.5},
    {"max_time": 1e-9},
    {"min_length": 50},
    {"forced_eos_token_id": 0},
    {"return_dict_in_generate": True, "output_scores": True},
    {"watermarking_config": {"bias": 2.0}},
    {"unknown": 1},
]
"""What a generation config may say that needs a tokenizer, a download or another algorithm."""


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("given", FOR_SOMETHING_ELSE, ids=str)
def test_a_model_can_be_asked_whatever_its_generation_config_says(given, temperature):
    plain = tiny.llama(eos_token_id=None)
    model = tiny.llama(eos_token_id=None)
    for name, value in given.items():
        setattr(model.generation_config, name, value)
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    expected = generate(Trained(plain, tokenizer), [5, 6, 7], 6, temperature)
    assert (
        len(expected) == 6
        and generate(Trained(model, tokenizer), [5, 6, 7], 6, temperature) == expected
    )


def mamba():
    """A recurrent model, which the engine cannot serve."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 300}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return MambaForCausalLM(MambaConfig(**sizes, **ids)).eval()


def test_what_the_engine_cannot_serve_is_generated_by_transformers_and_named_once(caplog):
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    trained = Trained(mamba(), tokenizer)
    with caplog.at_level("INFO", logger="chronicals"):
        answers = generate_many(trained, [[5, 6, 7], [8, 9]], 6, 1.0, answers=2)
        first = generate(trained, [5, 6, 7], 6)
    assert first == likeliest(trained.model, [5, 6, 7], 6)[3:]
    assert [[len(answer.tokens) for answer in one] for one in answers] == [[6, 6], [6, 6]]
    assert len({(*answer.tokens,) for one in answers for answer in one}) == 4
    named = [record.message for record in caplog.records if "MambaForCausalLM" in record.message]
    assert sum("generates by transformers, an answer at a time" in text for text in named) == 1
    exact = dataclasses.replace(trained, engine_settings=EngineSettings(generation_exact=True))
    with pytest.raises(NotExact, match="^generation_exact=True: MambaForCausalLM generates by"):
        generate_many(exact, [[5, 6, 7]], 6)
    late = generate_many(trained, [[5, 6, 7], [8, 9]], 6, seconds=0.0)
    assert [(len(one.tokens), one.ended) for (one,) in late] == [(1, "time"), (0, "time")]


def test_a_setting_that_only_transformers_knows_is_kept(caplog):
    trained, _ = endless()
    trained.model.generation_config.no_repeat_ngram_size = 1
    with caplog.at_level("INFO", logger="chronicals"):
        once = generate(trained, [5, 6, 7], 30, 1.0)
    assert len(set(once)) == 30 and "does not know no_repeat_ngram_size=1" in caplog.text


def test_prompts_are_answered_as_one_by_one():
    trained, _ = endless()
    prompts = [[5, 6, 7], [8], [9] * 20]
    together = generate_many(trained, prompts, 8, 1.3, seed=4, answers=2)
    assert together[0][0].tokens == generate(trained, prompts[0], 8, 1.3, seed=4)
    assert len({(*answer.tokens,) for one in together for answer in one}) == 6
    assert [[one.tokens] for (one,) in generate_many(trained, prompts, 8)] == [
        [generate(trained, prompt, 8)] for prompt in prompts
    ]


def endless(**settings):
    """A model from elsewhere that never stops by itself, and a question."""
    model = tiny.llama(eos_token_id=None, **settings)
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = tokenizer.chat_template = None
    return Trained(model, tokenizer), "hello"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_before_a_stop_string_of_the_model(temperature):
    trained, question = endless()
    free = generate_answer(trained, question, 30, temperature, seed=2)
    stop = next(free[n : n + 2] for n in range(6, len(free)) if free[n : n + 2].isascii())
    trained.model.generation_config.stop_strings = ["never said", stop]
    parts = []
    assert (
        generate_answer(trained, question, 30, temperature, seed=2, say=parts.append)
        == free[: free.index(stop)].strip()
    )
    assert "".join(parts) == free[: free.index(stop)].strip() and len(parts) > 1
    ids = Tokenizer(trained.tokenizer).prompt(question)
    produced = generate(trained, ids, 30, temperature, seed=2)
    decode = trained.tokenizer.decode
    assert len(produced) < 30 and stop in decode(produced) and stop not in decode(produced[:-1])
    trained.model.generation_config.stop_strings = stop  # a text alone is as good
    assert generate(trained, ids, 30, temperature, seed=2) == produced


def test_a_stop_string_is_no_end_for_a_model_that_learned_another():
    trained, question = endless()
    free = generate_answer(trained, question, 20)
    trained.model.generation_config.stop_strings = [free[3:6]]
    on_texts = Trained(trained.model, trained.tokenizer, kinds=("text",))
    assert generate_answer(on_texts, question, 20) == free


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_a_draw_from_one_token_is_the_likeliest(narrow):
    trained, _ = endless()
    likely = generate(trained, [5, 6, 7], 12)
    free = generate(trained, [5, 6, 7], 12, 5.0, seed=1)
    assert free != likely
    assert generate(trained, [5, 6, 7], 12, 5.0, seed=1, **narrow) == likely
    for (
        name,
        value,
    ) in (
        narrow.items()
    ):  # the model's own holds where nothing is asked for, and gives way where it is
        setattr(trained.model.generation_config, name, value)
    assert generate(trained, [5, 6, 7], 12, 5.0, seed=1) == likely
    assert (
        generate(
            trained,
            [5, 6, 7],
            12,
            5.0,
            seed=1,
            **dict.fromkeys(narrow, 0 if "top_k" in narrow else 1.0),
        )
        == free
    )


@pytest.mark.slow
def test_all_tokens_may_be_drawn_where_nobody_says_otherwise():
    """At a high temperature far more of 300 tokens than the 50 of transformers' own default."""
    trained, _ = endless()
    assert len({*(generate(trained, [5], 1, 1e4, seed)[0] for seed in range(100))}) > 60


@pytest.mark.slow
def test_a_repetition_penalty_holds_at_every_temperature():
    trained, _ = endless()
    free = generate(trained, [5, 6, 7], 30)
    once = generate(trained, [5, 6, 7], 30, repetition_penalty=1e9)
    assert len(set(free)) < 30 == len({*once} - {5, 6, 7})
    assert len(set(generate(trained, [5, 6, 7], 30, 0.01, repetition_penalty=1e9))) == 30


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"top_p": 0.9}, "top_p=0.9: has no effect at temperature 0"),
        ({"top_k": 5}, "top_k=5: has no effect at temperature 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0: must be a number above 0 and at most 1"),
        ({"temperature": 1.0, "top_k": -1}, "top_k=-1: must be a whole number from 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be a number above 0"),
    ],
)
def test_settings_that_do_nothing_or_are_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        generate_answer(endless()[0], "hello", 3, **settings)


@pytest.mark.parametrize(
    ("precision", "has_bf16", "dtype"),
    [
        ("fp32", True, torch.float32),
        ("bf16", True, torch.bfloat16),
        ("fp16", True, torch.bfloat16),
        ("bf16", False, torch.float32),
    ],
)
def test_a_model_computes_as_it_was_trained(precision, has_bf16, dtype):
    assert computing_dtype({"mixed_precision": precision}, has_bf16) == dtype
    assert computing_dtype({}, has_bf16) == (torch.bfloat16 if has_bf16 else torch.float32)


@pytest.fixture
def seen(monkeypatch):
    """The messages of each question, which are answered by their number."""
    asked = []

    def answer(trained, messages, say=None, **settings):
        asked.append(messages)
        if messages[-1]["content"] == "fails":
            raise ValueError("too long")
        return f"answer {len(asked)}"

    monkeypatch.setattr("chronicals.generation.answer.generate_answer", answer)
    return asked


def turn(role, content):
    return {"role": role, "content": content}


def test_a_chat_remembers_until_it_is_reset(seen):
    chat = Chat(Trained(tiny.llama(), tiny.tokenizer()), "be brief")
    opening = turn("system", "be brief")
    chat.ask("one")
    chat.ask("two")
    assert seen[1] == [
        opening,
        turn("user", "one"),
        turn("assistant", "answer 1"),
        turn("user", "two"),
    ]
    with pytest.raises(ValueError, match="too long"):
        chat.ask("fails")
    assert chat.messages == [*seen[1], turn("assistant", "answer 2")]
    chat.reset()
    chat.ask("three")
    assert seen[-1] == [opening, turn("user", "three")]


def test_a_system_prompt_changes_what_is_asked():
    trained = Trained(tiny.llama(), tiny.tokenizer())
    replies = {
        system: Chat(trained, system, max_new_tokens=12).ask("what is 3?")
        for system in (None, "count", "sing a song")
    }
    assert len(set(replies.values())) > 1


def test_a_model_of_plain_text_has_no_system_prompt_and_no_turns():
    trained = Trained(tiny.llama(), tiny.tokenizer(), kinds=("text",))
    with pytest.raises(ValueError, match="^system='be brief': this model continues plain text"):
        Chat(trained, "be brief")
    chat = Chat(trained, max_new_tokens=5)
    assert chat.ask("one") == chat.ask("one") and chat.messages == []


# --- parts of an answer


def handed_on(texts, stop_strings=()):
    parts = []
    stream = Stream(parts.append, stop_strings)
    seen = []
    for text in texts[:-1]:
        stream(text)
        seen.append("".join(parts))
    stream.end(texts[-1])
    return seen, "".join(parts)


def test_parts_come_as_they_are_made_and_join_to_the_text():
    assert handed_on(["a", "a b", "a b c", "a b c."]) == (["a", "a b", "a b c"], "a b c.")


def test_half_a_character_waits_for_its_rest():
    assert handed_on(["na\ufffd", "na\u00ef", "na\u00efve"]) == (["na", "na\u00ef"], "na\u00efve")


def test_a_character_that_never_comes_is_shown_at_the_end():
    assert handed_on(["a\ufffd", "a\ufffd"]) == (["a"], "a\ufffd")


@pytest.mark.parametrize("said, text", [(["a U", "a Use"], "a Use"), (["a U", "a User"], "a")])
def test_what_may_become_a_stop_string_waits(said, text):
    assert handed_on([*said, text], ["User:"]) == (["a"] * len(said), text)
