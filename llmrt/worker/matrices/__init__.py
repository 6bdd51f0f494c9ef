"""Weight matrices in the forms that kernels want, and the choice between them."""
