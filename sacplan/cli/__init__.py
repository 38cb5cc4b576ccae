"""The command line: ``sacplan plan train.py:make --budget 22GiB``."""
