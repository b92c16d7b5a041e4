//! The functions of `oxitorch._core`. Documented for users in `torch.tpu`, which wraps them.

use pyo3::prelude::*;

pub(crate) mod calls;
mod compiler;
mod config;
mod counted;
mod devices;
mod memory;
mod random;
mod settings;
mod shim;
mod start;
mod traced;
mod watching;

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use crate::entries::{Dicts, Entries, Fields, Lists};
    #[pymodule_export]
    use crate::tree::Tree;

    #[pymodule_export]
    use super::compiler::{
        get_allow_excess_precision, get_compiler_options, get_precision, get_precision_override,
        set_allow_excess_precision, set_compiler_options, set_precision,
    };
    #[pymodule_export]
    use super::devices::{
        current_device, cut, device_count, device_name, device_properties, dropped_gradients, label,
        mark_step, platform, set_device, step, synchronize,
    };
    #[pymodule_export]
    use super::memory::{
        empty_cache, get_memory_fraction, mem_get_info, memory_stats, reset_accumulated_memory_stats,
        reset_peak_memory_stats, set_memory_fraction,
    };
    #[pymodule_export]
    use super::random::{get_rng_state, initial_seed, manual_seed, set_rng_state};
    #[pymodule_export]
    use super::settings::{
        allow_programs, fall_back, get_background_compile, get_eager_mode, get_fallback, get_nan_trap,
        get_window, set_background_compile, set_eager_mode, set_fallback, set_nan_trap, set_window,
    };
    #[pymodule_export]
    use super::shim::shim_sources;
    #[pymodule_export]
    use super::start::{
        backward_elsewhere, discover, expect_processes, has_gpu, init, is_absent, is_in_bad_fork, is_started,
        join, may_span, pretend, share_accelerator, shutdown,
    };
    #[pymodule_export]
    use super::traced::{
        bounded, forget_graph, keep_defined, launch_noted, new_graph, no_decomposition, numbered, play_site,
        prepare, replay, site_here, site_of_trace, tensor_place, unwatch,
    };
    #[pymodule_export]
    use super::watching::{
        bench_call_site, explanations, graph, graphs, hold_launches, metrics, metrics_summary, metrics_text,
        note_played, record_flight, remark, reset_metrics, trace_start, trace_stop, within,
    };

    #[pyfunction]
    fn version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// Whether `OXITORCH_CACHE_SHARED` may be a URL.
    #[pyfunction]
    fn has_object_stores() -> bool {
        cfg!(feature = "object-store")
    }

    /// What pages of reports look like, as CSS.
    #[pyfunction]
    fn page_style() -> &'static str {
        oxitorch_cli::STYLE
    }

    #[pyfunction]
    fn run_cli(py: Python<'_>, argv: Vec<String>) -> i32 {
        let facts = std::env::var_os("OXITORCH_CLI_FACTS");
        py.detach(|| oxitorch_cli::run(&argv, facts))
    }
}
