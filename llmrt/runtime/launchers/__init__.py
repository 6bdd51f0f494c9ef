"""One file per `backend=` value: how the workers of an engine come to be."""
