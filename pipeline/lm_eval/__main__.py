"""`python -m pipeline.lm_eval run --model kvgate --model_args bundle=DIR --tasks ...`: lm-eval's own command line."""

import sys

from stages.core.errors import Refusal, exit_code, required_libraries


def main() -> int:
    try:
        with required_libraries():
            from pipeline.lm_eval.model import cli_evaluate
        cli_evaluate()
    except Refusal as error:
        for line in str(error).splitlines():
            print(f"pipeline.lm_eval: error: {line}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
