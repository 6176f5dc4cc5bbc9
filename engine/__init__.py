"""Whisper in a thimble: sharded weights, small caches, no web.

`Engine` transcribes; the `thimble` command fetches, converts and inspects models.
"""
