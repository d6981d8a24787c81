"""Entry point of ``python -m proofs_check``: run the checks and print the verdicts."""

from proofs_check.report import main

if __name__ == "__main__":
    raise SystemExit(main())
