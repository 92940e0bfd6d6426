"""What the script of recipes keeps of a run, and of one that ends with an error."""

import logging

import pytest
import scripts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script():
    return scripts.script("recipes_on_card")


def test_the_words_of_the_allocator_stay_with_an_error(script):
    """The error that users see does not say what is reserved, and in which pools."""
    try:
        try:
            raise MemoryError("1.20 GiB is reserved by PyTorch but unallocated")
        except MemoryError as short:
            raise RuntimeError("out of memory") from short
    except RuntimeError as error:
        found = script.failure(error)
    assert found["error"] == "RuntimeError: out of memory"
    assert found["cause"] == "MemoryError: 1.20 GiB is reserved by PyTorch but unallocated"
    assert "test_the_words_of_the_allocator" in found["trace"]


def test_seconds_of_the_stages_and_what_was_said(script):
    watch = script.Watch(3, 1.0)
    watch.at |= {"started": 10.0, "model": 12.5, "step 1": 20.0}
    records = script._Records()
    with records:
        logging.getLogger("chronicals.policies").info("fit: settings: there is no card")
        logging.getLogger("chronicals.policies").info("learning rate: 1")
    found = script.noted(watch, records)
    assert found["seconds"] == {"model": 2.5, "step 1": 7.5}
    assert found["said"] == ["fit: settings: there is no card"]


def test_presets_train_three_steps_of_few_packs(script):
    made = script.presets()
    assert len(made) == 15 and {recipe.steps for recipe in made} == {3}
    assert {recipe.packs for recipe in made if recipe.model in script.SMALL} == {16}
    assert {recipe.packs for recipe in made if recipe.model not in script.SMALL} == {8}
