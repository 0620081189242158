"""The tests. A package, so that `tests.towers` means this folder whatever else is installed."""
