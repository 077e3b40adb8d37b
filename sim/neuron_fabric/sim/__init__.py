"""Verification of the gateware: stimulus, golden answers, benches, and the simulators they run in.

Read in this order: :mod:`~neuron_fabric.sim.stimulus` (what is sent), :mod:`~neuron_fabric.sim.oracle` (what the golden
model makes of it), :mod:`~neuron_fabric.sim.scoreboard` (what must come out), :mod:`~neuron_fabric.sim.bench` (drives
and judges one run, in any simulator), :mod:`~neuron_fabric.sim.tops` (the designs that are simulated),
:mod:`~neuron_fabric.sim.build` (Icarus Verilog and Verilator, through cocotb) and
:mod:`~neuron_fabric.sim.amaranth_sim` (Amaranth's own simulator). The in-network endpoint has all of that in
:mod:`neuron_fabric.sim.udp`, the CXL endpoint in :mod:`~neuron_fabric.sim.cxl_stimulus` and
:mod:`~neuron_fabric.sim.cxl_bench`.

``python -m neuron_fabric.sim`` runs the RTL tests, ``python -m neuron_fabric.sim.soak`` the random ones for long.
Environment: ``NEURON_FABRIC_SEED`` is the first random seed, ``WAVES=1`` keeps wave forms, ``NEURON_FABRIC_IVERILOG``
and ``NEURON_FABRIC_VERILATOR`` name the simulators.
"""
