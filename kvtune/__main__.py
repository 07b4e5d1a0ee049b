"""`python -m kvtune` is the `kvtune` command."""

from kvtune.autotune.cli.app import main

if __name__ == "__main__":
    main()
