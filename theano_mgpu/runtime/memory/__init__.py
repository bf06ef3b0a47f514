"""An estimate of the memory that a step takes on each device: a dry run of it, with arrays that have no content."""
