"""What is trained, read back as text: every answer with its stop token and nothing else, for
every template taken.
"""

import importlib.metadata
import importlib.util
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import runs
import tiny
from chronicals.config import ChronicalsConfig
from chronicals.data import DataError, TemplateError, Tokenizer, build_store, stop_token_ids
from chronicals.data.kinds.rows import normalise
from chronicals.data.tokens.batch_encoding import BatchEncoder
from chronicals.data.tokens.chat_template import Dialect
from chronicals.data.tokens.tokenizer_training import train_tokenizer
from chronicals.training.run.finish import TAUGHT
from data import stock_templates
from data.stock_templates import (
    KINDS,
    OTHERWISE_CONTINUED,
    expected_refusal,
    saying,
    shipped,
    with_template,
)
from preferences import rows

ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + "
    "m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('no system message') }}{% endif %}{% endfor %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
OTHER_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
END_ONLY_AT_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TAKEN = {
    "cohere": ("", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": ("", "<|END_RESPONSE|>"),
    "diffusion_gemma": ("", "<turn|>"),
    "gemma": ("", "<end_of_turn>"),
    "gemma3": ("", "<end_of_turn>"),
    "gemma4": ("", "<turn|>"),
    "gemma4_v2": ("", "<turn|>"),
    "gemma4_v3": ("", "<turn|>"),
    "gemma4_v4": ("", "<turn|>"),
    "gemma4_v5": ("", "<turn|>"),
    "idefics3": (" ", "<end_of_utterance>"),
    "gptoss": ("<|channel|>final<|message|>", "<|return|>"),
    "lfm2": ("", "<|im_end|>"),
    "lfm2_2_5": ("", "<|im_end|>"),
    "lfm2_2_5_v2": ("", "<|im_end|>"),
    "lfm2_2_5_vl": ("", "<|im_end|>"),
    "lfm2_v2": ("", "<|im_end|>"),
    "llama3": ("", "<|eot_id|>"),
    "llama3_1": ("", "<|eot_id|>"),
    "llama3_2": ("", "<|eot_id|>"),
    "llava_next": (" ", "</s>"),
    "muse_glimmer": (" to=user<|message|>", "<|eot|>"),
    "phi3": ("", "<|end|>"),
    "phi3_5": ("", "<|end|>"),
    "qwen2_5": ("", "<|im_end|>"),
    "qwen2_5_vl": ("", "<|im_end|>"),
    "qwen3": ("<think>\n\n</think>\n\n", "<|im_end|>"),
    "qwen3_5_nothink": ("", "<|im_end|>"),
    "qwen3_5_think": ("\n</think>\n\n", "<|im_end|>"),
    "qwen3_6": ("\n</think>\n\n", "<|im_end|>"),
    "qwen3_8": ("\n</think>\n\n", "<|im_end|>"),
    "qwen3_instruct_2507": ("", "<|im_end|>"),
    "qwen3_vl": ("", "<|im_end|>"),
    "smolvlm": (" ", "<end_of_utterance>"),
}
"""Templates of trl that are taken: what the model itself writes before its answer, and its stop
token.
"""


def spans(ids, trained):
    """The runs of trained tokens."""
    assert len(ids) == len(trained)
    return [ids[start:end] for start, end in stock_templates.spans(trained)]


def trained_texts(tokenizer, record):
    ids, trained = Tokenizer(tokenizer).encode(record, "row 1")
    return [tokenizer.decode(span, skip_special_tokens=False) for span in spans(ids, trained)]


def conversation(kind):
    turns = 1 if kind in ("single", "system") else random.randint(2, 5)
    system = [{"role": "system", "content": saying()}] if kind == "system" else []
    return [
        *system,
        *(
            {"role": role, "content": saying()}
            for _ in range(turns)
            for role in ("user", "assistant")
        ),
    ]


def answers(messages):
    return [message["content"] for message in messages if message["role"] == "assistant"]


# --- conversations
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["single", "turns", "system"])
def test_chatml_trains_answers_and_their_stop(kind):
    for _ in range(20):
        messages = conversation(kind)
        assert trained_texts(tiny.tokenizer(), {"messages": messages}) == [
            f"{a}<|im_end|>" for a in answers(messages)
        ]


