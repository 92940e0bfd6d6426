"""Expert prediction: router traces, heads that are trained on them, and their recall."""
