"""OpenTelemetry traces: calls that have ended as spans, sent to a collector beside them. Imported only where an endpoint
is set."""
