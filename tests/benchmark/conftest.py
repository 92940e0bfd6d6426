"""The package of peers can be imported."""

from chronicals.cli.benchmark import find_peers

find_peers()
