"""Peers of chronicals in a benchmark: other libraries, trained on the same weights and documents.

``chronicals benchmark --against PEER`` imports this package from the checkout. Each peer runs in a
process of its own; nothing is imported here, because some must be imported before torch.
"""
