"""`mobula dashboard`: the panels of the Grafana dashboards as a local page, from the data of a Prometheus."""
