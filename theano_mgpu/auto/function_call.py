"""A call of a `theano.function`, in which something else than Theano computes the graph."""
from __future__ import annotations

from typing import Any, Callable

import theano
from theano.compile.function_module import Function
from theano.gof import vm

from ..parallel_function import check_subset

COMPUTE_SOME = vm.Stack, getattr(vm, 'CVM', vm.Stack)  # virtual machines that can compute some outputs only


class FunctionCall:
    """A call of a function that plain Theano does not compute.

    `Function.__call__` runs with this in place of the function, and with `fn` in place of its compiled graph. So
    containers, defaults, names, and keywords such as ``output_subset``, are the function's own, and wrong arguments
    raise Theano's own errors.

    ``compute(values)`` gets the values of the explicit inputs. It returns all outputs, then the new values of inputs
    that have an update. Where plain Theano has to make the call, it returns a function to call `afterwards`. A call
    without arguments at fault raises no other error than the `failure` of `compute`.
    """

    need_update_inputs = False  # an attribute that Theano reads from `fn`

    def __init__(self, function: Function, compute: Callable[..., Any]) -> None:
        self._function, self._compute = function, compute
        self.failure: Exception | None = None
        self.afterwards: Callable[[], Any] | None = None
        self._inputs = explicit_inputs(function)
        self._before = [container.storage[0] for _, container in self._inputs]

    def run(self, args: Any, kwargs: Any) -> Any:
        """Make the call, and return what plain Theano would return; nothing that counts if there is an `afterwards`."""
        return Function.unwatched_call(self, *args, **kwargs)

    def undo(self) -> None:
        """Put back the values that the containers held before the call."""
        for (_, container), value in zip(self._inputs, self._before):
            container.storage[0] = value

    @property
    def fn(self) -> FunctionCall:
        """The object that Theano calls in place of the compiled graph."""
        return self

    def __call__(self, output_subset: list[int] | None = None) -> list[Any]:
        if output_subset is not None:
            check_subset(output_subset, self._function.n_returned_outputs)
        try:
            return self._outputs(output_subset)
        except Exception as error:
            self.failure = error
            raise

    def _outputs(self, subset):
        outputs = [None] * len(self._function.output_storage)
        values = [container.storage[0] for _, container in self._inputs]
        is_error = subset is not None and not isinstance(self._function.fn, COMPUTE_SOME)
        if is_error or any(value is None and hasattr(spec.variable.type, 'ndim')
                           for value, (spec, _) in zip(values, self._inputs)):
            self.afterwards = lambda: None
            return outputs
        results = self._compute(values)
        if callable(results):
            self.afterwards = results
            return outputs
        n = self._function.n_returned_outputs
        for i in range(n) if subset is None else subset:
            outputs[i] = results[i]
        states = [container for spec, container in self._inputs if spec.update is not None]
        for container, value in zip(states, results[n:]):
            container.storage[0] = value
        return outputs

    def __setitem__(self, item: Any, value: Any) -> None:
        self._function[item] = value

    def __getattr__(self, name: str) -> Any:
        if name == 'position_of_error':  # Theano names the failed node; errors here name their own
            raise AttributeError(name)
        return getattr(self._function, name)


def explicit_inputs(function: Function) -> list[tuple[theano.In, Any]]:
    """Return the inputs of a function that are no shared variables, each an `In` and its container."""
    return [(spec, container) for spec, container in zip(function.maker.expanded_inputs, function.input_storage)
            if not spec.shared]
