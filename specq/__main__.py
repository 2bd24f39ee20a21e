"""`python -m specq` is the `specq` command."""

from specq.cli import main

if __name__ == "__main__":
    main()