@pytest.mark.parametrize("kind", ["single", "turns"])
@pytest.mark.parametrize(
    ("template", "opening"), [(ZEPHYR, ""), (MISTRAL, " ")], ids=["zephyr", "mistral"]
)
def test_a_stop_that_is_eos_and_padding_is_trained(template, opening, kind):
    tokenizer = with_template(template, eos_token="</s>", pad_token="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    messages = conversation(kind)
    assert trained_texts(tokenizer, {"messages": messages}) == [
        f"{opening}{a}</s>" for a in answers(messages)
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, kind in itertools.product(TAKEN, ["single", "turns", "system"])
        if not expected_refusal(name, kind) and (name, kind) != ("qwen3", "turns")
    ],
)
def test_templates_of_trl_train_answers_and_their_stop(name, kind):
    """Except for Qwen3's earlier answers, which have a test of their own."""
    opening, stop = TAKEN[name]
    messages = stock_templates.record(kind)["messages"]
    texts = trained_texts(with_template(shipped(name)), {"messages": messages})
    assert texts == [f"{opening}{answer}{stop}" for answer in answers(messages)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", stock_templates.names())
def test_every_template_of_trl_is_taken_or_refused_as_listed(name, kind):
    for _ in range(2):
        reason = stock_templates.refusal(name, stock_templates.record(kind))
        expected = expected_refusal(name, kind)
        assert (reason is None) == (expected is None), reason
        assert expected is None or re.search(expected, reason), reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [name for name in stock_templates.names() if stock_templates.twin(name)]
)
def test_masks_equal_those_of_the_marked_twin_or_differ_as_listed(name, kind):
    if not expected_refusal(name, kind):
        differences = stock_templates.differences(name, stock_templates.record(kind))
        assert differences == set(stock_templates.expected_differences(name, kind))


@pytest.mark.parametrize("kind", ["tools", "thinking", "thinking turns"])
@pytest.mark.parametrize("name", stock_templates.names())
def test_calls_and_thoughts_are_trained_and_what_others_say_is_not(name, kind):
    if expected_refusal(name, kind):
        return
    tokenizer = with_template(shipped(name))
    row = stock_templates.record(kind)
    texts = trained_texts(tokenizer, row)
    said = [message for message in row["messages"] if message["role"] == "assistant"]
    assert len(texts) == len(said)
    for text, message in zip(texts, said):
        assert message["content"] in text
        assert message.get("reasoning_content", "") in text
        assert "measure" in text or "tool_calls" not in message
        assert tokenizer.added_tokens_decoder[
            tokenizer(text, add_special_tokens=False)["input_ids"][-1]
        ].special
        others = [m["content"] for m in row["messages"] if m is not message and m["content"]]
        assert not any(other in text for other in others if len(other) > 12)


def test_earlier_answers_of_qwen3_are_trained_as_rendered_or_refused_for_a_true_reason():
    """Earlier answers lose their empty <think> block, but <|im_end|> closes every one of them."""
    tokenizer = with_template(shipped("qwen3"))
    messages = conversation("turns")
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert all(f"{answer}<|im_end|>" in rendered for answer in answers(messages))
    try:
        texts = trained_texts(tokenizer, {"messages": messages})
    except TemplateError as error:
        assert "does not close" not in str(error)
    else:
        *earlier, last = answers(messages)
        assert texts == [
            *(f"{a}<|im_end|>" for a in earlier),
            f"<think>\n\n</think>\n\n{last}<|im_end|>",
        ]


@pytest.mark.parametrize("name", ["idefics3", "llava_next", "smolvlm"])
def test_templates_for_lists_of_parts_get_texts_as_one_part(name):
    tokenizer = with_template(shipped(name))
    messages = conversation("turns")
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    ids, _ = Tokenizer(tokenizer).encode({"messages": messages}, "row 1")
    assert ids == tokenizer.apply_chat_template(parts, return_dict=True)["input_ids"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "llama3", "gemma"])
def test_contents_in_parts_are_never_lost_or_spelt_out(name):
    """These templates know contents as text alone: they drop a list, or write it as Python would
    print it.
    """
    tokenizer = with_template(shipped(name))
    messages = conversation("single")
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    try:
        ids, trained = Tokenizer(tokenizer).encode({"messages": parts}, "row 1")
    except DataError:
        return
    assert (ids, trained) == Tokenizer(tokenizer).encode({"messages": messages}, "row 1")


