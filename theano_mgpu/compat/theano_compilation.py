"""Several modules of C code at a time: g++ compiles for several processes, and several modules of one function."""
from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from typing import Any, Dict

from ..utils import owned, processor, progress
from ..utils.attributes import temporarily
from ..utils.worker_threads import Task, WorkerThreads
from .wrapping import wrap

LOCKS = 'modules.lock'  # in the folder of compiled code; a process locks the byte of the module that it compiles

_lock_files: Dict[str, int] = {}  # path to descriptor; never closed, since that would free all locks of the process


class _Thread(threading.local):
    has_lock = False   # whether the thread has the lock of the module that it is about to compile
    ahead: Any = None  # the Ahead of the function that the thread makes


_thread = _Thread()


def compile_outside_the_lock() -> None:
    """Hold a lock on the one module that g++ compiles, instead of Theano's lock on the whole folder."""
    from theano.gof import cmodule, compilelock

    @wrap(cmodule.ModuleCache)
    def module_from_key(find, self, key, lnk=None, keep_lock=False):
        if key in self.entry_from_key or getattr(compilelock.get_lock, 'n_lock', 0):
            return find(self, key, lnk, keep_lock)
        if _thread.ahead is not None:
            _thread.ahead.begin(self, key)
        with progress.working() if _thread.ahead is None else contextlib.nullcontext(), \
                _module_locked(self.dirname, cmodule.get_module_hash(lnk.get_src_code(), key)) as _thread.has_lock:
            try:
                module = find(self, key, lnk, keep_lock)
                if _thread.ahead is not None and _thread.ahead.bar.n != _thread.ahead.bar.total:
                    _thread.ahead.bar.update(1)  # not for a module that `begin` has not foreseen
                return module
            except BaseException:
                while compilelock.get_lock.n_lock:  # Theano would keep it, and other processes would wait for minutes
                    compilelock.release_lock()
                raise
            finally:
                _thread.has_lock = False

    @wrap(cmodule)
    def output_subprocess_Popen(run, command, **params):
        if not _thread.has_lock:
            return run(command, **params)
        # The folder of the module has a file now. An empty one would be removed by another process.
        held = compilelock.get_lock.n_lock
        for _ in range(held):
            compilelock.release_lock()
        try:
            if _thread.ahead is not None and _thread.ahead.take(command):
                return b'', b'', 0
            return run(command, **params)
        finally:
            for _ in range(held):
                compilelock.get_lock()


@contextlib.contextmanager
def _module_locked(folder, module_hash):
    """Lock a module for this process; yield False where the file system has no locks."""
    path, byte = os.path.join(folder, LOCKS), int(module_hash[-15:], 16)
    if not owned.is_at(_lock_files.get(path, -1), path):  # the folder was emptied, or the program has closed all files
        _lock_files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        _lock_byte(_lock_files[path], byte)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.lockf(_lock_files[path], fcntl.LOCK_UN, 1, byte)


def _lock_byte(file, byte):
    """Lock one byte of a file; say so if this takes long."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):  # either one where another process has it, says POSIX
        with progress.note_if_long(lambda: 'waiting for another process, which compiles the same code for Theano'):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)


def compile_ahead() -> None:
    """Compile several modules of a function at the same time, as many as the flag mgpu.compile_jobs says."""
    import theano
    from theano.gof.vm import VM_Linker

    @wrap(VM_Linker)
    def make_all(original, self, *args, **kwargs):
        jobs = theano.config.mgpu.compile_jobs or len(processor.usable())
        is_on = jobs > 1 and self.c_thunks is not False
        with Ahead(self, jobs) if is_on else contextlib.nullcontext() as ahead, temporarily(_thread, 'ahead', ahead):
            return original(self, *args, **kwargs)


class Ahead(contextlib.ExitStack):
    """The threads that compile the modules of a function before Theano asks for each of them."""

    def __init__(self, linker: Any, jobs: int):
        super().__init__()
        self._linker, self._jobs, self._has_begun = linker, jobs, False
        self.bar = progress.Silent()
        self._compiled: dict[str, Task] = {}  # source -> Task that returns the path

    def begin(self, cache: Any, first: Any) -> None:
        """Begin to compile all modules that are missing in a cache, but for the first one, whose key is `first`."""
        if self._has_begun:
            return
        self._has_begun = True
        self.enter_context(progress.working())
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix='theano_mgpu.'))
        threads = WorkerThreads([_compile] * self._jobs, 'theano_mgpu compile')
        self.callback(threads.close)
        for linker, source in self._missing(cache, first):
            task = threads.submit(Task(linker, source, os.path.join(folder, str(len(self._compiled)))))
            self.callback(task.cancel)
            self._compiled[source.rstrip('\n')] = task
        self.bar = self.enter_context(progress.modules_bar(1 + len(self._compiled)))

    def _missing(self, cache, first):
        from theano.gof.cc import CLinker
        from theano.gof.fg import FunctionGraph
        seen = {first}
        for node in self._linker.schedule(self._linker.fgraph):
            # Where it has no C code. Any other error comes again when Theano itself compiles it.
            with contextlib.suppress(Exception):
                linker = CLinker().accept(FunctionGraph(node.inputs, node.outputs), no_recycling=[])
                key = linker.cmodule_key()
                if key not in seen and key not in cache.entry_from_key:
                    seen.add(key)
                    yield linker, linker.get_src_code()

    def take(self, command: list[str]) -> bool:
        """Put a module that was compiled ahead where a command of g++ would; return whether there was one."""
        source, = [word for word in command if word.endswith('mod.cpp')]
        with open(source) as file:
            task = self._compiled.pop(file.read().rstrip('\n'), None)
        if task is None or task.exception() is not None:  # then Theano compiles it, and reports the error
            return False
        shutil.move(task.result(), command[command.index('-o') + 1])
        return True


def _compile(linker, source, folder):
    """Compile the source of a CLinker into a new folder by g++; return the path of the result."""
    from theano.gof.cmodule import get_lib_extension
    os.mkdir(folder)
    name = linker.get_dynamic_module().code_hash
    linker.c_compiler().compile_str(name, source, folder, linker.header_dirs(), linker.lib_dirs(), linker.libraries(),
                                    linker.compile_args(), py_module=False)
    return os.path.join(folder, '%s.%s' % (name, get_lib_extension()))
