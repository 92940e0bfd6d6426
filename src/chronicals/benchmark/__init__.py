"""The meter: real tokens per second of any recipe, beside the floor of its step and beside the peers.

Nothing is imported here: each arm runs in a process of its own, and some peers must be imported before torch is.
"""
