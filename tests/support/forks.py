"""Forks of this process, for tests."""
import os
import traceback


def in_a_fork(act):
    """Call a function in a fork of this process, and check that it raises nothing."""
    process = os.fork()
    if process == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == 0
