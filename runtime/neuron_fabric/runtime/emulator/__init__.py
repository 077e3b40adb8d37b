"""The emulator: the reducer's rules at speed behind a UDP socket, and the controller that hardware has as well."""
