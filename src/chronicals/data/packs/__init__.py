"""Packs: which documents share a row of tokens, and the stream of Batches of a run."""
