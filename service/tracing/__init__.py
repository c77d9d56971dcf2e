"""Exports ended calls as OpenTelemetry spans to a collector. Imported only where traces are on."""
