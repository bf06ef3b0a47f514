"""The process as a rank of an MPI job: what the environment says of it, its messages and its errors."""
