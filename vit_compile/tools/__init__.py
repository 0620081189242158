"""Command line, reports and the demo: thin, on top of everything else."""
