"""One model on many machines: which replica gets a request, and replicas behind Ray Serve."""
