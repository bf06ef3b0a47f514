"""This process as a rank of an MPI job: its number, its messages and its errors."""
