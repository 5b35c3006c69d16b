"""Commands and files on the hosts of slices: by the host agents here, by OpenSSH elsewhere."""
