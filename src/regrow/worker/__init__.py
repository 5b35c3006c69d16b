"""The process on a host of a slice: it owns devices, buffers and loaded programs.

It takes commands from the head (`regrow.channel.commands`) in one order and carries them out in that
order; what must not wait (the end of an epoch, a sign of life, data that another host sends) is
handled at once on the thread that reads the channel.
"""
