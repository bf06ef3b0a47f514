"""The scripts of call_cases.py and type_cases.py on several ranks: each has the figures of plain Theano."""
import os
import sys
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import theano_mgpu as mgpu

from support import type_cases  # noqa: F401
from support.call_cases import ALONE, WHOLE, scripts
from support.figures import assert_equal


def outcome(script):
    """Run a script by plain Theano, then divided; return a line on the comparison."""
    mgpu.disable()
    expected = list(script())
    report = mgpu.enable(always=True, tell=lambda text: None)
    figures = script()
    try:
        for figure in expected:
            assert_equal(next(figures), figure)
    except Exception:
        return traceback.format_exc()
    is_divided = any(usage.samples for usage in report.usages)
    return 'as in plain Theano' if is_divided == (script not in WHOLE) else str(report)


if __name__ == '__main__':
    for script in scripts():
        if script not in ALONE and script.__name__ in (sys.argv[1:] or [script.__name__]):
            print('%s: %s' % (script.__name__, outcome(script)), flush=True)
