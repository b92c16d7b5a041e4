"""XLA's least effort for the CPU, for tests that spend their time compiling and ask not how fast a program is.

The Makefile gives the same to most tests of the device.
"""

import platform

LEAST = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if platform.machine() == "x86_64":
    # Else a value that is computed in two loops may be rounded in two ways: see crates/engine/src/effort.rs.
    LEAST["xla_cpu_max_isa"] = "AVX"
# For `XLA_FLAGS`.
FLAGS = " ".join(f"--{name}={value if isinstance(value, str) else str(value).lower()}" for name, value in LEAST.items())
