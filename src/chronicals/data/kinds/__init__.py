"""Kinds of rows: which fields a row has, and the one form in which each kind goes on."""
