"""What the command `kvgate` runs. A shell that completes a command line waits for nothing that only a run needs."""

import sys


def main() -> int:
    """Run the command line and return the exit code."""
    if sys.argv[1:2] in (["-sc"], ["--shell-completion"]):
        from pipeline.config.completion import complete

        return complete(sys.argv[2:])
    from pipeline.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
