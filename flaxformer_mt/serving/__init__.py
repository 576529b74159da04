"""Translation over HTTP: models with the requests that wait for them, and the routes."""
