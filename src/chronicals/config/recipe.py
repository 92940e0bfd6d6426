"""Recipe: a configuration together with the model and the data, as the command line and YAML files have it."""

from __future__ import annotations

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass

from chronicals.config.config import ChronicalsConfig, remembers_what_was_set


@remembers_what_was_set
@dataclass(kw_only=True, config=pydantic.ConfigDict(extra="forbid", validate_default=True))
class Recipe(ChronicalsConfig):
    """A run that can be repeated from a file: ``chronicals train recipe.yaml``."""

    model: str = Field(description="Folder or hub name of the model to start from")
    data: str = Field(description="File to train on: .jsonl (chat, prompt/completion, text) or plain text")
    validation_data: str | None = Field(default=None, description="File to evaluate on")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model")

    def config(self) -> ChronicalsConfig:
        """The configuration without the model and the data; one epoch where neither steps nor epochs were given."""
        own = {"model", "data", "validation_data", "trust_remote_code"}
        chosen = {name: getattr(self, name) for name in self.explicit - own}
        if not {"max_steps", "num_epochs"} & self.explicit:
            chosen["num_epochs"] = 1
        return ChronicalsConfig(**chosen)
