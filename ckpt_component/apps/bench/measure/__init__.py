"""What runs in a row's own process, maybe in the peers' environment: torch and the standard library alone."""
