"""Tracing of prompts and steps: OpenTelemetry spans and Chrome traces."""
