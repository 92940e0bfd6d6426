"""The package of peers can be imported."""

from chronicals.benchmark.checkout import find_peers

find_peers()
