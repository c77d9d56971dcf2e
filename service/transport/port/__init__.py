"""Serves one port: its listener, bounds, certificates, and the services that every port has."""
