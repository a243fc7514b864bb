"""HTTP in, text out: the front end, which knows the engine only through shm_transport."""
