"""HOW it runs: inside a worker process; the only place that may import torch."""
