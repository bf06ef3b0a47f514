"""What `enable` of Theano functions and of Keras models have in common."""
from ..errors import GraphError, in_one_line
from ..options import check_exact_flags


class Enabled:
    """The arguments of an `enable`, and its report. A subclass says what is made meanwhile, and takes part in it.

    Parameters
    ----------
    report : UsageSummary
    strict, verify, always : bool
    tell : callable
        ``tell(text)`` is called with each message for the user.

    Attributes
    ----------
    in_force : Enabled or None
        The one that takes part in what is made now. Each subclass has its own.

    Raises
    ------
    GraphError
        With `strict`, for a flag with which results are not those of one device.
    """

    in_force = None

    def __init__(self, report, strict, verify, always, tell):
        if strict:
            check_exact_flags()
        self.report, self.strict, self.verifies, self.always, self.tell = report, strict, verify, always, tell

    def begin(self):
        """Take part in what is made from now on, in place of the one before; return the report."""
        type(self).in_force = self
        return self.report

    @classmethod
    def end(cls):
        """Leave what is made from now on alone."""
        cls.in_force = None

    def notify(self, name, text):
        """Tell the user about a function or a model; with `strict`, raise a GraphError."""
        if self.strict:
            raise GraphError('%s %s' % (name, text))
        self.tell('%s %s' % (name, text))

    def show_certificate(self, name, verify):
        """Show the Certificate that ``verify()`` returns; the run goes on if there can be none."""
        try:
            certificate = verify()
        except Exception as error:  # of any class: ops raise their own
            self.notify(name, 'cannot be verified: %s' % in_one_line(error))
            return
        certificate.show(name, self.strict)
