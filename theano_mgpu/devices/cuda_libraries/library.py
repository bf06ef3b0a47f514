"""What is known of a library that libgpuarray opens."""
from collections import namedtuple

Library = namedtuple('Library', 'path version shim problem remedy')
Library.__new__.__defaults__ = (None, '', '')
Library.__doc__ = """One of NVIDIA's libraries, as this process uses it.

Attributes
----------
path : str or None
    The file; None if there is none.
version : tuple of int
    ``(12, 9)``; empty if unknown. The driver's is that of the CUDA version that it supports.
shim : str or None
    The small library that libgpuarray gets when it opens the name; None if it gets the file itself.
problem : str
    Why it cannot be used; else empty.
remedy : str
    What to do about it.
"""
