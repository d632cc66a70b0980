"""Grafana dashboards as code, and the table of the gauges that they show."""
