"""Rules of the settings that say what is trained on, and what is evaluated on."""

from __future__ import annotations

from typing import Any

from chronicals.config import foreign_data
from chronicals.config.foreign import SOURCE_FIELDS
from chronicals.config.values import exists_here
from chronicals.convert import factory_data
from chronicals.convert.answers import Answer, mapped, not_needed, not_there
from chronicals.convert.factory_data import INDEX
from chronicals.convert.lengths import data_of, rows_of
from chronicals.convert.reading import LLAMA_FACTORY, TRL, Theirs
from chronicals.convert.rules import Rule, always


def _data(value: Any, theirs: Theirs) -> Answer:
    """Return the answer to data sets, whose entries are settings themselves (``conversion``)."""
    data, beside = foreign_data.converted(data_of(theirs), SOURCE_FIELDS)
    most = theirs.get("max_samples")
    if most is not None:
        data = _weighed(data, most)
    subset = theirs.get("dataset_config") if theirs.tool == TRL else None
    split = theirs.get("dataset_train_split") if theirs.tool == TRL else None
    if isinstance(data, str) and (subset or split):
        entry = {"path": data, "subset": subset, "split": split}
        data = [{name: one for name, one in entry.items() if one is not None}]
    return mapped(_unknown_names(theirs), data=data, **beside)


def _unknown_names(theirs: Theirs) -> str:
    """Return what to do about names of LLaMA-Factory's data that no index here has."""
    data = data_of(theirs) if theirs.tool == LLAMA_FACTORY else []
    listed = data if isinstance(data, list) else [data]
    names = [one for one in listed if isinstance(one, str) and not exists_here(one)]
    if not names:
        return ""
    return f"{', '.join(names)}: write the files that {INDEX} names so, which is not here"


def _weighed(data: Any, most: int) -> Any:
    """Return entries with the weight that leaves ``most`` rows of each, where they are here."""
    if isinstance(data, str) and rows_of(data) is None:
        return data
    weighed: list[Any] = []
    for entry in data if isinstance(data, list) else [data]:
        rows = rows_of(entry)
        if rows is None or rows <= most:
            weighed.append(entry)
        else:
            fields = entry if isinstance(entry, dict) else {"path": entry}
            weighed.append({**fields, "weight": most / rows})
    return weighed


def _held_out_data(value: Any, theirs: Theirs) -> Answer:
    listed = value
    if theirs.tool == LLAMA_FACTORY and isinstance(value, str):
        listed = factory_data.entries(value, theirs)
    data, _ = foreign_data.converted(listed, SOURCE_FIELDS)
    return mapped(validation_data=data)


def _pretraining_data(value: Any, theirs: Theirs) -> Answer:
    data, _ = foreign_data.converted(value, SOURCE_FIELDS)
    return mapped(data=data, objective="pretraining")


def _test_split(value: Any, theirs: Theirs) -> Answer | None:
    if theirs.get("eval_strategy", default="no") == "no":
        return not_needed("nothing is evaluated: eval_strategy is off")
    name = theirs.get("dataset_name")
    return mapped(validation_data=[{"path": name, "split": value}])


def _most_rows(value: Any, theirs: Theirs) -> Answer:
    data = data_of(theirs)
    counts = [rows_of(entry) for entry in (data if isinstance(data, list) else [data])]
    if None not in counts:
        said = ", ".join(str(count) for count in counts)
        return mapped(
            f"{value} of {said} rows as a weight of data", data=_data(data, theirs).fields["data"]
        )
    return not_there(
        f"{value} rows of each data set: a weight of data takes a share here; set weight to "
        f"{value} over its number of rows"
    )


DATA_RULES: dict[str, Rule] = {
    "datasets": _data,
    "dataset": _data,
    "dataset_name": _data,
    "train_dataset": _data,
    "pretraining_dataset": _pretraining_data,
    "test_datasets": _held_out_data,
    "eval_dataset": _held_out_data,
    "dataset_config": always(not_needed("it stands in the entry of data")),
    "dataset_train_split": always(not_needed("it stands in the entry of data")),
    "dataset_test_split": _test_split,
    "max_samples": _most_rows,
}
"""Rules of settings that name data, by the name of the setting."""
