"""The endpoints: where HTTP and generation meet."""
