"""A run and its folder: the loop, checkpoints, resume, callbacks, trackers, progress and report."""
