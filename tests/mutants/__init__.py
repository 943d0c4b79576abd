"""Things broken on purpose in sentinel/core, each of which must turn a test of tests/core red."""
