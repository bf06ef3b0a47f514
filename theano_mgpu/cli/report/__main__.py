"""A probe in a process of its own: ``python -m theano_mgpu.cli.report PROBE ARGUMENTS``.

Its last line, after `MARK`, is for the table of the report; the exit code is 1 for a fault.
"""
import sys

from . import MARK, probes

if __name__ == '__main__':
    well, text = getattr(probes, sys.argv[1])(*sys.argv[2:])
    print(MARK + text)
    sys.exit(not well)
