"""The command line, as ``python -m theano_mgpu``, or by the path of this file for the ranks of a job.

The ranks need the path: ``python -m`` would import modules from the current folder.
"""
import os
import sys

if __name__ == '__main__':
    if not __package__:
        if not getattr(sys.flags, 'safe_path', False):
            sys.path[0] = __file__  # no folder: the modules of this one must not hide others of the same names
        sys.argv[0] = 'theano-mgpu'
        try:
            import theano_mgpu
        except ModuleNotFoundError as error:
            if error.name != 'theano_mgpu':
                raise
            # It is not installed: the launcher has found it in its current folder.
            sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            import theano_mgpu  # noqa: F401
    from theano_mgpu.cli import main
    sys.exit(main())
