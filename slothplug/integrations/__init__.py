"""One package for each framework: it reads the framework's settings and calls ``slothplug.patch`` at the right time.

The modules beside the packages are shared by several of them. There is no kernel code here.
"""
