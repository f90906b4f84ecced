"""``python -m pecil``: the command line."""

from pecil.cli import main

if __name__ == "__main__":
    main()
