"""The processor of this host, as Linux describes it."""
import contextlib
import itertools

CPUINFO = '/proc/cpuinfo'  # Linux has it


def description() -> str:
    """Return Linux's description of the first core, but for its speeds, which vary; empty where there is none."""
    with contextlib.suppress(OSError), open(CPUINFO) as file:
        return ''.join(line for line in itertools.takewhile(str.strip, file)
                       if not line.lower().startswith(('cpu mhz', 'bogomips')))
    return ''
