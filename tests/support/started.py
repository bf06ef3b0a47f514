"""The kind of each test for a report of JUnit: what it starts, and where its time goes (.ci/test-times)."""
import os
import sys

LAUNCHERS = {'mpirun', 'mpiexec', 'srun', 'launch', '--processes'}
_words = []  # of the processes that this one has started


def watch():
    """Note the words of each process that is started from now on."""
    sys.addaudithook(lambda event, arguments: _words.append(list(map(str, arguments[1])))
                     if event == 'subprocess.Popen' else None)


def kind(item):
    """Return the kind of a test that has just run: the most expensive thing that it did. Forget what was started."""
    programs = [{os.path.basename(word) for word in words} for words in _words]
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
