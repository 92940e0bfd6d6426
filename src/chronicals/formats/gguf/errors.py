"""The error of models that GGUF cannot hold."""


class NotExpressible(ValueError):
    """GGUF, or llama.cpp, has no form for a part of the model, which the message names."""
