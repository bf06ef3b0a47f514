"""`theano-mgpu run --explain`: what ran where, what was exchanged, how much memory it takes, and why."""
import json
import os
import sys

from ..errors import MgpuError
from ..jobs import mpi_environment
from ..utils.files import whole_text


def add_arguments(parser):
    """Add the options to a parser."""
    parser.add_argument('--explain', action='store_true',
                        help='at exit, show the plan of each function and model: stages, exchanges, memory, and why')
    parser.add_argument('--json', metavar='FILE', help='write the plans to a file, for programs')


def explain(recorded, args, process):
    """Show the plans that were recorded, or write them to a file; only rank 0 does, in the process of the script.

    Parameters
    ----------
    recorded : list of plan.record.Recorded
    args : argparse.Namespace
    process : int
        Process id of the script.
    """
    if os.getpid() != process or mpi_environment.rank() > 0:
        return
    from ..plan.explain import as_text, explanation  # imports Theano, which the command itself does without
    found = [explanation(each.plan, each.splitter.shapes) for each in recorded]
    if args.json:
        try:
            with whole_text(args.json) as file:
                json.dump(found, file, indent=1)
        except OSError as error:
            raise MgpuError('--json %s cannot be written: %s' % (args.json, error.strerror)) from error
    if args.explain and sys.stderr is not None:
        texts = [as_text(each) for each in found] or ['nothing was divided, so there is no plan: the summary says why']
        print('\n' + '\n\n'.join(texts), file=sys.stderr)