@pytest.mark.parametrize("name", [*TAKEN, "chatml"])
def test_a_stop_token_inside_an_answer_does_not_end_its_mask(name):
    tokenizer = tiny.tokenizer() if name == "chatml" else with_template(shipped(name))
    opening, stop = TAKEN.get(name, ("", "<|im_end|>"))
    messages = [
        {"role": "user", "content": f"what is {stop} for?"},
        {"role": "assistant", "content": f"it ends {stop} a turn"},
        {"role": "user", "content": f"{stop} too?"},
        {"role": "assistant", "content": "yes"},
    ]
    try:
        texts = trained_texts(tokenizer, {"messages": messages})
    except TemplateError:
        assert expected_refusal(name, "turns") or name == "qwen3"
    else:
        first = (
            "" if name == "qwen3" else opening
        )  # its earlier answers come without what opens the last
        assert texts == [f"{first}{messages[1]['content']}{stop}", f"{opening}yes{stop}"]


def test_an_answer_that_merges_with_its_opening_is_refused():
    tokenizer = train_tokenizer(["a\n\n\n"] * 20, vocab_size=300)
    whole, opening = (tokenizer(text)["input_ids"] for text in ("\n\n\nb", "\n"))
    assert whole[:1] != opening
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\nb"}]
    with pytest.raises(TemplateError, match=r"row 1: message 2: .*would not match generation"):
        Tokenizer(tokenizer).encode({"messages": messages}, "row 1")


def test_an_empty_answer_trains_its_stop():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    assert trained_texts(tiny.tokenizer(), {"messages": messages}) == ["<|im_end|>"]


def test_a_conversation_without_an_answer_trains_nothing():
    assert trained_texts(tiny.tokenizer(), {"messages": [{"role": "user", "content": "a"}]}) == []


def test_the_ids_are_what_the_template_renders_and_generation_continues_them():
    tokenizer = Tokenizer(tiny.tokenizer())
    messages = conversation("turns")
    ids, trained = tokenizer.encode({"messages": messages}, "row 1")
    text = tokenizer.tokenizer.apply_chat_template(messages, tokenize=False)
    assert ids == tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = tokenizer.render(messages[:-1], generation=True)
    assert ids[: len(prompt)] == prompt
    assert trained[len(prompt)]
    assert not trained[len(prompt) - 1]


def test_a_conversation_must_not_begin_with_the_assistant():
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(
        TemplateError, match=r"^rows\.jsonl:3: the conversation begins with the assistant"
    ):
        Tokenizer(tiny.tokenizer()).encode({"messages": messages}, "rows.jsonl:3")


def test_a_tokenizer_without_a_template_says_what_to_do():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(
        TemplateError, match=r"^row 1: .*no chat template; set tokenizer\.chat_template.*completion"
    ):
        Tokenizer(tokenizer).encode(tiny.chat_rows(1)[0], "row 1")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            ENDLESS,
            "writes no special token after an assistant's answer, so the model would never learn "
            "to stop",
        ),
        (OTHER_PROMPT, OTHERWISE_CONTINUED),
        (
            END_ONLY_AT_LAST,
            r"message 2: the stop token '<\|im_end\|>' does not close this assistant turn",
        ),
    ],
    ids=["endless", "other prompt", "end only at last"],
)
def test_templates_that_cannot_be_masked_are_refused_by_reason(template, reason):
    with pytest.raises(TemplateError, match=reason):
        Tokenizer(with_template(template)).encode({"messages": conversation("turns")}, "row 1")


