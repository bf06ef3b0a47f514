"""Arguments of one compiled function, on its device."""
from theano_mgpu.devices.transfers import DeviceBuffers, fetch


class Sender:
    """The sending of arguments to the device of a function of `compiler.compile_for`."""

    def __init__(self, function):
        self._takes = function.mgpu_takes
        self._buffers = DeviceBuffers(function.mgpu_context)

    def send(self, arguments):
        """Return the arguments as the function takes them, valid until the next call."""
        return [self._buffers.send(i, value) if takes else fetch(value)
                for i, (value, takes) in enumerate(zip(arguments, self._takes))]
