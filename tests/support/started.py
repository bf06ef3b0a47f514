"""The kind of each test, by the processes that it starts, for a report of JUnit (.ci/test-times)."""
import os
import sys

LAUNCHERS = {'mpirun', 'mpiexec', 'srun', 'launch'}
_words = []  # of the processes that this one has started


def watch():
    """Note the words of each process that is started from now on."""
    sys.addaudithook(lambda event, arguments: _words.append(list(map(str, arguments[1])))
                     if event == 'subprocess.Popen' else None)


def kind(item):
    """Return the kind of a test that has just run, by its most expensive work, and forget the processes of it."""
    # A compiler is given folders such as -I/usr/include/python3.11.
    programs = [{os.path.basename(word) for word in words if not word.startswith('-')} for words in _words]
    interpreters = sum(any(word.startswith('python') for word in words) for words in programs)
    compilers = sum(bool(words & {'g++', 'gcc', 'cc1plus'}) for words in programs)
    _words.clear()
    if any(words & LAUNCHERS for words in programs):
        return 'ranks'
    if interpreters:
        return 'programs'
    if item.get_closest_marker('opencl'):
        return 'devices'
    return 'compiles' if compilers else 'no process'
