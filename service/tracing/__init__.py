"""OpenTelemetry traces: calls that have ended, as spans, to a collector. Imported only where they are on."""
