"""What each prompt and each step went through, with times: OpenTelemetry spans and Chrome traces."""