def test_what_the_template_raises_is_passed_on_with_the_row():
    with pytest.raises(
        TemplateError,
        match=r"^row 9: the chat template refuses the conversation: no system message",
    ):
        Tokenizer(with_template(MISTRAL, eos_token="</s>")).encode(
            {"messages": conversation("system")}, "row 9"
        )


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("refused", [(), (0,), (3, 4), tuple(range(7))])
def test_many_conversations_are_rendered_as_each_by_itself(refused, generation):
    """Whichever of them the template refuses, with tools and without."""
    template = Tokenizer(with_template(MISTRAL, eos_token="</s>")).template
    asked = []
    for n in range(7):
        messages = [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": f"forty {n}"},
        ]
        first = [{"role": "system", "content": "be kind"}] if n in refused else []
        asked.append((first + messages, [{"name": "f"}] if n % 3 == 1 else None, f"row {n}"))
    for n, (text, one) in enumerate(zip(template.texts(asked, generation), asked, strict=True)):
        if n in refused:
            assert (
                isinstance(text, TemplateError)
                and f"row {n}: " in str(text)
                and "no system message" in str(text)
            )
        else:
            assert text == template.text(one[0], one[1], generation)
    assert template.texts([], generation) == []


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("a", "must be a list"),
        ([], "at least one message"),
        (None, "unknown kind of row"),
        (["a"], "message 1 must be an object"),
        ([{"role": "user", "content": "a"}, {"content": "a"}], "message 2 has no role"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant"}],
            r"message 2 \(assistant\) has no content",
        ),
    ],
)
def test_malformed_messages_are_named(messages, reason):
    with pytest.raises(DataError, match=f"^row 5: .*{reason}"):
        Tokenizer(tiny.tokenizer()).encode({"messages": messages}, "row 5")


# --- prompts, completions and texts
# ----------------------------------------------------------------------------------


