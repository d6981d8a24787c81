"""Support code: arguments, names, rows, threads, locks, memory, files and progress bars."""
