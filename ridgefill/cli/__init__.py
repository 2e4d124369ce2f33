"""The command line: `ridgefill fit`, `inspect` and `demo`."""
