"""A configuration of another tool as it stands in a file: its settings, each with its line."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from chronicals.config import ConfigurationError
from chronicals.config.foreign import OBJECTIVE_NAMES

AXOLOTL, LLAMA_FACTORY, TRL = TOOLS = ("Axolotl", "LLaMA-Factory", "TRL")

KEYS: dict[str, tuple[str, str]] = {
    AXOLOTL: (
        "base_model",
        "datasets pretraining_dataset sequence_len micro_batch_size adapter",
    ),
    LLAMA_FACTORY: (
        "model_name_or_path model",
        "stage finetuning_type template cutoff_len dataset dataset_dir do_train export_dir "
        "train_dataset infer_backend adapter_name_or_path dist_config",
    ),
    TRL: (
        "model_name_or_path",
        "dataset_name datasets dataset_config use_peft reward_funcs max_length "
        "per_device_train_batch_size",
    ),
}
"""Keys of a tool's configuration: one of the first and one of the second are in each."""

BLOCKS = ("trl", "peft", "peft_config", "quant_config")
"""Mappings whose entries are settings of their own: Axolotl's of GRPO and LoftQ, LLaMA-Factory's of
adapters and bits."""

OF_COMMAND = re.compile(
    r"\btrl\s+(?P<trl>sft|dpo|kto|reward|grpo|rloo)\b"
    r"|\b(?P<script>sft|dpo|kto|reward_modeling|reward|grpo|rloo)\w*\.py\b"
    r"|\b(?P<factory>llamafactory-cli\s+train)\b"
    r"|\b(?P<axolotl>axolotl\s+train)\b"
)
"""What starts a training on a command line."""

PROCESSES = ("num_processes", "nproc_per_node")
"""Options of launchers that say how many processes there are on a machine."""

OF_LAUNCHER = (*PROCESSES, "accelerate_config", "config_file")
"""Options that ``trl`` hands to accelerate."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of another tool.

    Attributes:
        name: as the file has it, with the block it stands in: ``trl.num_generations``.
        value: its value.
        line: of the file, from 1.
        file: the file it stands in.
    """

    name: str
    value: Any
    line: int
    file: Path

    @property
    def key(self) -> str:
        """The name without its block, and with underscores."""
        return self.name.rpartition(".")[2].replace("-", "_")

    @property
    def place(self) -> str:
        """File and line, as messages have them."""
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Theirs:
    """A configuration of another tool.

    Attributes:
        tool: one of ``TOOLS``.
        settings: in the order of the file; of a name that stands twice, the last is left.
        file: where they were read.
        command: TRL's command, such as ``dpo``, where the file is a command line.
        cards: processes that the command line starts; None if it does not say.
    """

    tool: str
    settings: tuple[Setting, ...]
    file: Path
    command: str | None = None
    cards: int | None = None

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these settings that is set."""
        values = {setting.key: setting.value for setting in self.settings}
        return next((values[name] for name in names if values.get(name) is not None), default)

    def __contains__(self, name: str) -> bool:
        """Return whether a setting is there, if it is set to nothing, too."""
        return any(setting.key == name for setting in self.settings)

    @property
    def objective(self) -> str:
        """Name of our objective, or of theirs where there is none of ours."""
        named = str(self.get("rl", "stage", default=self.command or "sft")).lower()
        if self.tool == AXOLOTL:
            if self.get("reward_model") is True:
                named = "reward"
            elif self.get("pretraining_dataset") or self._kinds() <= {"completion", "pretrain"}:
                named = "pretraining"
        elif self.tool == LLAMA_FACTORY and named == "dpo":
            loss = self.get("pref_loss", default="sigmoid")
            named = loss if loss in ("orpo", "simpo", "ipo") else named
        elif self.tool == TRL and self.command is None:
            if self.get("reward_funcs", "num_generations") is not None:
                named = "grpo"
            elif self.get("desirable_weight", "undesirable_weight") is not None:
                named = "kto"
            elif self.get("beta", "precompute_ref_log_probs") is not None:
                named = "dpo"
        if self.get("loss_type") == "ipo":
            named = "ipo"
        return OBJECTIVE_NAMES.get(named, named)

    def _kinds(self) -> set[str]:
        """Return the kinds of rows of Axolotl's data sets; those that are not texts are ``rows``."""
        entries = self.get("datasets")
        listed = entries if isinstance(entries, list) else []
        kinds = [entry.get("type") for entry in listed if isinstance(entry, dict)]
        return {kind if isinstance(kind, str) else "rows" for kind in kinds} or {"rows"}


