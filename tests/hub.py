"""A stand-in for the hub's client."""

import json
from types import SimpleNamespace

import huggingface_hub
from huggingface_hub import RepoUrl
from huggingface_hub.utils import filter_repo_objects


class Hub:
    """In the place of ``HfApi``: keeps what is uploaded, by its path in the repository.

    Attributes:
        made: repositories that were asked for, and whether as private ones.
        there: repositories that exist, and whether they are private.
        refusal: the error that an upload ends with, where one is to.
    """

    def __init__(self, there=(), refusal=None):
        self.made = {}
        self.there = dict(there)
        self.files = {}
        self.refusal = refusal

    def whoami(self):
        return {"name": "someone", "orgs": [{"name": "lab"}]}

    def create_repo(self, name, private, exist_ok):
        self.made[name] = private
        full = name if "/" in name else f"someone/{name}"
        self.there.setdefault(full, private)
        return RepoUrl(f"https://huggingface.co/{full}")

    def repo_info(self, name):
        return SimpleNamespace(private=self.there[name])

    def upload_folder(self, repo_id, folder_path, path_in_repo, ignore_patterns):
        self._refuse()
        names = [
            str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()
        ]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            self.files[f"{path_in_repo}/{name}".strip("/")] = (folder_path / name).read_bytes()

    def upload_file(self, repo_id, path_or_fileobj, path_in_repo):
        self._refuse()
        content = (
            path_or_fileobj if isinstance(path_or_fileobj, bytes) else path_or_fileobj.read_bytes()
        )
        self.files[path_in_repo] = content

    def _refuse(self):
        if self.refusal is not None:
            raise self.refusal

    def json(self, name):
        return json.loads(self.files[name])

    def take_the_place(self, monkeypatch):
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        return self
