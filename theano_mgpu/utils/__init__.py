"""Small helpers that do not depend on devices: files, tables, progress bars, processes, threads, compiled C++."""
