"""Code that runs in the process of a row, possibly in the peers' environment: needs only torch and the stdlib."""
