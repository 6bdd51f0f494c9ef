"""The version of llmrt, read by the build and by `llmrt.__version__`."""

__version__ = "0.1.0.dev0"
