"""Commands on data: convert, inspect, score, replay."""
