"""Interrupts of tests: at a line, as Ctrl-C may."""
import sys


def interrupting_at(number, files):
    """Return a trace function that raises KeyboardInterrupt at a line event in some files, as a signal may."""
    seen = [0]

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        seen[0] += event == 'line'
        if seen[0] == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace
    return trace


def interrupted_at_each_line(call, modules, after):
    """Interrupt a call at the first line event in some modules, then at the second one, until it is not interrupted.

    Returns how often it was; calls ``after(number)`` each time.
    """
    number, interrupted, before = 0, True, sys.gettrace()  # a tool that measures coverage goes on afterwards
    while interrupted:
        number += 1
        sys.settrace(interrupting_at(number, [module.__file__ for module in modules]))
        try:
            call()
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        after(number)
    return number - 1
