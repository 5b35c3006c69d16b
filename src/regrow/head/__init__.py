"""The head: the single controller between JAX clients and the hosts of the slices.

One thread runs an asyncio loop; every module here is called from it. No jax is imported, no tensor is
kept longer than a transfer needs.

    session    one client: its handles, its requests in their order
    arrays, programs, transfers    what the requests ask for
    buffers    what lives on which hosts, and whether it is lost
    links      commands to the hosts, and what is waited for from them
    epochs     programs across hosts, and the inquest when one fails
    fleet      the slices: processes, channels, membership
    compile    the compiler process and the cache of its blobs
"""
