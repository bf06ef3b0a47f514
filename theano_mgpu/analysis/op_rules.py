"""A registry of functions by the classes of Theano's ops."""


class OpRules:
    """The rule of each op: that of its class, or of the nearest class that its class is made from."""

    def __init__(self):
        self._functions = {}

    def rule(self, *classes):
        """Register a function for ops of these classes, as a decorator."""
        def register(function):
            self._functions.update(dict.fromkeys(classes, function))
            return function
        return register

    def of(self, op):
        """The function for an op; None if there is none."""
        return next((self._functions[cls] for cls in type(op).__mro__ if cls in self._functions), None)
