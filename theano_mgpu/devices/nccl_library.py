"""NCCL, called through ctypes."""
from __future__ import annotations

import ctypes
import functools
from typing import Any, Sequence

from ..compat.cuda_libraries.search import address
from ..compat.cuda_libraries.versions import dotted, nccl_version
from ..errors import ExchangeError
from .cuda_driver import ADDRESS, INTEGER, Driver, declared, load_driver

# The types of nccl.h that NCCL adds as NumPy does. It adds float16 with less precision.
DTYPES = {'int8': 0, 'uint8': 1, 'int32': 2, 'uint32': 3, 'int64': 4, 'uint64': 5, 'float32': 7, 'float64': 8}
SUM = 0  # the only reduction that is used: the maximum and the minimum drop NaN, which Theano keeps
OLDEST = (2, 7)  # the first that sends messages from one device to another


class UniqueId(ctypes.Structure):
    """The identity of a clique of ranks. NCCL takes it by value."""

    _fields_ = [('internal', ctypes.c_char * 128)]


# The functions of NCCL and of the driver that nccl.cpp calls, in its order.
FUNCTIONS = ('cuCtxPushCurrent_v2', 'cuCtxPopCurrent_v2', 'cuMemcpyDtoDAsync_v2', 'cuEventCreate', 'cuEventRecord',
             'cuEventQuery', 'cuStreamWaitEvent', 'ncclGroupStart', 'ncclGroupEnd', 'ncclAllReduce', 'ncclReduce',
             'ncclBroadcast', 'ncclSend', 'ncclRecv', 'ncclCommGetAsyncError', 'ncclCommAbort')
OF_NCCL: dict[str, list[Any]] = {  # the arguments of each function that is called here
    'ncclGetVersion': [ADDRESS], 'ncclGetUniqueId': [ADDRESS],
    'ncclCommInitRank': [ADDRESS, INTEGER, UniqueId, INTEGER],
    **{name: [] for name in FUNCTIONS if name.startswith('nccl')},
}


class Nccl:
    """The functions of a libnccl.so.2; an ExchangeError says if it cannot be loaded, lacks one, or is too old."""

    def __init__(self, path: str, driver: Driver):
        number = INTEGER()
        declared(path, {}).ncclGetVersion(ctypes.byref(number))
        version = nccl_version(number.value)
        if version < OLDEST:
            raise ExchangeError('%s is NCCL %s; %s is the oldest that can be used'
                                % (path, dotted(version), dotted(OLDEST)))
        self._nccl, self.driver = declared(path, OF_NCCL), driver  # not above: an older one lacks functions
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p

    def address(self, name: str) -> int:
        """Return the address of a function of NCCL, or of the driver."""
        return address(self._nccl if name in OF_NCCL else self.driver.library, name) or 0

    def text_of(self, code: int) -> str:
        """Return the text of a code of NCCL, and what NCCL says about its latest error, if anything."""
        texts = [self._nccl.ncclGetErrorString(code)]
        if hasattr(self._nccl, 'ncclGetLastError'):  # since 2.13
            self._nccl.ncclGetLastError.restype = ctypes.c_char_p
            texts.append(self._nccl.ncclGetLastError(None))
        return 'error %d, %s' % (code, ': '.join(text.decode(errors='replace').strip() for text in texts if text))

    def unique_id(self, context: int) -> bytes:
        """Return the identity of a new clique."""
        unique = UniqueId()
        with self.driver.current(context):
            self._check('ncclGetUniqueId', self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        return bytes(unique)

    def connect(self, contexts: Sequence[int], first: int, size: int, unique_id: bytes) -> list[int]:
        """Return a communicator for each device of this process, by primary contexts; wait for all of the clique.

        `first` is the place of the first device among the `size` devices of all processes, whose `unique_id` is the
        same.
        """
        comms, unique = (ADDRESS * len(contexts))(), UniqueId.from_buffer_copy(unique_id)
        self._check('ncclGroupStart', self._nccl.ncclGroupStart())
        codes = []
        for i, context in enumerate(contexts):
            with self.driver.current(context):  # NCCL takes the device that is current
                place = ctypes.byref(comms, i * ctypes.sizeof(ADDRESS))
                codes.append(self._nccl.ncclCommInitRank(place, size, unique, first + i))
        with self.driver.current(contexts[0]):
            codes.append(self._nccl.ncclGroupEnd())
        self._check('ncclCommInitRank', next(filter(None, codes), 0))
        return list(comms)

    def _check(self, name, code):
        if code:
            raise ExchangeError('%s gives %s' % (name, self.text_of(code)))


@functools.lru_cache(maxsize=None)
def load(path: str) -> Nccl:
    return Nccl(path, load_driver())
