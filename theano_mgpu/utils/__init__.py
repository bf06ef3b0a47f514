"""Small helpers that do not depend on devices: files, tables, progress bars, worker processes, compiled C++."""
