"""What surrounds the steps of a run: checkpoints, progress, signals, memory, evaluation."""
