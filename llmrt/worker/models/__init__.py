"""The supported architectures."""
