"""Test modules that cocotb runs inside a simulator."""
