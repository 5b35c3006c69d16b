"""Where the processes of slices come from."""
