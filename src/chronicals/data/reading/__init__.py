"""Sources, files, and records: what can be given as data, and how it is read."""
