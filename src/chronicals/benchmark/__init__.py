"""The benchmark: real tokens per second of any recipe, beside a reference step and the peers.

Nothing is imported here: each arm runs in a process of its own, and some peers must be imported
before torch.
"""
