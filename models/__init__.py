"""The demo models and the script that makes them."""
