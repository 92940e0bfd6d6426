"""``python -m chronicals``: the command line."""

from chronicals.cli.app import main

main()
