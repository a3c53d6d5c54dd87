"""What benchmarks of the server share: a model that chats, a server in its own process, and HTTP spoken byte by byte.
"""
