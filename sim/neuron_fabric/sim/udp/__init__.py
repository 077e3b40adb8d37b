"""Verification of the in-network endpoint as a whole: Ethernet frames in and out, registers by AXI4-Lite.

Read in this order: :mod:`~neuron_fabric.sim.udp.stations` (who is in the network),
:mod:`~neuron_fabric.sim.udp.script` (what is done, as a list of steps) with :mod:`~neuron_fabric.sim.udp.traffic`
(frames of honest workers, and frames that nobody should send), :mod:`~neuron_fabric.sim.udp.oracle` (what the golden
model makes of it), :mod:`~neuron_fabric.sim.udp.scoreboard` (what may and what must come out) and
:mod:`~neuron_fabric.sim.udp.bench` (does the steps and judges). :mod:`~neuron_fabric.sim.udp.live` judges stragglers
whose time is up in the middle of the traffic, :mod:`~neuron_fabric.sim.udp.fabric` a tree of three endpoints.
:mod:`~neuron_fabric.sim.udp.stand_in` is the golden model with ports, in place of the gateware.

All of it knows no simulator.
"""
