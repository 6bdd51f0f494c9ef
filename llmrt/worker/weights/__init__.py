"""Reading the tensors of a checkpoint, each rank only its part."""