def marking(before="", after=""):
    """A tokenizer that puts special tokens around every text, as those of Llama and T5 do."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    marks = [(text, tokenizer.convert_tokens_to_ids(text)) for text in (before, after) if text]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=marks
    )
    assert tokenizer("a")["input_ids"] == [
        *(tokenizer.convert_tokens_to_ids([before]) if before else []),
        *tokenizer("a", add_special_tokens=False)["input_ids"],
        *(tokenizer.convert_tokens_to_ids([after]) if after else []),
    ]
    return tokenizer


MARKS = [("", ""), ("<bos>", ""), ("<bos>", "<|endoftext|>"), ("", "<|endoftext|>")]


@pytest.mark.parametrize("marks", MARKS)
def test_a_completion_and_its_end_are_trained_and_its_prompt_is_not(marks):
    tokenizer = marking(*marks)
    prompt = saying()
    completion = saying()
    ids, trained = Tokenizer(tokenizer).encode(
        {"prompt": prompt, "completion": completion}, "row 1"
    )
    (span,) = spans(ids, trained)
    assert tokenizer.decode(span, skip_special_tokens=False) == f"{completion}<|endoftext|>"
    assert (
        tokenizer.decode(ids, skip_special_tokens=False)
        == f"{marks[0]}{prompt}{completion}<|endoftext|>"
    )


@pytest.mark.parametrize("marks", MARKS)
def test_a_prompt_is_tokenised_as_it_will_be_asked(marks):
    tokenizer = Tokenizer(marking(*marks))
    prompt = saying()
    ids, trained = tokenizer.encode({"prompt": prompt, "completion": saying()}, "row 1")
    assert ids[: trained.index(True)] == tokenizer.prompt(prompt)


def test_a_completion_that_brings_its_own_end_has_one():
    tokenizer = tiny.tokenizer()
    row = {"prompt": "a", "completion": "b<|endoftext|>"}
    assert trained_texts(tokenizer, row) == ["b<|endoftext|>"]


def test_a_conversation_as_prompt_and_completion_trains_the_completion_alone():
    messages = conversation("turns")
    row = {"prompt": messages[:-1], "completion": messages[-1:]}
    ids, _ = Tokenizer(tiny.tokenizer()).encode(row, "row 1")
    assert ids == Tokenizer(tiny.tokenizer()).encode({"messages": messages}, "row 1")[0]
    assert trained_texts(tiny.tokenizer(), row) == [f"{messages[-1]['content']}<|im_end|>"]


@pytest.mark.parametrize("end", ["", "<|endoftext|>"])
@pytest.mark.parametrize("marks", MARKS)
def test_a_text_is_trained_whole_and_ends_once(marks, end):
    tokenizer = marking(*marks)
    text = saying()
    ids, trained = Tokenizer(tokenizer).encode({"text": text + end}, "row 1")
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{marks[0]}{text}<|endoftext|>"
    assert trained == [True] * len(ids)


@pytest.mark.parametrize(
    "row", [{"text": "<bos>hello"}, {"prompt": "<bos>hello", "completion": "b"}]
)
def test_a_text_that_brings_its_own_beginning_has_one(row):
    tokenizer = marking("<bos>")
    ids, _ = Tokenizer(tokenizer).encode(row, "row 1")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": "a", "completion": "b"}])
def test_a_tokenizer_without_an_end_of_text_is_refused(row):
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"^row 1: the tokenizer has no eos_token"):
        Tokenizer(tokenizer).encode(row, "row 1")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": 3.5}, "text must be text, this is float"),
        ({"text": ["a"]}, "text must be text, this is list"),
        ({"prompt": 3, "completion": "a"}, "prompt must be a list of messages, this is int"),
        ({"prompt": "a", "completion": 3}, "completion must be text, this is int"),
        (
            {"prompt": "a", "completion": '[{"role": "user", "content": "a"}]'},
            "completion must be text, this is list",
        ),
        (
            {"prompt": '[{"role": "boss", "content": "a"}]', "completion": []},
            "message 1: unknown role 'boss'",
        ),
    ],
)
def test_fields_that_are_no_text_are_named(row, reason):
    with pytest.raises(DataError, match=f"^row 2: {reason}"):
        Tokenizer(tiny.tokenizer()).encode(row, "row 2")


@pytest.mark.parametrize("row", [{"text": "a\ud800b"}, {"prompt": "a", "completion": "\udfff"}])
def test_text_that_no_tokenizer_takes_is_a_data_error(row):
    """JSON may hold half of a surrogate pair."""
    with pytest.raises(DataError, match=r"^row 2: "):
        Tokenizer(tiny.tokenizer()).encode(row, "row 2")


# --- token ids
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, np.array])
def test_labels_are_the_mask_of_token_ids(make):
    ids = [random.randrange(300) for _ in range(30)]
    mask = [random.random() < 0.5 for _ in ids]
    labels = make([token if kept else -100 for token, kept in zip(ids, mask)])
    got, trained = Tokenizer(tiny.tokenizer()).encode(
        {"input_ids": make(ids), "labels": labels}, "row 1"
    )
    assert list(got) == ids
    assert list(trained) == mask


@pytest.mark.parametrize(
    "row", [{"input_ids": [3, 1, 2]}, {"input_ids": [3, 1, 2], "labels": None}]
)
def test_token_ids_without_labels_are_trained_whole(row):
    assert Tokenizer(tiny.tokenizer()).encode(row, "row 1") == ([3, 1, 2], [True] * 3)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([1, 2], "3 input_ids but 2 labels; they must be aligned"),
        ([2, 3, -100], r"labels\[0\]=2 is neither -100 nor input_ids\[0\]=1"),
        ([1, 2, 0], r"labels\[2\]=0 is neither"),
    ],
)
def test_labels_that_are_not_aligned_are_refused(labels, reason):
    with pytest.raises(DataError, match=f"^row 6: {reason}"):
        Tokenizer(tiny.tokenizer()).encode({"input_ids": [1, 2, 3], "labels": labels}, "row 6")


@pytest.mark.parametrize("train_on", ["answers", "all"])
@pytest.mark.parametrize(("left", "right"), [(0, 3), (2, 0), (1, 4), (0, 0)])
@pytest.mark.parametrize("kind", [int, bool])
def test_padding_under_an_attention_mask_is_left_out(train_on, left, right, kind):
    """Also where labels would train it: padding is often the token that ends a text."""
    tokenizer = Tokenizer(tiny.tokenizer(), train_on)
    pad = tokenizer.tokenizer.eos_token_id
    ids = [5, 6, 7]
    row = {"input_ids": [pad] * left + ids + [pad] * right}
    row["attention_mask"] = [kind(0)] * left + [kind(1)] * 3 + [kind(0)] * right
    assert tokenizer.encode(row, "row 1") == (ids, [True] * 3)
    assert tokenizer.encode({**row, "labels": row["input_ids"]}, "row 1") == (ids, [True] * 3)
    assert tokenizer.encode({**row, "attention_mask": [0] * (left + right + 3)}, "row 1") == (
        [],
        [],
    )


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([1, 0, 1], r"attention_mask\[1\] is 0 between ones"),
        ([1, 1], "attention_mask must hold a 0 or a 1 for each of 3 input_ids"),
        ([1, 2, 2], "attention_mask must hold a 0 or a 1"),
        ([1.0, 1.0, 0.0], "attention_mask must hold a 0 or a 1"),
    ],
)
def test_masks_that_are_no_padding_are_refused(mask, reason):
    with pytest.raises(DataError, match=f"^row 6: {reason}"):
        Tokenizer(tiny.tokenizer()).encode(
            {"input_ids": [1, 2, 3], "attention_mask": mask}, "row 6"
        )


@pytest.mark.parametrize(
    "ids", [None, "hello", [1, None], [1, "2"], [1.5, 2.0], [[1, 2]], [1, -5], [1, 2**31]]
)
def test_what_is_no_list_of_token_ids_is_a_data_error(ids):
    with pytest.raises(DataError, match=r"^row 2: "):
        Tokenizer(tiny.tokenizer()).encode({"input_ids": ids}, "row 2")


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"prompt": "a", "chosen": "b", "rejected": "c"}])
def test_kinds_that_cannot_be_trained_on_are_data_errors(row):
    with pytest.raises(DataError, match=r"^row 2: holds a p") as error:
        Tokenizer(tiny.tokenizer()).encode(row, "row 2")
    assert error.value.rule == "unusable_kind"


def test_instructions_are_conversations():
    tokenizer = Tokenizer(tiny.tokenizer())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.encode({"instruction": "a", "output": "b"}, "row 1") == tokenizer.encode(
        {"messages": messages}, "row 1"
    )


# --- objectives and stops
# --------------------------------------------------------------------------------------------

EVERY_KIND = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"text": "a"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, -100]},
]


@pytest.mark.parametrize("row", EVERY_KIND)
def test_pretraining_trains_every_token_of_every_kind(row):
    ids, trained = Tokenizer(tiny.tokenizer(), "all").encode(row, "row 1")
    assert ids == Tokenizer(tiny.tokenizer()).encode(row, "row 1")[0]
    assert trained == [True] * len(ids)


def named(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(ids)


def test_generation_stops_where_training_did_and_at_the_end_of_text():
    tokenizer = tiny.tokenizer()
    assert named(tokenizer, stop_token_ids(tokenizer)) == ["<|im_end|>", "<|endoftext|>"]
    tokenizer.eos_token = None
    assert named(tokenizer, stop_token_ids(tokenizer)) == ["<|im_end|>"]
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    assert named(tokenizer, stop_token_ids(tokenizer)) == ["<|endoftext|>"]
    tokenizer = with_template(ZEPHYR, eos_token="</s>", pad_token="</s>")
    assert named(tokenizer, stop_token_ids(tokenizer)) == ["</s>"]


@pytest.mark.parametrize("name", TAKEN)
def test_the_stop_token_of_a_template_is_where_its_answers_end(name):
    tokenizer = with_template(shipped(name))
    assert named(tokenizer, stop_token_ids(tokenizer)) == [TAKEN[name][1], "<|endoftext|>"]
    ids, trained = Tokenizer(tokenizer).encode({"messages": conversation("single")}, "row 1")
    assert spans(ids, trained)[0][-1] == stop_token_ids(tokenizer)[0]


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({}, "answers"),
        ({"objective": "pretraining"}, "all"),
        ({"train_on": "all"}, "all"),
        ({"objective": "pretraining", "train_on": "answers"}, "answers"),
    ],
)
def test_what_is_trained_is_apart_from_the_objective(fields, trained):
    row = {"prompt": "a question", "completion": " and its answer"}
    configured = Tokenizer.configured(tiny.tokenizer(), ChronicalsConfig(**fields))
    expected = Tokenizer(tiny.tokenizer(), trained)
    assert configured.encode(row, "row 1") == expected.encode(row, "row 1")
    assert configured.fingerprint() == expected.fingerprint()
    assert all(configured.encode(row, "row 1")[1]) is (trained == "all")


def test_pretraining_needs_no_mask_and_so_no_stop():
    """A template without a stop token can be pretrained on; only its rendering is used."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    row = {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "world"},
        ]
    }
    ids, trained = Tokenizer(tokenizer, "all").encode(row, "row 1")
    assert tokenizer.decode(ids) == "helloworld"
    assert all(trained)
    with pytest.raises(TemplateError):
        Tokenizer(tokenizer).encode(row, "row 1")


