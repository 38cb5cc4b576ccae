"""``python -m sacplan`` is the command line."""

from sacplan.cli.main import main

if __name__ == "__main__":
    main()
