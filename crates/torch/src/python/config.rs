//! The configuration that Python gives, which is what the environment says.

use super::calls::plugin_error;
use crate::gil::warn;
use crate::setup::Kernels;
use oxitorch_engine::{AbsentDevice, CacheOptions, Mode, SharedCache};
use oxitorch_pjrt as pjrt;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

pub(super) fn optional<'py, T: FromPyObjectOwned<'py>>(
    config: &Bound<'py, PyDict>,
    key: &str,
) -> PyResult<Option<T>> {
    match config.get_item(key)? {
        Some(v) if !v.is_none() => v.extract().map(Some).map_err(Into::into),
        _ => Ok(None),
    }
}

/// Where compiled programs are kept, as the configuration says.
pub(super) fn cache_options(config: &Bound<'_, PyDict>) -> PyResult<CacheOptions> {
    let default = CacheOptions::default();
    let wait: Option<u64> = optional(config, "cache_wait_s")?;
    let shared: Option<String> = optional(config, "cache_shared")?;
    let settings: Option<Vec<(String, String)>> = optional(config, "cache_shared_settings")?;
    let open = |place: String| {
        let refused = |e| PyValueError::new_err(format!("OXITORCH_CACHE_SHARED={place}: {e}"));
        SharedCache::open(&place, settings.as_deref().unwrap_or_default()).map_err(refused)
    };
    Ok(CacheOptions {
        disk: optional(config, "cache_dir")?,
        disk_bytes: optional(config, "cache_bytes")?.unwrap_or(default.disk_bytes),
        shared: shared.map(open).transpose()?,
        wait: wait.map_or(default.wait, Duration::from_secs),
        max_loaded: optional(config, "loaded_programs")?.unwrap_or(default.max_loaded),
        max_loaded_bytes: optional(config, "loaded_bytes")?.unwrap_or(default.max_loaded_bytes),
        places: default.places,
        environment: optional(config, "compiler_environment")?.unwrap_or_default(),
        warn,
    })
}

/// Options of a client for GPUs, by the plugin's names.
pub(super) fn cuda_options(config: &Bound<'_, PyDict>) -> PyResult<Vec<(String, pjrt::NamedValue)>> {
    let visible: Option<Vec<i64>> = optional(config, "cuda_visible_devices")?;
    let fraction: Option<f32> = optional(config, "cuda_memory_fraction")?;
    let preallocate: Option<bool> = optional(config, "cuda_preallocate")?;
    let options = [
        ("visible_devices", visible.map(pjrt::NamedValue::Ints)),
        ("memory_fraction", fraction.map(pjrt::NamedValue::Float)),
        ("preallocate", preallocate.map(pjrt::NamedValue::Bool)),
    ];
    Ok(options.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect())
}

/// The device that is not there, if the configuration describes one.
pub(super) fn absent_device(config: &Bound<'_, PyDict>) -> PyResult<Option<AbsentDevice>> {
    optional::<Bound<'_, PyDict>>(config, "absent")?.as_ref().map(describe_absent).transpose()
}

pub(super) fn describe_absent(device: &Bound<'_, PyDict>) -> PyResult<AbsentDevice> {
    let lacks = |key| PyValueError::new_err(format!("the description of the device lacks `{key}`"));
    let platform: String = optional(device, "platform")?.ok_or_else(|| lacks("platform"))?;
    Ok(AbsentDevice {
        platform: platform.parse().map_err(|e| plugin_error(&e))?,
        kind: optional(device, "kind")?.ok_or_else(|| lacks("kind"))?,
        memory: optional(device, "memory_bytes")?.ok_or_else(|| lacks("memory_bytes"))?,
        reads_as: optional(device, "reads_as")?.unwrap_or(0.0),
        steps: optional(device, "steps")?.unwrap_or(u64::MAX),
        marked: optional(device, "marked")?.unwrap_or(false),
    })
}

pub(super) fn eager_mode(name: &str) -> PyResult<Mode> {
    Mode::parse(name).ok_or_else(|| {
        PyValueError::new_err(format!("eager mode must be 'fused', 'strict' or 'debug', got '{name}'"))
    })
}

/// Which of torch's kernels programs may call.
pub(super) fn kernels(choice: &str) -> PyResult<Kernels> {
    match choice {
        "auto" => Ok(Kernels::Faster),
        "1" => Ok(Kernels::All),
        "0" => Ok(Kernels::None),
        _ => Err(PyValueError::new_err(format!("library must be 'auto', '1' or '0', got '{choice}'"))),
    }
}

/// Whether a fallback policy makes an op without a lowering an error.
pub(super) fn refuses(policy: &str) -> PyResult<bool> {
    match policy {
        "warn" => Ok(false),
        "error" => Ok(true),
        _ => Err(PyValueError::new_err(format!("fallback must be 'warn' or 'error', got '{policy}'"))),
    }
}
