"""One folder a framework: each translates its configuration and its moment into ``slothplug.patch``. No kernel code.

The files beside the folders are what several of them need.
"""
