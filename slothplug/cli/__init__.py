"""The command line: ``slothplug demo | doctor | verify | run``."""