@pytest.mark.slow
def test_the_documentation_has_the_table_that_the_script_writes():
    pytest.importorskip("trl")
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("templates", root / "benchmarks" / "templates.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (root / "docs" / "templates.md").read_text()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("trl", "transformers")]
    if " and ".join(versions) not in " ".join(written.split()):
        pytest.skip("written with another trl or transformers")

    def table(page):
        return [line for line in page.splitlines() if line.startswith("|")]

    assert table(script.page()) == table(written), "run python benchmarks/templates.py"


def test_a_message_is_formed_without_nulls_and_with_its_thoughts_under_both_names():
    message = {"role": "assistant", "content": None, "reasoning": "Hm.", "train": True}
    assert Dialect().message(message) == {
        "role": "assistant",
        "thinking": "Hm.",
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    }


# --- what a template writes behind the stop token of an answer


CHATML = ["qwen3_instruct_2507", "qwen2_5_vl", "lfm2", "smolvlm"]
"""Templates after whose stop token a newline follows, and whose twins differ from ours in
nothing else.
"""

UNCALLED_KINDS = ["single", "turns", "system"]


@pytest.mark.parametrize("kind", UNCALLED_KINDS)
@pytest.mark.parametrize("name", CHATML)
def test_masks_are_those_of_trl(name, kind):
    """Of the marked templates that TRL trains answers by; without the field they differ by the
    newline.
    """
    if name not in stock_templates.names():
        pytest.skip(f"this trl has no {name}")
    row = stock_templates.record(kind)
    assert stock_templates.differences(name, row) == {"trains '\\n' after"}
    assert stock_templates.differences(name, row, train_after_stop=True) == set()


def test_all_that_follows_the_last_answer_is_trained():
    name = "phi3"
    if name not in stock_templates.names():
        pytest.skip("this trl has no phi3")
    row = stock_templates.record("turns")
    assert "trains '\\n<|endoftext|>' after" in stock_templates.differences(name, row)
    assert stock_templates.differences(name, row, train_after_stop=True) == set()


def test_a_completion_is_trained_to_its_end():
    """As TRL masks prompts and completions: everything behind the prompt."""
    tokenizer = tiny.tokenizer()
    prompt = [{"role": "user", "content": "what is the answer?"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "forty two"}]}
    _, trained = Tokenizer(tokenizer, train_after_stop=True).encode(row, "row 1")
    begun = len(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )
    assert trained == [False] * begun + [True] * (len(trained) - begun)
    _, without = Tokenizer(tokenizer).encode(row, "row 1")
    assert sum(trained) == sum(without) + 1


