"""Columns of the data that an objective needs before a run, and the frozen models that compute them."""
