"""A list is read in one way everywhere: repeated or with commas as a flag, as a text or a list
of YAML in a recipe.
"""

import dataclasses
import shlex
import typing

import pytest
import yaml
from typer.testing import CliRunner

from chronicals.cli.app import app
from chronicals.cli.options import flag
from chronicals.cli.wording import Wording
from chronicals.config import ChronicalsConfig, ConfigurationError, Recipe
from chronicals.config.sections import SECTIONS_FIELD
from chronicals.config.values import as_one_value, split_values

HINTS = typing.get_type_hints(Recipe)
GIVEN = {"model": "m", "data": "d"}


def parts_of(hint):
    """A type and, of a union, all of its members."""
    return [hint, *(inner for part in typing.get_args(hint) for inner in parts_of(part))]


def kinds_of(name):
    return {typing.get_origin(part) or part for part in parts_of(HINTS[name])}


LISTED = [name for name in HINTS if kinds_of(name) & {list, dict} and name != SECTIONS_FIELD]
FLOATS = [name for name in HINTS if float in kinds_of(name) and name not in LISTED]


def two_values(name):
    """Two values that a field of this type takes."""
    choices = [
        typing.get_args(part)
        for part in parts_of(HINTS[name])
        if typing.get_origin(part) is typing.Literal
    ]
    if choices:
        return [choices[0][0], choices[0][2]]
    if list not in kinds_of(name):
        texts = dict[str, str] in parts_of(HINTS[name])
        return ["question=prompt", "reply=completion"] if texts else ["q_proj=8", "up_proj=4"]
    return ["0", "2"] if str not in kinds_of(name) else ["q_proj", "mlp.up_proj"]


def of_flags(*arguments):
    """The recipe that the command line makes of these arguments, without what comes after it."""
    made = []
    real = Recipe.given

    def recorded(*given, **flags):
        made.append(real(*given, **flags))
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "given", recorded)
        done = CliRunner().invoke(
            app, ["train", "--model", "m", *arguments], env={"COLUMNS": "200"}
        )
    if not made:
        raise (
            done.exception
            if isinstance(done.exception, ValueError)
            else AssertionError(done.output)
        )
    return made[0]


def of_recipe(folder, **fields):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(GIVEN | fields))
    return Recipe.from_yaml(folder / "recipe.yaml")


