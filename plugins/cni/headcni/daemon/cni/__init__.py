"""The CNI server: the verbs on a socket, in a process that keeps everything warm."""
