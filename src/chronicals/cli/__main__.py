"""``python -m chronicals.cli``, for torchrun."""

from chronicals.cli.app import main

main()
