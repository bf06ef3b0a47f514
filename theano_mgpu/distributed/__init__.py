"""Several processes: the process group, and the checks that all of them do the same."""
