"""One folder a framework: each translates its configuration and its moment into ``slothplug.patch``. No kernel code."""
