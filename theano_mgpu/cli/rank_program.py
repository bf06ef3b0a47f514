"""The program `theano-mgpu` by its path, for the ranks of a job: ``python -m`` would import from the current folder."""
import os
import sys


def start() -> None:
    """Run the command line as `theano-mgpu` does."""
    if not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = __file__  # no folder: the modules of this one must not hide others of the same names
    sys.argv[0] = 'theano-mgpu'
    try:
        import theano_mgpu
    except ModuleNotFoundError as error:
        if error.name != 'theano_mgpu':
            raise
        # It is not installed: the launcher has found it in its current folder.
        sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)))
        import theano_mgpu  # noqa: F401
    from theano_mgpu.cli import main
    sys.exit(main())


if __name__ == '__main__':
    start()
