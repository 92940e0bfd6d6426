"""The error of the configuration."""


class ConfigurationError(ValueError):
    """A field has a value that is wrong or cannot be honoured here.

    The message names field, value and remedy.
    """
