"""Support code: arrays, threads, locks, interrupts, files, progress bars, optional packages."""