def read(file: Path) -> Theirs:
    """Read a configuration in YAML, or a file with a command line.

    Raises:
        ConfigurationError: the file cannot be read, or is of none of the tools.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{file}: cannot be read ({reason})") from None
    if file.suffix not in (".yaml", ".yml"):
        command = next(commands(text), None)
        if command is not None:
            return _of_command(*command, file)
    settings = tuple(_of_yaml(text, file))
    return Theirs(_tool(settings, file), settings, file)


def _tool(settings: tuple[Setting, ...], file: Path) -> str:
    """Return the tool whose keys these are.

    Raises:
        ConfigurationError: they are those of none.
    """
    names = {setting.key for setting in settings}
    for tool, (models, others) in KEYS.items():
        if names & {*models.split()} and names & {*others.split()}:
            return tool
    looked_for = "; ".join(
        f"{tool}: {' or '.join(models.split())}, with one of {', '.join(others.split())}"
        for tool, (models, others) in KEYS.items()
    )
    found = ", ".join(sorted(names)) or "none"
    raise ConfigurationError(
        f"{file}: no configuration of {', '.join(TOOLS)}. Keys that were looked for: {looked_for}. "
        f"Keys that are there: {found}"
    )


def _of_yaml(text: str, file: Path) -> Iterator[Setting]:
    """Yield the settings of a YAML mapping; those of ``BLOCKS`` one by one.

    Raises:
        ConfigurationError: it is no YAML mapping.
    """
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file}: not YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise ConfigurationError(f"{file}: expected 'field: value' lines, and found none")
    nodes = {key.value: node for key, node in root.value}
    for key, value in values.items():
        node = nodes.get(key)
        if key in BLOCKS and isinstance(node, yaml.MappingNode) and value:
            for inner, own in value.items():
                yield Setting(f"{key}.{inner}", _number(own), _line_of(inner, node), file)
        else:
            yield Setting(str(key), _number(value), _line_of(key, root), file)


def _line_of(key: Any, mapping: yaml.MappingNode) -> int:
    """Return the line of a key; of one that another mapping gives (``<<``) that of the latter."""
    lines = {node.value: node.start_mark.line + 1 for node, _ in mapping.value}
    return lines.get(str(key), lines.get("<<", mapping.start_mark.line + 1))


def _number(value: Any) -> Any:
    """Return ``2e-4``, which YAML 1.1 reads as a text, as the number that the tools read.

    In a mapping that is done with each value.
    """
    if isinstance(value, dict):
        return {name: _number(one) for name, one in value.items()}
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?e[+-]?\d+", value, re.I):
        return float(value)
    return value


def _of_command(line: int, words: list[str], file: Path) -> Theirs:
    """Return the settings of a command line that starts a training.

    A file that the command names (``--config``, or the configuration of ``llamafactory-cli`` and
    ``axolotl``) is read, too, and its settings are overridden.

    Raises:
        ConfigurationError: a file that it names cannot be read.
    """
    begun = next(i for i in range(len(words)) if OF_COMMAND.search(" ".join(words[: i + 1])))
    start = OF_COMMAND.search(" ".join(words[: begun + 1]))
    assert start is not None
    cards = None
    for name, value in _options(words):  # those before belong to the launcher
        if name in PROCESSES and isinstance(value, int):
            cards = value
    settings: dict[str, Setting] = {}
    for name, value in _options(words[begun + 1 :]):
        if name in OF_LAUNCHER:
            continue
        if name == "config" and isinstance(value, str):
            settings |= {one.name: one for one in _named_file(file, value)}
        else:
            settings[name] = Setting(name, value, line, file)
    named = [word for word in words if word.endswith((".yaml", ".yml"))]
    if (start["factory"] or start["axolotl"]) and named:
        given = {one.name: one for one in _named_file(file, named[0])}
        settings = given | settings
    command = start["trl"] or (start["script"] or "").replace("reward_modeling", "reward") or None
    found = tuple(settings.values())
    if start["trl"] or start["script"]:
        return Theirs(TRL, found, file, command, cards)
    return Theirs(_tool(found, file), found, file, None, cards)


def _named_file(file: Path, name: str) -> list[Setting]:
    """Return the settings of a file that a command names, from its own folder or the present one."""
    path = next((path for path in (file.parent / name, Path(name)) if path.exists()), Path(name))
    try:
        return list(_of_yaml(path.read_text(), path))
    except OSError as error:
        raise ConfigurationError(
            f"{file}: names {name!r}, which cannot be read ({error.strerror})"
        ) from None


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the commands of a shell script that start a training, each with its first line.

    Raises:
        ConfigurationError: a quotation is not closed.
    """
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first = number
        command = lines[number]
        while command.rstrip().endswith("\\") and number + 1 < len(lines):
            number += 1
            command = command.rstrip().removesuffix("\\") + " " + lines[number].strip()
        number += 1
        if command.lstrip().startswith("#") or " --" not in command:
            continue
        if OF_COMMAND.search(command) is None:
            continue
        try:
            yield first + 1, shlex.split(command, comments=True)
        except ValueError as error:
            raise ConfigurationError(f"line {first + 1}: no command line: {error}") from None


def _options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command with their values: several are a list.

    One without a value is true, and false if it begins with ``no_``.
    """
    name = None
    values: list[Any] = []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(_value(word))
            continue
        if name is not None and not values:
            yield name.removeprefix("no_"), not name.startswith("no_")
        elif name is not None:
            yield name, values[0] if len(values) == 1 else values
        option, sign, value = word.removeprefix("--").partition("=")
        name = option.replace("-", "_")
        values = [_value(value)] if sign else []


def _value(word: str) -> Any:
    """Return a word of a command line as YAML has it; one that is no YAML stays a text."""
    try:
        return _number(yaml.safe_load(word))
    except yaml.YAMLError:
        return word
