"""How the library runs: arrays, threads, locks, interrupts, files, progress, optional packages."""
