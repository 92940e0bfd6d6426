"""The card of a trained model says base, settings and losses, and no folder of this machine."""

import yaml

from chronicals.training.run.model_card import model_card

FIELDS = {"objective": "sft", "lora_rank": 8, "max_steps": None, "adam_beta1": 0.9}


def front(card):
    return yaml.safe_load(card.split("---")[1])


def test_a_card_says_what_was_trained_and_from_what():
    card = model_card("run", "some/model", FIELDS, {"held-out loss": "1.2500"}, True)
    assert front(card) == {
        "library_name": "peft",
        "base_model": "some/model",
        "tags": ["chronicals", "sft"],
    }
    assert "| lora_rank | 8 |" in card and "| held-out loss | 1.2500 |" in card
    assert "max_steps" not in card and "adam_beta1" not in card


def test_a_folder_of_this_machine_is_called_by_its_last_name(tmp_path):
    (tmp_path / "base").mkdir()
    card = model_card("run", str(tmp_path / "base"), FIELDS, {}, False)
    assert str(tmp_path) not in card and "`base`" in card
    assert front(card)["library_name"] == "transformers" and "base_model" not in front(card)
