"""Small helpers that know nothing of devices: files, tables, progress bars, compiled C++."""
