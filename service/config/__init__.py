"""The settings tree, and where its values come from."""