@pytest.mark.parametrize("kind", UNCALLED_KINDS)
def test_many_rows_at_once_are_masked_alike(kind):
    name = "qwen3_instruct_2507"
    if name not in stock_templates.names():
        pytest.skip(f"this trl has no {name}")
    encoder = Tokenizer(with_template(stock_templates.shipped(name)), train_after_stop=True)
    given = [normalise(stock_templates.record(kind), "chat", f"row {n}") for n in range(20)]
    wheres = [f"row {n}" for n in range(20)]
    for row, where, (ids, trained) in zip(
        given, wheres, BatchEncoder(encoder).encode_batch(given, wheres), strict=True
    ):
        expected_ids, expected = encoder.encode_normalised(row, where)
        assert ids.tolist() == expected_ids and trained.astype(bool).tolist() == expected


def test_what_users_say_is_masked_as_before():
    row = {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "world"},
        ]
    }
    for options in ({"train_on_roles": ["user"]}, {"train_on": "all"}):
        with_it = Tokenizer(tiny.tokenizer(), train_after_stop=True, **options).encode(row, "row 1")
        assert with_it == Tokenizer(tiny.tokenizer(), **options).encode(row, "row 1")


def test_stores_have_names_of_their_own():
    names = [
        Tokenizer(tiny.tokenizer(), train_after_stop=after).fingerprint() for after in (False, True)
    ]
    assert names[0] != names[1]


def test_a_run_has_it(tmp_path):
    """Each answer of a preference has a target more, and whoever evaluates the model counts it,
    too.
    """
    configs = [runs.config(tmp_path, train_after_stop=after) for after in (False, True)]
    encoders = [
        Tokenizer.configured(tiny.tokenizer(), config, ["preference"]) for config in configs
    ]
    stores = [
        build_store(rows(12), encoder, 128, tmp_path / encoder.fingerprint())
        for encoder in encoders
    ]
    answers = stores[0].targets > 0
    assert np.array_equal(stores[1].targets[answers], stores[0].targets[answers] + 1)
    assert "train_after_stop" in TAUGHT
