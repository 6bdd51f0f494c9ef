"""What lies between the multiplications of a step, compiled for the processor it runs on."""
