"""Formats of files that hold models: names, layouts, readers and writers, and no model."""
