//! The plugin of `multi_process_plugin` as a library, for tests in Python: `OXITORCH_CPU_PLUGIN` names XLA's.

#![expect(clippy::disallowed_methods, reason = "a plugin is told by the environment")]

use std::env::var;
use std::time::Duration;

use oxitorch_testkit::multi_process_plugin::{Config, table};

/// The flags of XLA that `make test` gives. Which flags a plugin takes is read off its library, and the one that takes these
/// is XLA's.
#[used]
static FLAGS: &[u8] =
    b"xla_backend_optimization_level\0xla_cpu_use_fusion_emitters\0xla_cpu_parallel_codegen_split_count\0xla_cpu_max_isa\0";

/// The symbol by which a plugin is found.
#[unsafe(no_mangle)]
pub extern "C" fn GetPjrtApi() -> *const oxitorch_pjrt_sys::PJRT_Api {
    let seconds = var("OXITORCH_TEST_PATIENCE_S").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    let config = Config {
        cpu_plugin: var("OXITORCH_CPU_PLUGIN").unwrap_or_default().into(),
        devices: 1,
        patience: Duration::from_secs(seconds),
    };
    table(config).unwrap_or_else(|e| {
        eprintln!("OXITORCH_CPU_PLUGIN: {e}");
        std::ptr::null()
    })
}
