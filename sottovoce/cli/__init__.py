"""The command line: one file a command. Light until a command runs: no torch and no numpy for `--help`."""
