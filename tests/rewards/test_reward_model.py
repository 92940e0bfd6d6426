"""Reward models as rewards: the scores of transformers' class over the tokens of training."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import tiny
from chronicals.config import ConfigurationError
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import attach_score, load_model, score_of
from chronicals.rewards import Scored, reward_model
from chronicals.saving import save_model
from chronicals.saving.model_files import text_files

PAD = 1
"""A token with which no answer of the tiny tokenizer ends."""

MESSAGES = [{"role": "user", "content": "what is 7?"}]
ANSWERS = ["the answer to 7", "very very long, that answer", "14"]


def chats():
    completions = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    return Scored([MESSAGES] * 3, completions, [[1]] * 3, {}, [0, 0, 0])


def texts():
    completions = [f" {text}" for text in ANSWERS]
    return Scored(["what is 7?"] * 3, completions, [[1]] * 3, {}, [0, 0, 0])


def ids_of_text(text):
    """Prompt, answer and the end of the text."""
    return [*tokenizer()(f"what is 7? {text}")["input_ids"], tokenizer().eos_token_id]


def ids_of_chat(text):
    conversation = [*MESSAGES, {"role": "assistant", "content": text}]
    return tokenizer().apply_chat_template(conversation, return_dict=False)


def tokenizer():
    loaded = tiny.tokenizer()
    loaded.pad_token = loaded.convert_ids_to_tokens(PAD)
    return loaded


def with_score(model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        attach_score(model, PAD).weight.data.mul_(10)
    return model


def saved(folder, model):
    """The folder of a run, with its model."""
    save_model(folder / "model", model, text_files(model, tokenizer()), {})
    return folder


@pytest.fixture
def folder(tmp_path):
    """A reward model as a run of ours writes it."""
    return saved(tmp_path, with_score(tiny.llama()))


def alone(model, ids):
    """The score of transformers' class for a row by itself."""
    return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


def test_the_scores_are_those_of_each_answer_alone(folder, rewards_of):
    rewards = rewards_of(str(folder), mixed_precision="fp32")
    assert rewards.names == [folder.name] and rewards.columns_wanted == set()
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    for rows, ids in ((chats(), ids_of_chat), (texts(), ids_of_text)):
        scores = rewards.score(rows).values[:, 0]
        expected = torch.tensor([alone(model, ids(text)) for text in ANSWERS]).double()
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
        assert scores.unique().numel() == 3


def test_an_adapter_is_loaded_with_its_base(tmp_path, rewards_of):
    tiny.llama().save_pretrained(tmp_path / "base")
    model = with_score(load_model(tmp_path / "base", torch.float32))
    apply_lora(model, LoRAConfig(rank=4, alpha=8.0, dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    rewards = rewards_of(str(saved(tmp_path / "run", model)), mixed_precision="fp32")
    expected = []
    for text in ANSWERS:
        states = model.model(torch.tensor([ids_of_text(text)])).last_hidden_state[:, -1]
        expected.append(score_of(model).of(states).item())
    scores = rewards.score(texts()).values[:, 0]
    torch.testing.assert_close(scores, torch.tensor(expected).double(), rtol=1e-4, atol=1e-5)


def test_rows_are_scored_in_passes_of_a_bounded_size(folder, rewards_of, monkeypatch):
    whole = rewards_of(str(folder), mixed_precision="fp32").score(chats()).values
    monkeypatch.setattr(reward_model, "TOKENS_AT_ONCE", 1)
    assert reward_model._of_similar_length({0: [1], 1: [1, 2], 2: [3]}) == [[1], [0], [2]]
    single = rewards_of(str(folder), mixed_precision="fp32").score(chats()).values
    torch.testing.assert_close(single, whole, rtol=1e-5, atol=1e-6)


def test_an_answer_longer_than_the_model_reads_has_no_score(folder, rewards_of):
    rewards = rewards_of(str(folder), mixed_precision="fp32")
    longest = len(ids_of_text(ANSWERS[1]))
    rewards._rewards[folder.name]._tokenizer.tokenizer.model_max_length = longest - 1
    outcome = rewards.score(texts())
    assert outcome.dropped.tolist() == [False, True, False]
    said = f"it has {longest} tokens, and the model reads {longest - 1}"
    assert outcome.failures[0].reason == said


def test_a_language_model_is_no_reward(tmp_path, rewards_of):
    tiny.llama().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigurationError, match="is no reward model, that is, no sequence class"):
        rewards_of(str(tmp_path / "base"))
    with pytest.raises(ConfigurationError, match="^rewards='.*/nowhere': "):
        rewards_of(str(tmp_path / "nowhere"))
