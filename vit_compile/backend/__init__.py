"""Backend: a traced graph in, captured runnables out. Knows neither models nor images."""
