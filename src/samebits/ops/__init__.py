"""One folder per operator. Adding an operator means adding a folder here and nothing anywhere else."""
