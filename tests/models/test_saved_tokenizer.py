"""What is saved of a tokenizer is read back by the Auto classes beside its model, or refused
before the first step.
"""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.models import load_tokenizer, saved_tokenizer
from chronicals.models.saved_tokenizer import MODULE, first_difference, save_tokenizer
from chronicals.training import ChronicalsTrainer

TEXT = "what is  12345 🙂?"


def qwen(size=300):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(
        vocab_size=size,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        **sizes,
        **heads,
    )
    return Qwen2ForCausalLM(config)


def of_words():
    """One that splits at blanks and knows words alone, which no class of transformers builds."""
    own = Tokenizer(models.WordLevel(unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.train_from_iterator(
        ["what is two and three ?"] * 3, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )


def of_bytes():
    """Byte-level BPE that keeps numbers whole, which Qwen2's class divides into digits."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet
    )
    own.train_from_iterator(["12345 what is 12345?"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", pad_token="</s>")


@pytest.mark.parametrize("make", [tiny.tokenizer, of_words, of_bytes])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizer_of_ones_own_is_read_back(make, trusted, tmp_path):
    """Beside a model whose family AutoTokenizer builds a class of its own for; also where it may
    run a model's code.
    """
    own = make()
    model = qwen()
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"] != own(TEXT)["input_ids"]
    save_tokenizer(own, tmp_path, model.config)
    read = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=trusted)
    assert read(TEXT)["input_ids"] == own(TEXT)["input_ids"] and first_difference(own, read) is None
    save_tokenizer(read, tmp_path, model.config)
    assert first_difference(own, AutoTokenizer.from_pretrained(tmp_path)) is None, "saved once more"


def test_one_that_is_read_back_already_is_left_as_it_is(tmp_path):
    save_tokenizer(tiny.tokenizer(), tmp_path, tiny.llama().config)
    assert not (tmp_path / f"{MODULE}.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_a_run_saves_what_it_was_trained_with(lora, tmp_path):
    own = tiny.tokenizer()
    qwen().save_pretrained(tmp_path / "base")
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    settings = runs.config(tmp_path, max_steps=2, use_lora=lora, use_fused_kernels=False)
    result = ChronicalsTrainer(model, own, settings).train(tiny.chat_rows(20))
    assert first_difference(own, AutoTokenizer.from_pretrained(result.model_dir)) is None


def test_what_cannot_be_read_back_ends_before_the_first_step(tmp_path, set_constants):
    class_of_its_model = ("Qwen2TokenizerFast", "TokenizersBackend")
    set_constants(saved_tokenizer, GENERIC=class_of_its_model, SOURCE="")
    said = r"tokenizer: \w+ beside a qwen2 model is saved as a tokenizer that AutoTokenizer reads otherwise: .*; give Pre"
    with pytest.raises(ConfigurationError, match=said):
        ChronicalsTrainer(qwen(), tiny.tokenizer(), runs.config(tmp_path)).train(tiny.chat_rows(20))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_base_is_read_as_its_settings_say(tmp_path, caplog):
    """With the generic class named, the tokenizer is the one of tokenizer.json."""
    own = of_bytes()
    qwen().save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    with caplog.at_level("WARNING"):
        read = load_tokenizer(tmp_path)
    assert first_difference(own, read) is None
    assert "that of tokenizer.json is taken, as tokenizer_config.json says" in caplog.text


@pytest.mark.parametrize("change", ["digits", "special", "template", "decoder"])
def test_differences_are_said(change):
    one = tiny.tokenizer()
    other = tiny.tokenizer()
    if change == "digits":
        other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    elif change == "special":
        other.pad_token = None
    elif change == "template":
        other.chat_template = other.chat_template + " "
    else:
        other.backend_tokenizer.decoder = decoders.Fuse()
    assert first_difference(one, tiny.tokenizer()) is None
    assert first_difference(one, other) is not None
