"""Tokens: from a row to token ids and the mask of what is trained."""