def test_the_fields_that_are_lists_are_seen():
    assert {
        "memory",
        "columns",
        "lora_rank_pattern",
        "lora_trainable_tokens",
        "data",
        "trackers",
        "lora_layers",
    } <= set(LISTED)
    assert "max_grad_norm" in FLOATS and "rank_timeout" in FLOATS


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_a_list_is_read_alike_however_it_is_given(name, tmp_path):
    first, second = two_values(name)
    rest = [] if name == "data" else ["--data", "d"]
    ways = [
        of_flags(*rest, flag(name), first, flag(name), second),
        of_flags(*rest, flag(name), f"{first},{second}"),
        of_flags(*rest, flag(name), f"{first}, {second}"),
        of_recipe(tmp_path, **{name: f"{first}, {second}"}),
        of_recipe(tmp_path, **{name: [first, second]}),
    ]
    values = [getattr(way, name) for way in ways]
    assert values == [values[0]] * len(ways) and len(values[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_one_value_is_read_alike_however_it_is_given(name, tmp_path):
    first, _ = two_values(name)
    rest = [] if name == "data" else ["--data", "d"]
    ways = (
        of_flags(*rest, flag(name), first),
        of_recipe(tmp_path, **{name: first}),
        of_recipe(tmp_path, **{name: [first]}),
    )
    values = [getattr(way, name) for way in ways]
    assert values == [values[0]] * len(ways)


@pytest.mark.parametrize(
    "name", [name for name in LISTED if name not in ("data", "validation_data")]
)
def test_an_empty_entry_is_refused_with_its_field(name, tmp_path):
    first, _ = two_values(name)
    for read in (
        lambda: of_flags("--data", "d", flag(name), f"{first},"),
        lambda: of_recipe(tmp_path, **{name: f"{first},"}),
    ):
        with pytest.raises(
            ConfigurationError,
            match=rf"^{name}='.*,': an empty entry beside a comma; leave out the comma",
        ):
            read()


@pytest.mark.parametrize(
    "text, values",
    [
        ("a,b", ["a", "b"]),
        (" a , b ", ["a", "b"]),
        (r"layers\.\d{1,2}\.q_proj", [r"layers\.\d{1,2}\.q_proj"]),
        (r".*\.[q,v]_proj,up_proj", [r".*\.[q,v]_proj", "up_proj"]),
        ("(?:a,b)=3,c=4", ["(?:a,b)=3", "c=4"]),
        (r"\,", [","]),
        (r"a\,b,c", ["a,b", "c"]),
        (r"\(,\)", [r"\(", r"\)"]),
        ("(,a", ["(", "a"]),
        ("a],[b", ["a]", "[b"]),
        (" ", [" "]),
        ("\n", ["\n"]),
        ("\\", ["\\"]),
        ("", [""]),
    ],
)
def test_a_comma_within_brackets_or_behind_a_backslash_is_part_of_a_value(text, values):
    assert split_values(text) == values


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", [",", "a,b", "a{1,2}", "<|x,y|>", "(,)", "plain", ",,", "[,", r"\d,"]
)
def test_a_value_with_a_comma_can_be_given(value, tmp_path):
    """In a list of YAML as it is, as a flag or a text behind a backslash."""
    assert split_values(as_one_value(value)) == [value]
    again = [
        of_flags("--data", "d", "--lora-trainable-tokens", as_one_value(value)),
        of_recipe(tmp_path, lora_trainable_tokens=as_one_value(value)),
        of_recipe(tmp_path, lora_trainable_tokens=[value]),
    ]
    assert [way.lora_trainable_tokens for way in again] == [[value]] * 3
    said = Wording({"lora_trainable_tokens": False})(
        f"lora_trainable_tokens={[value]!r}: no such token"
    )
    words = shlex.split(said.removesuffix(": no such token"))
    assert of_flags("--data", "d", *words).lora_trainable_tokens == [value]


def test_a_pattern_with_commas_is_one_pattern(tmp_path):
    pattern = r"model\.layers\.\d{1,2}\.(q|v)_proj"
    for read in (
        of_flags("--data", "d", "--lora-target-modules", pattern),
        of_recipe(tmp_path, lora_target_modules=pattern),
    ):
        assert read.lora_target_modules == pattern
    for given in ({f"{pattern}": 8}, f"{pattern}=8", [f"{pattern}=8"]):
        assert of_recipe(tmp_path, lora_rank_pattern=given).lora_rank_pattern == {pattern: 8}


def test_a_pattern_may_hold_the_sign_of_its_value(tmp_path):
    assert of_flags("--data", "d", "--lora-rank-pattern", "(?=q).*=8").lora_rank_pattern == {
        "(?=q).*": 8
    }


@pytest.mark.parametrize(
    "given, said", [("q_proj", "'q_proj' is not NAME=VALUE"), ("q=1,q=2", "'q' is named twice")]
)
def test_a_pair_is_told_what_it_lacks(given, said):
    with pytest.raises(ConfigurationError, match=f"^lora_rank_pattern=.*: {said}"):
        Recipe(**GIVEN, lora_rank_pattern=given)


@pytest.mark.slow
def test_a_file_with_a_comma_in_its_name_is_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.jsonl").touch()
    assert of_flags("--data", "a,b.jsonl").data == "a,b.jsonl"
    assert [source.path for source in of_flags("--data", "a,b.jsonl=2").data] == ["a,b.jsonl"]
    assert [source.path for source in of_flags("--data", r"a\,b.jsonl,c.jsonl").data] == [
        "a,b.jsonl",
        "c.jsonl",
    ]
    assert [(source.path, source.weight) for source in of_flags("--data", "c=2, d").data] == [
        ("c", 2.0),
        ("d", 1.0),
    ]


@pytest.mark.parametrize("name", FLOATS)
def test_a_number_is_written_as_in_a_recipe(name):
    """Which of them may be infinite the configuration says, and not the command line."""
    try:
        assert (
            getattr(of_flags("--data", "d", flag(name), ".inf"), name) is None
            and name == "max_grad_norm"
        )
    except ConfigurationError as error:
        assert str(error).startswith(f"{name}=inf: ")


def test_every_list_is_a_flag_that_may_be_repeated():
    from typer.main import get_command

    options = {option.name: option for option in get_command(app).commands["train"].params}
    fields = {field.name for field in dataclasses.fields(Recipe)}
    assert [name for name in fields if options[name].multiple] == [
        name for name in fields if name in {*LISTED, SECTIONS_FIELD}
    ]


@pytest.mark.parametrize(
    ("given", "size"),
    [(24, 24.0), ("24", 24.0), ("16GB", 16.0), ("16 gib", 17.179869184), ("0.5TB", 500.0)],
)
def test_a_size_is_gigabytes_or_has_a_unit(given, size):
    assert ChronicalsConfig(gpu_memory=given).gpu_memory == size
    assert ChronicalsConfig(cache_memory=given).cache_bytes == round(size * 10**9)


@pytest.mark.parametrize("given", [0, -1, "0", "-5GB", "10001", "11 TB", "nan", "lots", "8 bits"])
@pytest.mark.parametrize("name", ["gpu_memory", "cache_memory"])
def test_a_size_that_is_none_is_refused(name, given):
    with pytest.raises(ConfigurationError, match=rf"^{name}=[^\n]*$"):
        ChronicalsConfig(**{name: given})


def test_off_of_yaml_is_off(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("fit: off\n")
    assert ChronicalsConfig.from_yaml(file).fit == "off"
    ChronicalsConfig(fit="off", gpu_memory="16GiB").to_yaml(file)
    assert ChronicalsConfig.from_yaml(file).fit == "off"
    assert ChronicalsConfig.from_yaml(file).card_bytes == 16 * 2**30
